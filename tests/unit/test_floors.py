"""A file imports only from lower floors, and a driver only where it belongs; docs/design has the plan."""

import ast
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "inference_worker"

# Lowest first. Files of one line share a floor and may not import each other, those of one package apart, which may but
# in no circle. A new file is added to a line that stands below all that it imports.
FLOORS = (
    "errors faults timing lanes",  # F0
    "gates.parameters merge stamping messages",  # F1
    "event_stream llmd_messages",
    "llmd_results llmd_renewed retry_ladder",
    "llmd_retry",
    "disposition",  # F2
    "breaker",
    "config.values",  # F3
    "config.parts config.documents config.process_flags",
    "ports config.settings config.gate_tree process_changes process_files",
    "producer_requests producer_results job_book scaling redis_slots config.doubts",
    "sql_functions sql_link pubsub_values",
    "sql_schema sql_ears",
    "redis_scripts rmq_values settling metrics_buffer metrics logs tracing throughput mock_answers",  # F4a
    "producer_scripts producer_steps sql_place rmq_connection job_records redis_cluster redis_sentinel",
    "rmq_replies pubsub_link pubsub_backlog extensions merge_guarded",
    "rmq_listener rmq_producer rmq_dead_letters transports.memory results.* scaler model_client billing.* scraping "
    "mock_model echo_model",
    "addressing redis_modes transforms.*",
    "routed_model",
    "gates.*",  # Those in Redis know the keys of its results.
    "transports.*",  # A list of results reads what the sorted set stores.
    "rmq_look rmq_backlog scale_metrics client_ways otlp confirmed_intake stream_dead_letters memory_dead_letters "
    "producer_arrivals producer_leases producer_putting",
    "sorted_set_dead_letters sql_dead_letters",
    "dlq peer_metrics",
    "dlq_reach dlq_remote dlq_saying peer_gates peer_notes peer_backlog pooled_metrics",
    "pool_gate peer",
    "message_processor health_checker metrics_reporter fleet_reporter ops_server gateway.* client check producer",  # F5
    "sql_producer",
    "request_notes alongside sharers",
    "listener submit_lines submit_state submit_progress",  # F6
    "submit_run",
    "submit dlq_command check_command",
    "pools",
    "assembly",  # F7
    "process_sql process_pubsub process_extensions",
    "serve_gateway serve_scaler process_setup process_queues process_status",
    "process_pools process_reload",
    "process process_arguments",
    "check_process",
    "dev_view dev_samples",
    "dev",  # F8
    "cli",  # F9
    "__main__",
)
PURE = "ports"
"""Up to here, only the standard library is imported, and what LIBRARIES allows."""
LIBRARIES = {
    "pydantic": "config.*",
    "pydantic_core": "config.*",
    "pydantic_settings": "config.*",
    "msgspec": "messages event_stream llmd_messages llmd_results llmd_renewed",
}
DRIVERS = {
    "aio_pika": "rmq_*",
    "aiormq": "rmq_*",
    "pamqp": "rmq_*",
    "redis": "producer_arrivals producer_steps redis_scripts redis_cluster redis_sentinel results.redis "
    "results.notifications transports.stream_reader transports.key_watch transports.redis_pubsub",
    "google": "pubsub_link",
    "grpc": "pubsub_link",
    "asyncpg": "sql_link sql_ears sql_schema",
    "aiohttp": "model_client",
    "aiohttp.web": "ops_server mock_model",
    "fastapi": "gateway.*",
    "starlette": "gateway.*",
    "uvicorn": "gateway.*",
    "h11": "gateway.*",
    "opentelemetry": "otlp",
}


@cache
def modules() -> list[str]:
    """All but the `__init__` files, whose docstring is all they have."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py"))
    return sorted(".".join(path.parts) for path in paths if path.name != "__init__")


@cache
def imports(module: str) -> tuple[str, ...]:
    """Every import wherever it stands, `TYPE_CHECKING` and functions included, as `package.module.name`."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def named(module: str, patterns: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns.split())


@cache
def floor(module: str) -> int:
    """The line of a module; a file without one lies below and above nothing, and fails a test of its own."""
    return next((number for number, line in enumerate(FLOORS) if named(module, line)), -1)


def ours(imported: str) -> str | None:
    """The module of ours that an import means: `inference_worker.errors.X` is `errors`."""
    if imported.split(".")[0] != ROOT.name:
        return None
    inner = imported.removeprefix(f"{ROOT.name}.")
    return inner if inner in modules() else inner.rpartition(".")[0]


def allowed(module: str, imported: str) -> bool:
    """`aiohttp.web` may be imported where aiohttp's client may not."""
    places = [where for name, where in DRIVERS.items() if f"{imported}.".startswith(f"{name}.")]
    return not places or named(module, places[-1])


def test_every_file_has_its_floor() -> None:
    homeless = [module for module in modules() if floor(module) < 0]

    assert not homeless, f"add {homeless} to FLOORS in {__file__}, in a line below all that they import"


@pytest.mark.parametrize("module", modules())
def test_a_file_imports_only_from_lower_floors(module: str) -> None:
    """So there are no cycles either: within a package (gateway, billing) its own files count, lowest first."""
    package = module.rpartition(".")[0]
    for lower in filter(None, map(ours, imports(module))):
        same_package = package and lower.rpartition(".")[0] == package and floor(lower) == floor(module)
        assert same_package or floor(lower) < floor(module), f"{module} imports {lower}, which is not below it"


@pytest.mark.parametrize("module", modules())
def test_a_driver_is_imported_only_where_it_belongs(module: str) -> None:
    for imported in imports(module):
        assert allowed(module, imported), f"{module} imports {imported}"


@pytest.mark.parametrize("module", [module for module in modules() if 0 <= floor(module) <= floor(PURE)])
def test_the_lower_floors_need_the_standard_library_alone(module: str) -> None:
    for imported in imports(module):
        top = imported.split(".")[0]
        fine = top in sys.stdlib_module_names or top == ROOT.name or named(module, LIBRARIES.get(top, ""))
        assert fine, f"{module} imports {imported}"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: {name for name in map(ours, imports(module)) if name} for module in modules()}

    while graph:
        ends = {module for module, lower in graph.items() if not lower & graph.keys()}
        assert ends, f"these import each other: {sorted(graph)}"
        graph = {module: lower for module, lower in graph.items() if module not in ends}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_an_init_file_holds_a_docstring_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert ast.get_docstring(tree)
    assert len(tree.body) == 1
