"""docs/many-queues.md has every gate, key, policy, code and flag that there is, and its documents are right."""

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from inference_worker.config import documents
from inference_worker.config.documents import (
    ANSWER_TRANSFORM_TYPES,
    GATE_TYPES,
    KINDS,
    MERGE_TYPES,
    TRANSFORM_TYPES,
    read_documents,
)
from inference_worker.config.process_flags import FLAGS
from inference_worker.gates import aimd, basic, combined, from_metrics, quota, redis_gates, tiers
from inference_worker.gates.making import gate_problems
from inference_worker.lanes import LANES
from inference_worker.llmd_results import ResultCode
from inference_worker.transforms import making as transforms
from inference_worker.transforms.making import transforms_of

PAGE = (Path(__file__).parents[2] / "docs" / "many-queues.md").read_text()
ROWS = {name: row for row in PAGE.splitlines() if (name := "".join(re.findall(r"^\| `([\w-]+)`", row)))}


def asked_in(module: object) -> set[str]:
    """The names of parameters that its functions read."""
    asks = r'\.(?:text|text_or_off|texts|whole|number|seconds|switch|choice|inner|gate|gates|words|has)\(\s*"([a-z_]+)"'
    return set(re.findall(asks, inspect.getsource(module)))  # type: ignore[arg-type]  # A module.


def test_every_gate_has_its_row() -> None:
    assert [name for name in GATE_TYPES if name not in ROWS] == []


def test_every_transform_has_its_row_and_every_parameter() -> None:
    assert [name for name in (*TRANSFORM_TYPES, *ANSWER_TRANSFORM_TYPES) if name not in ROWS] == []
    assert [name for name in sorted(asked_in(transforms)) if f"`{name}`" not in PAGE] == []


def test_every_policy_lane_kind_and_error_code_is_there() -> None:
    named = [*MERGE_TYPES, *LANES, *KINDS, *get_args(ResultCode)]

    assert [name for name in named if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("module", [aimd, basic, combined, from_metrics, quota, redis_gates, tiers])
def test_every_parameter_of_a_gate_is_there(module: object) -> None:
    assert [name for name in sorted(asked_in(module)) if f"`{name}" not in PAGE] == []


def test_every_key_of_the_documents_is_there() -> None:
    # Of the documents of pools and of transforms, which stand there as examples.
    shown = {"id", "workers", "name", "type", "parameters", "requestTransforms", "responseTransforms"}

    assert [name for name in sorted(asked_in(documents) - shown) if f"`{name}`" not in PAGE] == []
    assert [name for name in sorted(shown) if f'"{name}"' not in PAGE] == []


def test_its_documents_are_right() -> None:
    (queues,) = re.findall(r"cat > queues\.json <<'END'\n(.*?)\nEND\n", PAGE, re.DOTALL)
    pools, transforms = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    read = read_documents(
        "redis-sortedset",
        json.dumps({"url": "redis://redis", **json.loads(queues)}),
        pools,
        '{"type": "tier-priority"}',
        transforms,
        gate_problems=gate_problems,
    )

    assert len(read.transport.queues) == 2
    assert read.pools[0].workers == 64
    made = transforms_of(read)
    assert [*made.requests, *made.answers] == ["stored", "audio", "public"]


def test_every_flag_that_it_names_is_one() -> None:
    flags = {f"--{flag.name}" for flag in FLAGS}
    theirs = {"--redis", "--pubsub", "--port", "--sorted-set", "--help"}

    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE)) - flags - theirs == set()
