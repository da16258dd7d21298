"""The command line: arguments, settings, logging, signals and exit codes. What the commands do is done elsewhere."""

import argparse
import asyncio
import math
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from inference_worker import logs
from inference_worker.assembly import Outside, run_worker
from inference_worker.check_command import run_check
from inference_worker.check_process import run_check_process
from inference_worker.client import MOST_PRIORITY
from inference_worker.config.settings import Needs, Settings, load
from inference_worker.dev import DevOptions, run_dev
from inference_worker.dlq_command import DlqOptions, run_dlq
from inference_worker.errors import ConfigurationError
from inference_worker.gateway.keys import new_key
from inference_worker.metrics import version
from inference_worker.mock_model import Fault, MockModelConfig, run_mock_model
from inference_worker.process import run_process
from inference_worker.process_arguments import (
    add_process_flags,
    given_flags,
    process_level,
    read_text,
    takes_flags,
    with_two_dashes,
)
from inference_worker.process_setup import read_setup
from inference_worker.serve_gateway import run_gateway
from inference_worker.serve_scaler import run_scaler
from inference_worker.submit import SubmitOptions, run_submit
from inference_worker.submit_state import read_state

log = structlog.get_logger(__name__)

DONE: Final = 0
FAILED: Final = 1
MISCONFIGURED: Final = 2
MOST_IN_FLIGHT: Final = 4096

Work = Callable[[asyncio.Event], Awaitable[int | None]]
"""A command, until it ends or is told to stop; its exit code, where it has one of its own."""


def run(arguments: Sequence[str], environ: Mapping[str, str], outside: Outside) -> int:
    """Run one command to its end and return the exit code: 0 stopped as asked, 2 misconfigured, 1 anything else."""
    parser = _parser()
    if "process" in arguments[:2]:
        arguments = with_two_dashes(arguments)
    args, strange = parser.parse_known_args(arguments or ["run"])
    unknown = [_shown(argument) for argument in strange]
    if unknown and not takes_flags(args):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if (wrong := _wrong_together(args)) is not None:
        parser.error(wrong)
    try:
        work = _work(args, unknown, environ, outside)
    except ConfigurationError as exc:
        return _misconfigured(exc)
    try:
        return asyncio.run(_until_stopped(work)) or DONE
    except ConfigurationError as exc:  # What only a command can see: a file that is not there, an output that is.
        return _misconfigured(exc)
    except OSError as exc:  # A port that is taken, a host that is not ours: no traceback helps with it.
        log.error("cannot go on", reason=str(exc))  # noqa: TRY400
        return FAILED
    except Exception:
        log.exception("this is a fault of ours; what was in hand went back to the queue")
        return FAILED


def _shown(argument: str) -> str:
    """An argument that nobody knows, without what may be a password: a value behind a flag, or a URL."""
    name, equals, _ = argument.partition("=")
    return "***" if "://" in name else f"{name}=***" if equals else name


def _misconfigured(exc: ConfigurationError) -> int:
    for problem in exc.problems:
        print(problem, file=sys.stderr)
    return MISCONFIGURED


def _work(args: argparse.Namespace, unknown: Sequence[str], environ: Mapping[str, str], outside: Outside) -> Work:
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
        case "submit":
            settings = _quiet(environ, needs="client" if args.url is None and not _begun_over_http(args) else "dev")
            submission = _submit_options(args)
            return lambda stop: run_submit(settings, submission, stop)
        case "dlq":
            without_url: Needs = "client" if args.sorted_set is None and args.sql is None else "process"
            settings = _quiet(environ, needs=without_url if args.url is None else "dev")
            asked = _dlq_options(args)
            return lambda stop: run_dlq(settings, asked, outside.now, stop)
        case "gateway" if args.new_key is not None:
            return lambda _: _new_key(args.new_key, operator=args.operator)
        case "gateway":
            settings = load(environ, needs="gateway")
            logs.configure(settings.log.level, settings.log.format, sys.stdout)
            return lambda stop: run_gateway(settings, outside, stop)
        case "scaler":
            settings = load(environ, needs="scaler")
            logs.configure(settings.log.level, settings.log.format, sys.stdout)
            return lambda stop: run_scaler(settings, outside, stop)
        case "process":
            setup = read_setup(given_flags(args, unknown), environ, read_text, outside.rng)
            logs.configure(process_level(setup), setup.settings.log.format, sys.stdout)
            return lambda stop: run_process(setup, outside, stop, _on_signal)
        case "check" if args.of == "process":
            setup = read_setup(given_flags(args, unknown), environ, read_text, outside.rng)
            given = setup.settings.log
            # What a gate cannot read stands in its row: no line of log for it, too.
            level = given.level if "level" in given.model_fields_set else "error"
            logs.configure(level, "console" if sys.stderr.isatty() else given.format, sys.stderr)
            return lambda _: run_check_process(
                setup, environ, outside, as_json=args.json, with_variables=args.variables
            )
        case "check":
            settings = _quiet(environ, needs="run")
            return lambda _: run_check(settings, environ, as_json=args.json, with_variables=args.variables)
        case _:
            settings = load(environ, needs="run")
            logs.configure(settings.log.level, settings.log.format, sys.stdout)
            return lambda stop: run_worker(settings, outside, stop, _on_signal)


