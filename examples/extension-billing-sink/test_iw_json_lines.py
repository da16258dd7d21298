"""The sink by itself."""

import json
from pathlib import Path

import pytest
from iw_json_lines import JsonLines, json_lines

from inference_worker.errors import SinkUnavailable
from inference_worker.extensions import BillingSinkParts
from inference_worker.gates.parameters import Parameters
from inference_worker.ports import Delivered


def sink(path: Path) -> JsonLines:
    return json_lines(
        BillingSinkParts(
            given=Parameters({"path": str(path)}, "BILLING_SINK_PARAMETERS"),
            url=None,
            now=lambda: 0.0,
            tls=None,
            deployment_id="d",
            replica_id="r",
        )
    )


async def test_events_are_appended_one_a_line(tmp_path: Path) -> None:
    written = sink(tmp_path / "usage.jsonl")

    assert await written.send([b'{"id": 1}', b'{"id": 2}']) == Delivered()
    assert await written.send([b'{"id": 3}']) == Delivered()

    lines = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 3]


async def test_a_file_that_cannot_be_written_is_tried_again_later(tmp_path: Path) -> None:
    with pytest.raises(SinkUnavailable, match="No such file or directory"):
        await sink(tmp_path / "nowhere" / "usage.jsonl").send([b"{}"])
