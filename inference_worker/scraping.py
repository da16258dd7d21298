"""Reads the load of a model server and the state of its GPUs from Prometheus text.

A value that is not there is None, never 0: a metric that was renamed must not read as an idle server. Nothing here
decides what a load means, nor how often to look.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import httpx

T = TypeVar("T")

LONGEST_BODY_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """How busy a model server is; None where it does not say."""

    kv_cache_usage: float | None = None
    """0 to 1; the fullest engine's."""
    requests_running: int | None = None
    requests_waiting: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance of it; None where the exporter does not say."""

    uuid: str
    instance: str | None = None
    """`GPU_I_ID` of a MIG instance."""
    index: str | None = None
    model_name: str | None = None
    hostname: str | None = None
    pod: str | None = None
    namespace: str | None = None
    utilization_percent: float | None = None
    memory_used_mib: float | None = None
    memory_free_mib: float | None = None
    memory_total_mib: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_mj: float | None = None
    """Millijoules since the driver was loaded."""
    xid: int | None = None
    """The last XID error that was seen, 0 for none. It keeps its value."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


# ---------------------------------------------------------------- text

# Possessive, so that a broken line is given up in one pass.
_LINE: Final = re.compile(
    r"""([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?[ \t]*+([^ \t#]++)"""
)
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_NAME_END: Final = re.compile(r"[{ \t]")


def samples(text: str, names: frozenset[str]) -> Iterator[Sample]:
    """The samples with one of these names. Comments, other families and lines that cannot be read are passed over."""
    for line in text.split("\n"):
        end = _NAME_END.search(line)
        if end is None or line[: end.start()] not in names or (found := _LINE.match(line)) is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        yield Sample(found[1], _labels(found[2]) if found[2] else {}, value)


def _labels(text: str) -> dict[str, str]:
    return {name: _unescaped(value) if "\\" in value else value for name, value in _LABEL.findall(text)}


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


# ---------------------------------------------------------------- model servers


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one server says something: a metric, with certain labels, in parts of another."""

    name: str
    label: tuple[str, str] | None = None
    out_of: str | None = None


RUNNING: Final = (
    _Source("vllm:num_requests_running"),
    _Source("sglang:num_running_reqs"),
    _Source("tgi_batch_current_size"),
    _Source("llamacpp:requests_processing"),
    _Source("nv_trt_llm_request_metrics", ("request_type", "scheduled")),
    _Source("nv_trt_llm_request_metrics", ("request_type", "active")),
    _Source("trtllm_num_requests_running"),
)
WAITING: Final = (
    _Source("vllm:num_requests_waiting"),
    _Source("sglang:num_queue_reqs"),
    _Source("tgi_queue_size"),
    _Source("llamacpp:requests_deferred"),
    _Source("nv_trt_llm_request_metrics", ("request_type", "waiting")),
    _Source("trtllm_num_requests_waiting"),
)
KV_CACHE: Final = (
    _Source("vllm:kv_cache_usage_perc"),
    _Source("vllm:gpu_cache_usage_perc"),  # Until 0.11.
    _Source("sglang:token_usage"),
    _Source("llamacpp:kv_cache_usage_ratio"),  # Until 2025.
    _Source("nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "fraction")),
    _Source("trtllm_kv_cache_utilization"),
    _Source("tgi_batch_current_max_tokens", out_of="tgi_batch_total_tokens"),
)
_MODEL_NAMES: Final = frozenset(
    name for source in (*RUNNING, *WAITING, *KV_CACHE) for name in (source.name, source.out_of) if name is not None
)
_SAME_REQUESTS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Ranks that work on the same requests, so that each repeats the numbers of the others."""


def model_load(text: str) -> ModelLoad:
    """Read what any known model server says of its load; of several names for one thing the first that has a value."""
    found: dict[str, list[Sample]] = {}
    for sample in samples(text, _MODEL_NAMES):
        if math.isfinite(sample.value) and sample.value >= 0:
            found.setdefault(sample.name, []).append(sample)
    kv_cache = _first(KV_CACHE, found, _largest)
    return ModelLoad(
        kv_cache_usage=min(kv_cache, 1.0) if kv_cache is not None else None,
        requests_running=_count(_first(RUNNING, found, _total)),
        requests_waiting=_count(_first(WAITING, found, _total)),
    )


def _first(
    sources: tuple[_Source, ...], found: dict[str, list[Sample]], joined: Callable[[list[Sample]], float]
) -> float | None:
    for source in sources:
        here = found.get(source.name, [])
        if source.label is not None:
            here = [sample for sample in here if sample.labels.get(source.label[0]) == source.label[1]]
        if not here:
            continue
        if source.out_of is None:
            return joined(here)
        whole = sum(sample.value for sample in found.get(source.out_of, []))
        if whole > 0:
            return sum(sample.value for sample in here) / whole
    return None


def _largest(here: list[Sample]) -> float:
    return max(sample.value for sample in here)


def _total(here: list[Sample]) -> float:
    """The sum over engines, each counted once."""
    engines: dict[frozenset[tuple[str, str]], float] = {}
    for sample in here:
        key = frozenset((name, value) for name, value in sample.labels.items() if name not in _SAME_REQUESTS)
        engines[key] = max(engines.get(key, 0.0), sample.value)
    return sum(engines.values())


def _count(value: float | None) -> int | None:
    return round(value) if value is not None else None


