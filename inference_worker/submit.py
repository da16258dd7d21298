"""The `submit` command: one request or a file of them, answered in the input's order, and gone on with after a stop.

Not here: the lines (`submit_lines`), the run (`submit_run`), what is noted of it (`submit_state`).
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from inference_worker.client import SUBMIT_S, Client, Result
from inference_worker.config.settings import Settings
from inference_worker.errors import (
    ConfigurationError,
    NoResultYet,
    NoSuchRequest,
    NotAccepted,
    NotSupported,
)
from inference_worker.messages import ENDPOINTS
from inference_worker.redis_scripts import RedisTls
from inference_worker.submit_lines import ACCEPTED, BadLine, Checked, Line, check, output_line, read_line, read_lines
from inference_worker.submit_progress import Progress
from inference_worker.submit_run import Run
from inference_worker.submit_state import (
    STDOUT,
    State,
    absolute,
    forget,
    input_again,
    keep_input,
    new_state_path,
    opened_input,
    opened_output,
    read_state,
)
from inference_worker.timing import first_of

READ_BYTES: Final = 1024 * 1024
MOST_PROBLEMS: Final = 50
SILENT_S: Final = 5.0
"""After so long without the broker's word on one request, whoever waits is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """What the command line says."""

    file: str | None = None
    """JSONL; `-` is stdin."""
    prompt: str | None = None
    payload: str | None = None
    """JSON, or `@file`."""
    model: str | None = None
    endpoint: str | None = None
    timeout_s: float = 60.0
    tenant: str | None = None
    priority: int | None = None
    request_id: str | None = None
    output: str | None = None
    resume: str | None = None
    state: str | None = None
    in_flight: int = 64
    url: str | None = None
    plain: bool = False


async def run_submit(settings: Settings, options: SubmitOptions, stop: asyncio.Event) -> int:
    """The command. 0: all completed; 1: something failed, was refused or is left to be gone on with.

    Raises:
        ConfigurationError: what was asked for cannot be done as it stands.
    """
    if options.prompt is not None or options.payload is not None:
        return await _submit_one(settings, options, stop)
    with contextlib.ExitStack() as stack:
        if options.resume is not None:
            path, state = Path(options.resume), read_state(Path(options.resume))
            _same_way(settings, options, state)
            source = stack.enter_context(input_again(state))
        else:
            source, name = await _input(options.file, stack, stop)
            direct = options.url is None
            looking = check(
                source,
                _endpoints(settings),
                tenants=direct,
                priorities=direct and not settings.over_streams,
            )
            checked = await _checked(looking, stop)
            if checked is None:
                return 1
            path = new_state_path(options.state, options.output, name)
            state = _new_state(settings, options, checked, name or f"{path}.input", owns_input=name is None)
        output = stack.enter_context(opened_output(state, again=options.resume is not None))
        if state.owns_input and options.resume is None:
            keep_input(source, state)
        why = await _submit_all(settings, options, state, path, source, output, stop)
    if state.written == state.lines:
        forget(path, state)
    else:
        again = f"inference-worker submit --resume {path}"
        print(f"{why}: {state.written} of {state.lines} are written. Go on with: {again}", file=sys.stderr)
    return 0 if state.written == state.lines and not state.failed else 1


async def _input(file: str | None, stack: contextlib.ExitStack, stop: asyncio.Event) -> tuple[BinaryIO, str | None]:
    """The input, which can be read again, and its path where it has one."""
    if file is not None and file != STDOUT:
        return stack.enter_context(opened_input(file)), absolute(file)
    kept: BinaryIO = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    loop, fd, readable = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()
    try:
        loop.add_reader(fd, readable.set)
    except PermissionError:  # A file, which is always readable.
        shutil.copyfileobj(sys.stdin.buffer, kept)
    else:
        # A terminal or a pipe may be silent for long: a read that waits for it would not hear of a stop.
        try:
            while not stop.is_set():
                readable.clear()
                await first_of(readable, stop)
                if readable.is_set():
                    if not (some := os.read(fd, READ_BYTES)):
                        break
                    kept.write(some)
        finally:
            loop.remove_reader(fd)
    kept.seek(0)
    return kept, None