def _quiet(environ: Mapping[str, str], *, needs: Needs) -> Settings:
    """For commands that print answers: what is logged goes to stderr, and warnings alone unless LOG_LEVEL says more."""
    settings = load(environ, needs=needs)
    level = settings.log.level if "level" in settings.log.model_fields_set else "warning"
    logs.configure(level, "console" if sys.stderr.isatty() else settings.log.format, sys.stderr)
    return settings


async def _new_key(tenant: str, *, operator: bool) -> None:
    """A fresh API key, which is kept nowhere, and its line for the file."""
    key, line = new_key(tenant, operator=operator)
    print(f"The key of {tenant!r}, shown this once:\n{key}\n")
    print(f'Its place in "keys" of the file that GATEWAY_API_KEYS_FILE names:\n{line}')


async def _until_stopped(work: Work) -> int | None:
    """Run with SIGTERM and SIGINT as the request to stop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        _on_signal(number, stop.set)
    return await work(stop)


def _on_signal(number: signal.Signals, call: Callable[[], None]) -> None:
    """Not by the loop's own means, which end with the loop: a second SIGTERM at the very end would kill us."""
    loop = asyncio.get_running_loop()

    def came(*_: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: there is nothing left to tell.
            loop.call_soon_threadsafe(call)

    signal.signal(number, came)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference-worker",
        description="A sidecar that serves a model from a queue. Without a command it is `run`.",
        epilog="Everything but these options is configured by environment variables: README.md has the table.",
    )
    parser.add_argument("--version", action="version", version=f"inference-worker {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser(
        "run",
        help="the worker of one model replica: a queue in, model, Redis out",
        description="Takes requests from the queue infer_req.<DEPLOYMENT_ID> of RabbitMQ, or with "
        "TRANSPORT=redis-streams from the stream IWL_STREAM, calls the model, stores the answers in Redis, until "
        "SIGTERM or Ctrl-C. It has no options: environment variables configure it, README.md has the table, and "
        "`inference-worker check` looks whether they are right. "
        "Exit code 0: stopped as asked; 2: a variable is missing or wrong; 1: anything else.",
    )
    dev = commands.add_parser(
        "dev",
        help="the whole system in this process, with nothing to install",
        description="Queue, result store, model, worker and HTTP intake in one process, until Ctrl-C. RABBITMQ_URL, "
        "REDIS_URL and MODEL_CONTAINER_URL, each by itself, take the place of what is embedded; with the last the "
        "options of the mock model have no effect.",
    )
    dev.add_argument("--samples", type=_count, default=3, metavar="N", help="sample requests to send (default 3)")
    dev.add_argument("--plain", action="store_true", help="plain lines instead of a live view")
    mock = commands.add_parser("mock-model", help="an OpenAI-compatible model server without a model")
    mock.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    mock.add_argument("--port", type=_port, default=8000, help="port to listen on (default 8000; 0 = any free one)")
    for command in (dev, mock):
        _add_mock_options(command)
    _add_gateway(commands)
    commands.add_parser(
        "scaler",
        help="how many replicas the queue wants, for KEDA and for workers named worker-N",
        description="Looks at the queue and its workers every SCALE_INTERVAL_S, writes how many replicas are wanted "
        "into Redis, and answers GET /v1/scale and /v1/scale/{queue} on SCALER_HOST:SCALER_PORT, until SIGTERM or "
        "Ctrl-C. It starts and stops no containers. It has no options: environment variables configure it, README.md "
        "has the table. Exit code 0: stopped as asked; 2: a variable is missing or wrong; 1: anything else.",
    )
    _add_process(commands)
    _add_check(commands)
    _add_submit(commands)
    _add_dlq(commands)
    return parser


