"""Requests to try `dev` with: those that it sends itself, and those that it prints to be copied."""

import asyncio
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_worker.timing import ended

SAMPLE_S: Final = 120.0
SAMPLE_TOKENS: Final = 64

PROMPTS: Final = (
    "What is a message queue good for?",
    "Tell me a very short story about a rabbit that carries letters.",
    "Name three things that can go wrong between two computers.",
    "Why is the sky blue?",
)


def sample_payload(infer_path: str, model: str, text: str, *, stream: bool) -> dict[str, object]:
    """A request in the shape that the inference path takes."""
    if infer_path.endswith("/embeddings"):
        return {"model": model, "input": text}
    payload: dict[str, object] = {"model": model}
    if infer_path.endswith("/completions") and not infer_path.endswith("/chat/completions"):
        payload["prompt"] = text
    else:
        payload["messages"] = [{"role": "user", "content": text}]
    return payload | ({"stream": True} if stream else {})


def curl_lines(url: str, payload: Mapping[str, object]) -> Sequence[str]:
    """Lines for a shell: submit, then wait for the result."""
    body = shlex.quote(json.dumps({"payload": payload}, ensure_ascii=False))
    return (
        f"job=$(curl -sS {url}/v1/jobs -H 'Content-Type: application/json' \\",
        f"  -d {body} \\",
        r"""  | sed 's/.*"job_id":"\([^"]*\)".*/\1/')""",
        f'curl -sS "{url}/v1/jobs/$job?wait=30"',
    )


def python_lines(url: str, payload: Mapping[str, object]) -> Sequence[str]:
    """Lines for Python, with nothing but its standard library."""
    return (
        "import json, urllib.request",
        f'jobs = "{url}/v1/jobs"',
        f"body = {json.dumps({'payload': payload}, ensure_ascii=False)}",
        'request = urllib.request.Request(jobs, json.dumps(body).encode(), {"Content-Type": "application/json"})',
        'job_id = json.load(urllib.request.urlopen(request))["job_id"]',
        'print(json.load(urllib.request.urlopen(f"{jobs}/{job_id}?wait=30")))',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    job_id: str
    status: str
    seconds: float
    asked: str
    tokens: str
    text: str


async def send_samples(console: Console, stop: asyncio.Event, *, url: str, path: str, model: str, count: int) -> None:
    """Send a few requests through the intake at `url`, as anybody would, and show what came back."""
    if not count:
        return
    console.print(f"\nSending {count} sample request{'s' if count != 1 else ''} through the HTTP intake", style="bold")
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=90.0) as client:
        sending = asyncio.create_task(_send_all(client, path, model, count))
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([sending, told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(told)
            if not sending.done():
                await ended(sending)
    if not sending.cancelled():
        console.print(_sample_table(sending.result()))


async def _send_all(client: httpx.AsyncClient, path: str, model: str, count: int) -> list[_Sample]:
    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(_send(client, path, model, number)) for number in range(count)]
    return [task.result() for task in sending]


async def _send(client: httpx.AsyncClient, path: str, model: str, number: int) -> _Sample:
    stream = number % 3 == 1 and "completions" in path
    asked = PROMPTS[number % len(PROMPTS)]
    payload = sample_payload(path, model, asked, stream=stream)
    if "completions" in path:
        payload["max_tokens"] = SAMPLE_TOKENS
    begun = time.monotonic()
    job_id, status, tokens, text = "", "failed", "", ""
    try:
        answer = await client.post("/v1/jobs", json={"payload": payload, "timeout_s": SAMPLE_S})
        view: dict[str, Any] = answer.json()
        job_id = str(view.get("job_id", ""))
        while job_id and time.monotonic() - begun < SAMPLE_S:
            view = (await client.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()
            if view.get("status") not in ("queued", "running", "retrying"):
                break
        status = str(view.get("status"))
        tokens, text = _said(view)
    except (httpx.HTTPError, ValueError) as exc:
        text = f"{type(exc).__name__}: {exc}"
    seconds = time.monotonic() - begun
    shown = f"{asked} (streamed)" if stream else asked
    return _Sample(job_id=job_id, status=status, seconds=seconds, asked=shown, tokens=tokens, text=text)


def _said(view: Mapping[str, Any]) -> tuple[str, str]:
    """Tokens and text of an answer; of a failure its reason."""
    result = view.get("result")
    if not isinstance(result, dict):
        return "", str(view.get("error") or view.get("detail") or "")
    usage = result.get("usage")
    tokens = usage.get("total_tokens", "") if isinstance(usage, dict) else ""
    choices = result.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    text = message.get("content") if isinstance(message, dict) else first.get("text")
    if text is None and isinstance(result.get("data"), list):
        text = f"{len(result['data'])} embedding(s)"
    return str(tokens), str(text or "")


def _sample_table(samples: Sequence[_Sample]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "status", "seconds", "tokens", "asked", "answer"):
        table.add_column(
            name, justify="right" if name in ("seconds", "tokens") else "left", no_wrap=name in ("job", "status")
        )
    for sample in samples:
        colour = "green" if sample.status == "succeeded" else "red"
        table.add_row(
            Text(sample.job_id[:8] or "-"),
            Text(sample.status, style=colour),
            f"{sample.seconds:.2f}",
            sample.tokens,
            Text(sample.asked),
            Text(_shortened(sample.text)),
        )
    return table


def _shortened(text: str, most: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