def _new_state(
    settings: Settings, options: SubmitOptions, checked: Checked, input_path: str, *, owns_input: bool
) -> State:
    return State(
        run_id=secrets.token_hex(8),
        input=input_path,
        input_sha256=checked.sha256,
        owns_input=owns_input,
        lines=checked.lines,
        output=STDOUT if options.output in (None, STDOUT) else absolute(str(options.output)),
        url=options.url,
        deployment_id=None if options.url is not None else _queue(settings),
        timeout_s=options.timeout_s,
    )


# ---------------------------------------------------------------- one


def _made_output(name: str | None) -> Path | None:
    """The file for the answer, made and empty; None where the answer is printed."""
    if name is None or name == STDOUT:
        return None
    path = Path(name)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as exc:
        raise ConfigurationError((f"--output: {name} exists; name another file, or remove it",)) from exc
    except OSError as exc:
        problem = f"--output: {name} cannot be made: {exc.strerror}; accepted: a new file where one can be made"
        raise ConfigurationError((problem,)) from exc
    return path


def _forget_empty(output: Path) -> None:
    with contextlib.suppress(OSError):
        if output.stat().st_size == 0:
            output.unlink()


async def _submit_one(settings: Settings, options: SubmitOptions, stop: asyncio.Event) -> int:
    endpoints = _endpoints(settings)
    if options.endpoint is not None and options.endpoint not in endpoints:
        raise ConfigurationError((f"--endpoint: {options.endpoint!r}; accepted: {', '.join(endpoints)}",))
    line = Line(index=0, payload=_payload(settings, options, endpoints[0]))
    # Before anything is sent: an answer that nobody can read would have been paid for all the same.
    output = await asyncio.to_thread(_made_output, options.output)
    request_id = options.request_id or (None if options.url is not None else secrets.token_hex(16))
    async with contextlib.AsyncExitStack() as stack:
        if output is not None:
            stack.callback(_forget_empty, output)
        client = await stack.enter_async_context(client_of(settings, options.url))

        async def answer() -> Result:
            note = asyncio.get_running_loop().call_later(SILENT_S, _still_trying)
            try:
                job = await client.submit(
                    line.payload,
                    endpoint=options.endpoint,
                    timeout_s=options.timeout_s,
                    tenant=options.tenant,
                    priority=options.priority,
                    request_id=request_id,
                )
            finally:
                note.cancel()
            return await job.wait()

        asked = asyncio.create_task(answer())
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([asked, told], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                print(f"stopped; the request {request_id or ''} may still be answered", file=sys.stderr)
                return 1
            result = asked.result()
        except (NotAccepted, NotSupported, NoResultYet, NoSuchRequest, ValueError) as exc:
            print(f"{exc}", file=sys.stderr)
            return 1
        finally:
            asked.cancel()
            told.cancel()
            await asyncio.wait([asked, told])
    printed = output_line(line, result)
    if output is None:
        sys.stdout.buffer.write(printed)
        sys.stdout.buffer.flush()
    else:
        await asyncio.to_thread(output.write_bytes, printed)
    return 0 if result.completed else 1


def _still_trying() -> None:
    print(f"not accepted after {SILENT_S:g} s; trying for {SUBMIT_S:g} s in all", file=sys.stderr)


def _payload(settings: Settings, options: SubmitOptions, infer_path: str) -> bytes:
    """The request for the model.

    Raises: ConfigurationError
    """
    if options.prompt is not None:
        model = options.model or _model(settings)
        body: dict[str, object] = {} if model is None else {"model": model}
        match options.endpoint or infer_path:
            case "/v1/completions":
                body["prompt"] = options.prompt
            case "/v1/embeddings":
                body["input"] = options.prompt
            case _:
                body["messages"] = [{"role": "user", "content": options.prompt}]
        return json.dumps(body).encode()
    text = options.payload or ""
    try:
        raw = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        line = read_line(raw.replace(b"\r", b" ").replace(b"\n", b" "), 0, ENDPOINTS)
    except OSError as exc:
        raise ConfigurationError((f"--payload: {text[1:]} cannot be read: {exc.strerror}",)) from exc
    except BadLine as bad:
        raise ConfigurationError((f"--payload: {bad}; accepted: a JSON object, or @FILE with one",)) from bad
    return line.payload


def _model(settings: Settings) -> str | None:
    name = settings.identity.hf_model_id
    return None if name in ("client", "mock-model") else name


# ---------------------------------------------------------------- all


async def _submit_all(
    settings: Settings,
    options: SubmitOptions,
    state: State,
    path: Path,
    source: BinaryIO,
    output: BinaryIO,
    stop: asyncio.Event,
) -> str:
    """Why it ended before all was written, if it did."""
    with Progress(state.lines, state.written, state.failed, plain=options.plain) as progress:
        async with client_of(settings, state.url) as client:
            run = Run(client, state, path, output, progress, in_flight=options.in_flight)
            lines = read_lines(source, _endpoints(settings), after=state.written)
            return await run.to_the_end(lines, stop)


# ---------------------------------------------------------------- how it is reached


@asynccontextmanager
async def client_of(settings: Settings, url: str | None) -> AsyncGenerator[Client, None]:
    """A client of the intake at `url`, or of the broker and the store that the settings name."""
    tls = settings.tls
    if url is not None:
        context = tls.context()
        made = Client.http(url, api_key=settings.caller.api_key_now(), verify=True if context is None else context)
    elif settings.over_streams:
        made = Client.streams(
            redis_url=settings.redis.url_now,
            stream=settings.streams.stream,
            response_ttl_s=settings.redis.response_ttl_s,
            name="submit",
            redis_tls=RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file),
        )
    else:
        made = Client.direct(
            rabbitmq_url=settings.rabbitmq.url_now,
            redis_url=settings.redis.url_now,
            deployment_id=settings.identity.deployment_id,
            response_ttl_s=settings.redis.response_ttl_s,
            name="submit",
            tls=tls.context(),
            redis_tls=RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file),
        )
    async with made as client:
        yield client