def _add_gateway(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gateway = commands.add_parser(
        "gateway",
        help="the HTTP intake: jobs over HTTP, and OpenAI's own paths, into the queue",
        description="Answers on GATEWAY_HOST:GATEWAY_PORT until SIGTERM or Ctrl-C: POST /v1/jobs, "
        "/v1/chat/completions and the others of docs/gateway.md. Without GATEWAY_API_KEYS_FILE it listens on this "
        "machine alone. Environment variables configure it, README.md has the table. "
        "Exit code 0: stopped as asked; 2: a variable or the file of keys is wrong; 1: anything else.",
    )
    gateway.add_argument("--new-key", metavar="TENANT", help="print a fresh API key and its line for the file, and end")
    gateway.add_argument(
        "--operator", action="store_true", help="with --new-key: one for the scale signal and the dead letters, too"
    )


def _add_process(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    process = commands.add_parser(
        "process",
        help="many queues, gates and worker pools, with the documents and flags of llm-d-async",
        description="Takes requests from the queues of the transport document, lets them pass the gates, calls the "
        "gateways, and writes the results back, until SIGTERM or Ctrl-C; SIGHUP reads the documents again. "
        "docs/many-queues.md has them. "
        "REDIS_URL and RABBITMQ_URL stand in for a URL that the document has not. "
        "Exit code 0: stopped as asked; 2: a flag, a document or a variable is wrong; 1: anything else.",
        usage="inference-worker process --transport KIND --transport-config-file FILE [--pool-config-file FILE] ...",
        allow_abbrev=False,
    )
    add_process_flags(process)


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser(
        "check",
        help="whether the configuration is right and everything can be reached",
        description="Reads the variables of `run` and asks RabbitMQ (unless TRANSPORT=redis-streams), Redis, the "
        "model, the metric and the billing server, within ten seconds. It changes nothing. "
        "Exit code 0: all reached; 1: something is not; 2: a variable is wrong.",
    )
    _add_check_options(check)
    check.set_defaults(json=False, variables=False)
    of = check.add_subparsers(dest="of", metavar="process", required=False)
    process = of.add_parser(
        "process",
        help="the same for `process`, with its flags: documents, queues, gateways, and at which load each gate closes",
        description="Reads the flags and documents of `process` and the environment, and asks the broker, the "
        "gateways and what the gates read, within ten seconds. Says of each gate when it closes and what it reads "
        "now. It changes nothing. Exit code 0: all reached; 1: something is not; 2: a flag, a document or a variable "
        "is wrong.",
        allow_abbrev=False,
    )
    _add_check_options(process)
    add_process_flags(process)


def _add_check_options(check: argparse.ArgumentParser) -> None:
    # Not over what was said before the word `process`.
    check.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object instead of a table"
    )
    check.add_argument(
        "--variables",
        action="store_true",
        default=argparse.SUPPRESS,
        help="also every variable with its value; secrets are ***",
    )


def _add_submit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    submit = commands.add_parser(
        "submit",
        help="send one request or a JSONL file, and wait for the results",
        description="Sends requests and prints their results as JSON lines, in the order of the input. Over the broker "
        "and Redis of the environment (DEPLOYMENT_ID, RABBITMQ_URL, REDIS_URL; with TRANSPORT=redis-streams REDIS_URL "
        "alone), or over HTTP with --url. Exit code 0: all completed; 1: not; 2: used wrongly.",
        epilog="A line of the file is the request for the model; or an object with `payload` and perhaps `request_id`, "
        "`timeout_s`, `endpoint`, `metadata`, `tenant`, `priority`; or a line of an OpenAI batch, which is answered by "
        "one.",
    )
    submit.add_argument("file", nargs="?", metavar="FILE", help="JSONL; - or nothing is stdin")
    submit.add_argument("--prompt", metavar="TEXT", help="one request: a message of the user")
    submit.add_argument("--payload", metavar="JSON|@FILE", help="one request: the payload as it is")
    submit.add_argument("--model", metavar="NAME", help="with --prompt (default HF_MODEL_ID, where that is set)")
    submit.add_argument("--endpoint", metavar="PATH", help="with --prompt and --payload (default MODEL_INFER_PATH)")
    submit.add_argument("--tenant", metavar="NAME", help="with --prompt and --payload: whom to bill")
    submit.add_argument(
        "--priority", type=_priority, metavar="N", help="with --prompt and --payload: 0 to 255, higher goes first"
    )
    submit.add_argument("--request-id", metavar="ID", help="with --prompt and --payload: an id of your own")
    submit.add_argument(
        "--timeout", type=_above_0, default=60.0, metavar="S", help="of a request that has none of its own (default 60)"
    )
    submit.add_argument("--output", metavar="FILE", help="where results go (default stdout); must not exist")
    submit.add_argument("--in-flight", type=_in_flight, default=64, metavar="N", help="at a time (default 64)")
    submit.add_argument("--state", metavar="FILE", help="where progress is noted (default beside the output or input)")
    submit.add_argument("--resume", metavar="FILE", help="go on with a run that was stopped, from its state")
    submit.add_argument(
        "--url", metavar="URL", help="over the HTTP intake of dev or a gateway, with the key GATEWAY_API_KEY"
    )
    submit.add_argument("--plain", action="store_true", help="plain lines instead of a progress bar")


def _add_dlq(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    dlq = commands.add_parser(
        "dlq",
        help="look at dead letters, put them back, remove them",
        description="Works with the dead letters of this queue (INFERENCE_DLQ; IWL_DLQ_STREAM with "
        "TRANSPORT=redis-streams), over the broker and Redis of the environment (DEPLOYMENT_ID, RABBITMQ_URL, "
        "REDIS_URL; with TRANSPORT=redis-streams REDIS_URL alone), or over a gateway with --url and an operator's "
        "GATEWAY_API_KEY. With --sorted-set of that queue of `process`, in the Redis of REDIS_URL alone; with --sql of "
        "one in the Postgres of SQL_URL.",
    )
    actions = dlq.add_subparsers(dest="do", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="why, when, how often tried, last status: a line for each")
    show = actions.add_parser("show", help="everything about some of them, the body included")
    replay = actions.add_parser("replay", help="put them back into the queue, as new")
    purge = actions.add_parser("purge", help="remove them for good; asks first")
    for action in (listing, show, replay, purge):
        which = action.add_argument_group("which ones")
        which.add_argument("ids", nargs="*", metavar="ID", help="request ids")
        which.add_argument("--id", action="append", default=[], metavar="ID", help="a request id, also one like --this")
        which.add_argument("--reason", help="for example retries_exhausted, poison, invalid_request, delivery_limit")
        which.add_argument("--tenant", help="of this tenant")
        which.add_argument("--older-than", type=_age, metavar="AGE", help="dead for longer: 90s, 15m, 2h, 7d")
        which.add_argument("--newer-than", type=_age, metavar="AGE", help="dead for at most so long")
        which.add_argument("--completed", action="store_true", help="whose request has a completed result by now")
        which.add_argument("--all", action="store_true", help="of all deployments that share the queue")
        which.add_argument("--limit", type=_at_least_1, metavar="N", help="at most so many")
        action.add_argument("--json", action="store_true", help="JSON lines")
        action.add_argument("--url", metavar="URL", help="over the HTTP intake of dev, or of a gateway as an operator")
        action.add_argument("--sorted-set", metavar="QUEUE", help="of this queue of `process`: redis-sortedset")
        action.add_argument("--sql", metavar="QUEUE", help="of this queue of `process`: sql, at SQL_URL")
    for action in (replay, purge):
        action.add_argument("--everything", action="store_true", help="where no other choice is made")
        action.add_argument("--dry-run", action="store_true", help="say what would be done")
    replay.add_argument(
        "--rate", type=_seconds, default=10.0, metavar="N", help="so many a second; 0 = no limit (default 10)"
    )
    purge.add_argument("--yes", action="store_true", help="do not ask")


def _wrong_together(args: argparse.Namespace) -> str | None:
    """Options that do not go together, and what to do instead."""
    if args.command == "gateway" and args.operator and args.new_key is None:
        return "gateway: --operator goes with --new-key"
    if args.command in ("submit", "dlq") and args.url is not None and not re.match(r"https?://[^/]", args.url):
        return f"{args.command}: --url: {args.url!r} does not begin with http:// or https:// and a host"
    if args.command == "dlq" and args.sql is not None and (args.url is not None or args.sorted_set is not None):
        return "dlq: --sql goes with neither --url nor --sorted-set: it names another queue"
    if args.command == "dlq" and args.url is not None and args.sorted_set is not None:
        return "dlq: --sorted-set does not go with --url; a gateway stands before other queues"
    if args.command != "submit":
        return None
    one = [name for name in ("prompt", "payload") if getattr(args, name) is not None]
    many = [name for name in ("file", "resume") if getattr(args, name) is not None]
    if len(one) + len(many) > 1:
        given = " and ".join("FILE" if name == "file" else f"--{name}" for name in (*many, *one))
        return f"submit: {given} do not go together; give one of FILE, --prompt, --payload, --resume"
    if not one:
        for name in ("model", "endpoint", "tenant", "priority", "request_id"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                return f"submit: --{option} goes with --prompt or --payload; in a file each line has its own"
    if one and args.state is not None:
        return "submit: --state goes with a file"
    if args.model is not None and args.prompt is None:
        return "submit: --model goes with --prompt; a payload names its own"
    if args.resume is not None and (args.output is not None or args.state is not None):
        return "submit: --resume goes on with the output and the state that the run was begun with"
    if not one and not many and sys.stdin.isatty():
        return "submit: nothing to send; give FILE, --prompt, --payload or --resume, or - to type lines here"
    return None


def _begun_over_http(args: argparse.Namespace) -> bool:
    return args.resume is not None and read_state(Path(args.resume)).url is not None


def _submit_options(args: argparse.Namespace) -> SubmitOptions:
    return SubmitOptions(
        file=args.file,
        prompt=args.prompt,
        payload=args.payload,
        model=args.model,
        endpoint=args.endpoint,
        timeout_s=args.timeout,
        tenant=args.tenant,
        priority=args.priority,
        request_id=args.request_id,
        output=args.output,
        resume=args.resume,
        state=args.state,
        in_flight=args.in_flight,
        url=args.url,
        plain=args.plain,
    )


def _dlq_options(args: argparse.Namespace) -> DlqOptions:
    changes = {name: getattr(args, name) for name in ("everything", "dry_run", "rate", "yes") if hasattr(args, name)}
    return DlqOptions(
        do=args.do,
        ids=frozenset([*args.ids, *args.id]),
        reason=args.reason,
        tenant=args.tenant,
        older_than_s=args.older_than,
        newer_than_s=args.newer_than,
        completed=args.completed,
        all_deployments=args.all,
        limit=args.limit,
        json=args.json,
        url=args.url,
        sorted_set=args.sorted_set,
        sql=args.sql,
        **changes,
    )


def _add_mock_options(command: argparse.ArgumentParser) -> None:
    mock = command.add_argument_group("the mock model")
    default = MockModelConfig()
    mock.add_argument("--model", default=default.model, help=f"its name (default {default.model})")
    mock.add_argument("--latency", type=_seconds, default=0.05, metavar="S", help="to the first token (default 0.05)")
    mock.add_argument(
        "--tokens-per-second", type=_seconds, default=50.0, metavar="N", help="of one answer; 0 = at once (default 50)"
    )
    mock.add_argument("--max-num-seqs", type=_at_least_1, default=8, metavar="N", help="answers at a time (default 8)")
    mock.add_argument(
        "--max-queued",
        type=_count,
        default=None,
        metavar="N",
        help="waiting ones before it says that it is busy (default: any number)",
    )
    mock.add_argument("--busy-status", type=int, choices=(429, 503), default=503, help="how it says so (default 503)")
    mock.add_argument(
        "--fault",
        type=_fault,
        default=Fault(),
        metavar="JSON",
        help=f'what goes wrong, for example {{"status": 500}}; fields: {", ".join(Fault.__struct_fields__)}',
    )


def _mock_config(args: argparse.Namespace) -> MockModelConfig:
    return MockModelConfig(
        model=args.model,
        latency_s=args.latency,
        tokens_per_second=args.tokens_per_second,
        max_num_seqs=args.max_num_seqs,
        max_queued=args.max_queued,
        busy_status=args.busy_status,
        fault=args.fault,
    )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from exc


def _count(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535 are")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 0 or more")
    return value


def _above_0(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not above 0")
    return value


def _priority(text: str) -> int:
    value = _count(text)
    if value > MOST_PRIORITY:
        raise argparse.ArgumentTypeError(f"{text} is above {MOST_PRIORITY}")
    return value


def _at_least_1(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _in_flight(text: str) -> int:
    value = _at_least_1(text)
    if value > MOST_IN_FLIGHT:
        raise argparse.ArgumentTypeError(f"{text} is above {MOST_IN_FLIGHT}")
    return value


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: 90s, 15m, 2h and 7d are, and a number of seconds")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def _fault(text: str) -> Fault:
    fields = f"fields: {', '.join(Fault.__struct_fields__)}"
    try:
        fault = msgspec.json.decode(text, type=Fault, strict=True)
        unknown = sorted(msgspec.json.decode(text, type=dict[str, object]).keys() - set(Fault.__struct_fields__))
    except msgspec.MsgspecError as exc:
        raise argparse.ArgumentTypeError(f"{exc}; {fields}") from exc
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not known; {fields}")
    if fault.status is not None and not 200 <= fault.status <= 599:
        raise argparse.ArgumentTypeError(f"status: {fault.status} is none from 200 to 599")
    return fault
