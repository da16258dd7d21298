"""The environment of a worker process under test, with the pace of a test."""

from collections.abc import Mapping


def worker_env(
    *,
    rabbitmq_url: str,
    redis_url: str,
    model_url: str,
    deployment_id: str,
    http_port: int = 0,
    **changes: str,
) -> dict[str, str]:
    """A complete environment; `changes` are variables by name, an empty one unsets."""
    env = {
        "RABBITMQ_URL": rabbitmq_url,
        "REDIS_URL": redis_url,
        "MODEL_CONTAINER_URL": model_url,
        "DEPLOYMENT_ID": deployment_id,
        "REPLICA_ID": "replica-1",
        "USER_ID": "user-1",
        "HF_MODEL_ID": "tiny",
        "INFERENCE_DLX": f"dlx.{deployment_id}",
        "INFERENCE_DLQ": f"dlq.{deployment_id}",
        "METRIC_SERVER_URL": "off",
        "CROESUS_HOST": "off",
        "HEALTH_CHECK_INTERVAL_S": "0.5",
        "METRICS_FLUSH_INTERVAL_S": "0.5",
        "CLAIM_LEASE_S": "3",
        # What a test makes fail is to be seen for itself.
        "MODEL_BREAKER_FAILURES": "0",
        "REDIS_RETRY_DELAY_S": "3",
        "SHUTDOWN_GRACE_S": "3",
        "WORKER_HTTP_PORT": str(http_port),
        "WORKER_HTTP_HOST": "127.0.0.1",
    }
    return {name: value for name, value in {**env, **changes}.items() if value}


def queue_of(env: Mapping[str, str]) -> str:
    """The request queue that this environment names."""
    return f"infer_req.{env['DEPLOYMENT_ID']}"
