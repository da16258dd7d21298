"""The command line: arguments, settings, logging, signals and exit codes. What the commands do is done elsewhere."""

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from inference_worker import logs
from inference_worker.assembly import Outside, run_worker
from inference_worker.config.settings import load
from inference_worker.dev import DevOptions, run_dev
from inference_worker.errors import ConfigurationError
from inference_worker.metrics import version
from inference_worker.mock_model import Fault, MockModelConfig, run_mock_model

log = structlog.get_logger(__name__)

DONE: Final = 0
FAILED: Final = 1
MISCONFIGURED: Final = 2

Work = Callable[[asyncio.Event], Awaitable[None]]


def run(arguments: Sequence[str], environ: Mapping[str, str], outside: Outside) -> int:
    """Run one command to its end and return the exit code: 0 stopped as asked, 2 misconfigured, 1 anything else."""
    args = _parser().parse_args(arguments or ["run"])
    try:
        work = _work(args, environ, outside)
    except ConfigurationError as exc:
        for problem in exc.problems:
            print(problem, file=sys.stderr)
        return MISCONFIGURED
    try:
        asyncio.run(_until_stopped(work))
    except OSError as exc:  # A port that is taken, a host that is not ours: no traceback helps with it.
        log.error("cannot go on", reason=str(exc))  # noqa: TRY400
        return FAILED
    except Exception:
        log.exception("this is a fault of ours; what was in hand went back to the queue")
        return FAILED
    return DONE


def _work(args: argparse.Namespace, environ: Mapping[str, str], outside: Outside) -> Work:
    match args.command:
        case "dev":
            settings = load(environ, needs="dev")
            logs.configure(settings.log.level, "console" if sys.stderr.isatty() else settings.log.format, sys.stderr)
            options = DevOptions(samples=args.samples, live=not args.plain, mock=_mock_config(args))
            return lambda stop: run_dev(settings, outside, options, stop)
        case "mock-model":
            settings = load(environ, needs="dev")
            logs.configure(settings.log.level, "console" if sys.stderr.isatty() else settings.log.format, sys.stderr)
            config = _mock_config(args)
            return lambda stop: run_mock_model(config, args.host, args.port, stop, now=outside.now)
        case _:
            settings = load(environ, needs="run")
            logs.configure(settings.log.level, settings.log.format, sys.stdout)
            return lambda stop: run_worker(settings, outside, stop)


async def _until_stopped(work: Work) -> None:
    """Run with SIGTERM and SIGINT as the request to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await work(stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference-worker",
        description="A sidecar that serves a model from a queue. Without a command it is `run`.",
        epilog="Everything but these options is configured by environment variables: README.md has the table.",
    )
    parser.add_argument("--version", action="version", version=f"inference-worker {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("run", help="the worker of one model replica: RabbitMQ in, model, Redis out")
    dev = commands.add_parser("dev", help="the whole system in this process, with nothing to install")
    dev.add_argument("--samples", type=_count, default=3, metavar="N", help="sample requests to send (default 3)")
    dev.add_argument("--plain", action="store_true", help="plain lines instead of a live view")
    mock = commands.add_parser("mock-model", help="an OpenAI-compatible model server without a model")
    mock.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    mock.add_argument("--port", type=_port, default=8000, help="port to listen on (default 8000; 0 = any free one)")
    for command in (dev, mock):
        _add_mock_options(command)
    return parser


def _add_mock_options(command: argparse.ArgumentParser) -> None:
    mock = command.add_argument_group("the mock model")
    default = MockModelConfig()
    mock.add_argument("--model", default=default.model, help=f"its name (default {default.model})")
    mock.add_argument("--latency", type=_seconds, default=0.05, metavar="S", help="to the first token (default 0.05)")
    mock.add_argument(
        "--tokens-per-second", type=_seconds, default=50.0, metavar="N", help="of one answer; 0 = at once (default 50)"
    )
    mock.add_argument("--max-num-seqs", type=_count, default=8, metavar="N", help="answers at a time (default 8)")
    mock.add_argument("--max-queued", type=_count, default=None, metavar="N", help="waiting ones before it says 503")
    mock.add_argument("--fault", type=_fault, default=Fault(), metavar="JSON", help='for example {"status": 500}')


def _mock_config(args: argparse.Namespace) -> MockModelConfig:
    return MockModelConfig(
        model=args.model,
        latency_s=args.latency,
        tokens_per_second=args.tokens_per_second,
        max_num_seqs=max(args.max_num_seqs, 1),
        max_queued=args.max_queued,
        fault=args.fault,
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535 are")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 0 or more")
    return value


def _fault(text: str) -> Fault:
    try:
        return msgspec.json.decode(text, type=Fault, strict=True)
    except msgspec.MsgspecError as exc:
        raise argparse.ArgumentTypeError(f"{exc}; fields: {', '.join(Fault.__struct_fields__)}") from exc