# ---------------------------------------------------------------- GPUs

_BLANK_64: Final = 9223372036854775792.0
_BLANK_32: Final = 2147483632.0
"""DCGM's values for "not supported" are these or above."""

_ENERGY: Final = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
_UTILIZATION: Final = "DCGM_FI_DEV_GPU_UTIL"
_ENGINE_ACTIVE: Final = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
_USED, _FREE, _RESERVED = (f"DCGM_FI_DEV_FB_{part}" for part in ("USED", "FREE", "RESERVED"))
_TEMPERATURE: Final = "DCGM_FI_DEV_GPU_TEMP"
_POWER: Final = "DCGM_FI_DEV_POWER_USAGE"
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"
_GPU_NAMES: Final = frozenset(
    {_ENERGY, _UTILIZATION, _ENGINE_ACTIVE, _USED, _FREE, _RESERVED, _TEMPERATURE, _POWER, _XID}
)

_Device = tuple[str, str | None]


def gpus(text: str) -> tuple[Gpu, ...]:
    """Read what a DCGM exporter says of each GPU, or of each MIG instance."""
    values: dict[_Device, dict[str, float]] = {}
    labels: dict[_Device, dict[str, str]] = {}
    for sample in samples(text, _GPU_NAMES):
        device = _device(sample.labels)
        if device is None:
            continue
        labels.setdefault(device, {}).update(sample.labels)
        if sample.value >= 0 and sample.value < (_BLANK_64 if sample.name == _ENERGY else _BLANK_32):
            values.setdefault(device, {})[sample.name] = sample.value
    split = {uuid for uuid, instance in labels if instance is not None}
    seen = []
    for device in labels:
        uuid, instance = device
        if instance is None and uuid in split:
            continue  # What is said of the whole device goes to its instances.
        whole = values.get((uuid, None), {})
        seen.append(_gpu(device, labels[device], {**whole, **values.get(device, {})}))
    return tuple(seen)


def _device(labels: Mapping[str, str]) -> _Device | None:
    uuid = labels.get("UUID") or labels.get("uuid") or labels.get("device") or labels.get("gpu")
    return (uuid, labels.get("GPU_I_ID") or None) if uuid else None


def _gpu(device: _Device, labels: Mapping[str, str], values: Mapping[str, float]) -> Gpu:
    used, free = values.get(_USED), values.get(_FREE)
    active = values.get(_ENGINE_ACTIVE)
    gpu = Gpu(
        uuid=device[0],
        instance=device[1],
        index=labels.get("gpu"),
        model_name=labels.get("modelName"),
        hostname=labels.get("hostname") or labels.get("Hostname"),
        pod=labels.get("pod") or labels.get("pod_name"),
        namespace=labels.get("namespace") or labels.get("pod_namespace"),
        utilization_percent=values.get(_UTILIZATION),
        memory_used_mib=used,
        memory_free_mib=free,
        temperature_c=values.get(_TEMPERATURE),
        power_w=values.get(_POWER),
        energy_mj=values.get(_ENERGY),
        xid=_count(values.get(_XID)),
    )
    if used is not None and free is not None:
        gpu = replace(gpu, memory_total_mib=used + free + values.get(_RESERVED, 0.0))
    if gpu.utilization_percent is None and active is not None:
        # MIG instances have no utilization of their own; this is the nearest.
        gpu = replace(gpu, utilization_percent=round(active * 100, 4))
    return gpu


# ---------------------------------------------------------------- HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRead:
    """There is nothing to read now."""

    reason: str


async def scrape_model(client: httpx.AsyncClient, url: str, *, within_s: float) -> ModelLoad | NotRead:
    """Ask a model server for its load."""
    return await _scrape(client, url, model_load, within_s)


async def scrape_gpus(client: httpx.AsyncClient, url: str, *, within_s: float) -> tuple[Gpu, ...] | NotRead:
    """Ask a DCGM exporter for its GPUs."""
    return await _scrape(client, url, gpus, within_s)


async def scrape_samples(
    client: httpx.AsyncClient, url: str, names: frozenset[str], *, within_s: float
) -> tuple[Sample, ...] | NotRead:
    """Ask any page of metrics for the samples with these names. Time stamps on it are not heeded."""
    return await _scrape(client, url, lambda text: tuple(samples(text, names)), within_s)


async def _scrape(client: httpx.AsyncClient, url: str, read: Callable[[str], T], within_s: float) -> T | NotRead:
    try:
        async with asyncio.timeout(within_s):
            body = await _body(client, url)
    except TimeoutError:
        return NotRead(reason=f"no whole answer within {within_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        return NotRead(reason=f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
    if isinstance(body, NotRead):
        return body
    return read(body.decode(errors="replace"))


async def _body(client: httpx.AsyncClient, url: str) -> bytes | NotRead:
    chunks: list[bytes] = []
    size_bytes = 0
    async with client.stream("GET", url, headers={"Accept": "text/plain"}, follow_redirects=False) as response:
        if response.status_code != 200:
            return NotRead(reason=f"status {response.status_code}")
        async for chunk in response.aiter_bytes():
            size_bytes += len(chunk)
            if size_bytes > LONGEST_BODY_BYTES:
                return NotRead(reason=f"more than {LONGEST_BODY_BYTES} bytes")
            chunks.append(chunk)
    return b"".join(chunks)
