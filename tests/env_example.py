"""The variables of .env.example, made from the settings: `python -m tests.env_example` writes them."""

from inference_worker.config.settings import Variable, describe
from tests.readme_table import README

EXAMPLE = README.parent / "deploy" / "compose-replica" / ".env.example"
BEGIN = "# --- The worker's variables: made by `python -m tests.env_example` ---\n"

GROUPS = {
    "DEPLOYMENT_ID": "Who this is",
    "TRANSPORT": "RabbitMQ, where requests come from",
    "REDIS_URL": "Redis, where answers go",
    "MODEL_CONTAINER_URL": "The model. compose.yaml says where it is: http://vllm:8000",
    "METRIC_SERVER_URL": "The metric server",
    "CROESUS_HOST": "Billing",
    "WORKER_HTTP_HOST": "The ops port. compose.yaml sets it to 9090 inside the container",
    "SHUTDOWN_GRACE_S": "The end. STOP_GRACE_PERIOD above must stay at least 10 s longer",
    "GATEWAY_HOST": "The HTTP intake, of `gateway` and `dev` alone",
    "TLS_CA_FILE": "TLS, towards everybody. The paths are the container's: ./secrets is /run/secrets there",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Traces. The other OTEL_* variables may stand here too",
    "LOG_LEVEL": "The log",
}
"""A heading before each of these variables."""


def variables() -> str:
    """All variables, each explained: the required ones empty, the others as comments with their defaults."""
    return "".join(_entry(variable) for variable in describe())


def written(example: str) -> str:
    """The file with its variables as they should be; what stands before them is written by hand."""
    before, begin, _ = example.partition(BEGIN)
    if not begin:
        raise ValueError(f"{EXAMPLE.name} must have the line {BEGIN.strip()}")
    return f"{before}{begin}{variables()}"


def _entry(variable: Variable) -> str:
    heading = f"\n# {GROUPS[variable.name]}\n" if variable.name in GROUPS else ""
    twin = f"; or {variable.name}_FILE" if variable.file else ""
    return f"{heading}\n# {variable.meaning} ({variable.accepted}{twin})\n{_assignment(variable)}\n"


def _assignment(variable: Variable) -> str:
    if variable.default == "required":
        return f"{variable.name}="
    # "MODEL_CONTAINER_URL + /metrics" explains a default; it is no value.
    value = "" if " " in variable.default else variable.default
    return f"#{variable.name}={value}"


if __name__ == "__main__":
    EXAMPLE.write_text(written(EXAMPLE.read_text()))
