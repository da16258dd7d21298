"""Metrics of every server that is known; what is missing is None, and never an idle server."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from inference_worker.scraping import (
    LONGEST_BODY_BYTES,
    Gpu,
    ModelLoad,
    NotRead,
    Sample,
    gpus,
    model_load,
    samples,
    scrape_gpus,
    scrape_model,
)

SAMPLES = Path(__file__).parents[1] / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.metrics.txt").read_text()


def load(kv_cache: float | None, running: int | None, waiting: int | None) -> ModelLoad:
    return ModelLoad(kv_cache_usage=kv_cache, requests_running=running, requests_waiting=waiting)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm-0.32", load(0.9230769230769231, 4, 2)),
        ("vllm-0.8-legacy", load(0.61, 8, 3)),
        ("sglang-0.5", load(0.62, 12, 3)),
        ("tgi-3", load(0.3125, 12, 3)),
        ("llamacpp-b11549", load(None, 4, 3)),
        ("triton-trtllm", load(0.62, 12, 3)),
        ("trtllm-serve", load(0.62, 12, 3)),
        ("dcgm", load(None, None, None)),
    ],
)
def test_the_load_of_every_known_server_is_read(name: str, expected: ModelLoad) -> None:
    assert model_load(sample(name)) == expected


KV, OLD_KV = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
RUNS, WAITS = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", load(None, None, None), id="nothing is not idle"),
        pytest.param(f"{RUNS} NaN\n{KV} NaN", load(None, None, None), id="NaN is nothing"),
        pytest.param(f"{RUNS} +Inf\n{WAITS} -1", load(None, None, None), id="no number of requests"),
        pytest.param(f"{RUNS} 0\n{WAITS} 0\n{KV} 0", load(0.0, 0, 0), id="0 is 0"),
        pytest.param(f"{OLD_KV} 0.9\n{KV} 0.2", load(0.2, None, None), id="the new name wins"),
        pytest.param(f"{OLD_KV} 0.9\n{KV} NaN", load(0.9, None, None), id="the old name where the new one has nothing"),
        pytest.param(f"{KV} 1.5", load(1.0, None, None), id="more than full is full"),
        pytest.param(
            f'{RUNS}{{engine="0"}} 3\n{RUNS}{{engine="1"}} 4\n{KV}{{engine="0"}} 0.1\n{KV}{{engine="1"}} 0.7',
            load(0.7, 7, None),
            id="two engines: counts are added, the fullest counts",
        ),
        pytest.param(
            "".join(
                f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}"}} {5 + dp}\n' for dp in (0, 1) for tp in (0, 1)
            ),
            load(None, 11, None),
            id="tensor parallel ranks repeat themselves, data parallel ones do not",
        ),
        pytest.param("tgi_batch_current_max_tokens 5", load(None, None, None), id="a part without its whole"),
        pytest.param(
            "tgi_batch_current_max_tokens 5\ntgi_batch_total_tokens 0", load(None, None, None), id="a part of nothing"
        ),
        pytest.param(
            'nv_trt_llm_request_metrics{request_type="max"} 512\n', load(None, None, None), id="another request_type"
        ),
    ],
)
def test_values_are_joined_and_missing_ones_stay_missing(text: str, expected: ModelLoad) -> None:
    assert model_load(text) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("m 3", [Sample("m", {}, 3.0)], id="no labels"),
        pytest.param('m{a="b",} 3 1795969342000', [Sample("m", {"a": "b"}, 3.0)], id="a timestamp"),
        pytest.param('m{a="b"} 3 # {trace="x"} 0.5', [Sample("m", {"a": "b"}, 3.0)], id="an exemplar"),
        pytest.param(
            r'm{a="x,\"}y\\z\n", b = "{}"} 1e3', [Sample("m", {"a": 'x,"}y\\z\n', "b": "{}"}, 1000.0)], id="escapes"
        ),
        pytest.param("m\t3\r", [Sample("m", {}, 3.0)], id="a line end of another system"),
        pytest.param('m{a="b} 3', [], id="an open quote"),
        pytest.param("m", [], id="no value"),
        pytest.param("m x", [], id="no number"),
        pytest.param("# EOF", [], id="a comment"),
        pytest.param("mm 3", [], id="another family"),
        pytest.param("", [], id="an empty line"),
    ],
)
def test_lines_are_read_or_passed_over(line: str, expected: list[Sample]) -> None:
    text = f"# TYPE m gauge\n{line}\nm 7"

    assert list(samples(text, frozenset({"m"}))) == [*expected, Sample("m", {}, 7.0)]


def test_gpus_are_read_and_blank_values_are_nothing() -> None:
    first, second = gpus(sample("dcgm"))

    assert first == Gpu(
        uuid="GPU-604ac76c-0000-0000-0000-000000000000",
        index="0",
        model_name="NVIDIA H100 80GB HBM3",
        hostname="gpu-node-1",
        pod="vllm-0",
        namespace="inference",
        utilization_percent=97.0,
        memory_used_mib=72001.0,
        memory_free_mib=8640.0,
        memory_total_mib=81559.0,
        temperature_c=71.0,
        power_w=652.31,
        energy_mj=918273645123.0,
        xid=0,
    )
    assert (second.uuid[-1], second.xid) == ("1", 79)


def test_mig_instances_are_devices_of_their_own() -> None:
    first, second = gpus(sample("dcgm-mig"))

    assert (first.uuid, second.uuid) == (first.uuid, first.uuid)
    assert [(g.instance, g.memory_used_mib, g.utilization_percent) for g in (first, second)] == [
        ("1", 35011.0, 91.12),
        ("2", 34870.0, 12.05),
    ]


def test_what_is_said_of_a_whole_device_goes_to_its_instances() -> None:
    text = 'DCGM_FI_DEV_GPU_TEMP{UUID="G"} 66\nDCGM_FI_DEV_FB_USED{UUID="G",GPU_I_ID="1"} 5\n'

    assert gpus(text) == (Gpu(uuid="G", instance="1", memory_used_mib=5.0, temperature_c=66.0),)


@pytest.mark.parametrize("value", ["9223372036854775794", "2147483632", "NaN", "-1"])
def test_a_gauge_that_is_not_supported_is_nothing(value: str) -> None:
    (gpu,) = gpus(f'DCGM_FI_DEV_GPU_TEMP{{uuid="G",Hostname="h"}} {value}\n')

    assert gpu == Gpu(uuid="G", hostname="h")


def test_energy_is_a_counter_and_may_be_large() -> None:
    text = 'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{UUID="%s"} %d\n'

    large, blank = gpus(text % ("a", 2**40) + text % ("b", 2**63 - 14))

    assert (large.energy_mj, blank.energy_mj) == (2.0**40, None)


def test_a_gpu_without_any_name_is_passed_over() -> None:
    assert gpus('DCGM_FI_DEV_GPU_TEMP{modelName="x"} 60\n') == ()


def client(answer: httpx.Response | Exception | float) -> httpx.AsyncClient:
    async def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return httpx.Response(200)
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


async def test_a_model_and_its_gpus_are_asked_over_http() -> None:
    async with client(httpx.Response(200, text=sample("vllm-0.8-legacy") + sample("dcgm"))) as asked:
        assert await scrape_model(asked, "http://m/metrics", within_s=1) == load(0.61, 8, 3)
        seen = await scrape_gpus(asked, "http://m/metrics", within_s=1)

    assert isinstance(seen, tuple)
    assert len(seen) == 2


async def endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"# a comment\n" * 4096


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(httpx.Response(404), "status 404", id="another status"),
        pytest.param(httpx.Response(307, headers={"Location": "/x"}), "status 307", id="redirects are not followed"),
        pytest.param(httpx.ConnectError("refused"), "ConnectError: refused", id="nobody there"),
        pytest.param(httpx.ReadError(""), "ReadError", id="cut, without a word"),
        pytest.param(5.0, "no whole answer within 1 s", id="too slow"),
    ],
)
async def test_a_scrape_that_fails_says_why(answer: httpx.Response | Exception | float, reason: str) -> None:
    async with client(answer) as asked:
        assert await scrape_model(asked, "http://m/metrics", within_s=1) == NotRead(reason=reason)


async def test_a_body_without_end_is_given_up() -> None:
    async with client(httpx.Response(200, content=endless())) as asked:
        seen = await scrape_model(asked, "http://m/metrics", within_s=5)

    assert seen == NotRead(reason=f"more than {LONGEST_BODY_BYTES} bytes")