def _endpoints(settings: Settings) -> tuple[str, ...]:
    infer_path = settings.model.infer_path
    return (infer_path, *(path for path in ENDPOINTS if path != infer_path))


def _same_way(settings: Settings, options: SubmitOptions, state: State) -> None:
    if options.url is not None and options.url != state.url:
        raise ConfigurationError((f"--url: this run was begun with {state.url or 'the broker'}; leave it out",))
    if state.url is None and (now := _queue(settings)) != state.deployment_id:
        name = "IWL_STREAM" if settings.over_streams else "DEPLOYMENT_ID"
        raise ConfigurationError((f"{name}: is {now!r}; the run was begun with {state.deployment_id!r}",))


def _queue(settings: Settings) -> str:
    """What says into which queue a run goes."""
    return settings.streams.stream if settings.over_streams else settings.identity.deployment_id


async def _checked(looking: Generator[Checked, None, Checked], stop: asyncio.Event) -> Checked | None:
    """Look at all lines before anything is sent; None where something is wrong, which has been said."""
    while True:
        try:
            next(looking)
        except StopIteration as over:
            return _said(over.value)
        await asyncio.sleep(0)
        if stop.is_set():
            print("stopped; nothing was sent", file=sys.stderr)
            return None


def _said(checked: Checked) -> Checked | None:
    for problem in checked.problems[:MOST_PROBLEMS]:
        print(problem, file=sys.stderr)
    if (more := len(checked.problems) - MOST_PROBLEMS) > 0:
        print(f"… and {more} more", file=sys.stderr)
    if checked.problems:
        bad = len(checked.problems)
        print(f"{bad} of {checked.lines} lines are no requests; nothing was sent", file=sys.stderr)
        print(f"accepted: {ACCEPTED}", file=sys.stderr)
        return None
    return checked
