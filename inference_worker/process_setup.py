"""How a process of many queues is set up: flags, documents and environment, read and checked together.

All that is wrong is said at once, whichever of them it is in. Not here: what each of them may hold (`config/`), and
opening anything.
"""

import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from inference_worker.config.documents import ProcessDocuments, QueueConfig
from inference_worker.config.process_flags import NO_DOCUMENT, ProcessFlags, documents_of, flags_and_problems
from inference_worker.config.settings import Settings, load
from inference_worker.errors import ConfigurationError
from inference_worker.gates.making import gate_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSetup:
    """All of it."""

    settings: Settings
    """Of the environment; its queue and its model are not used, and its Redis is the transport's where that is one."""
    flags: ProcessFlags
    documents: ProcessDocuments

    def queues_of(self, pool: str) -> tuple[QueueConfig, ...]:
        """The queues that a pool works for."""
        return tuple(queue for queue in self.documents.transport.queues if queue.worker_pool_id == pool)


def read_setup(
    given: Mapping[str, str], environ: Mapping[str, str], read_file: Callable[[str], str], rng: random.Random
) -> ProcessSetup:
    """Read flags (by their names), the documents that they name, and the environment.

    `read_file` raises OSError or ValueError.

    Raises:
        ConfigurationError: with every problem.
    """
    problems: list[str] = []
    settings: Settings | None = None
    documents: ProcessDocuments | None = None
    try:
        settings = load(environ, needs="process")
    except ConfigurationError as exc:
        problems += exc.problems
    flags, wrong_flags = flags_and_problems(given, read_file)
    problems += wrong_flags
    url = None if settings is None else _broker_url(flags.kind, settings)
    check = partial(gate_problems, prometheus_url=flags.prometheus_url)
    if not wrong_flags or flags.transport_json not in NO_DOCUMENT:  # What is not named or not there is wrong already.
        try:
            documents = documents_of(flags, url=url, gate_problems=check)
        except ConfigurationError as exc:
            problems += exc.problems
    if documents is not None:
        problems += _not_served(documents)
    if settings is None or documents is None or problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return ProcessSetup(settings=_named(_joined(settings, documents), rng), flags=flags, documents=documents)


def _broker_url(kind: str, settings: Settings) -> str | None:
    """The broker's by the environment, where a variable names it."""
    if kind == "rabbitmq":
        return settings.rabbitmq.url_now() if settings.rabbitmq.given else None
    return settings.redis.url_now() if settings.redis.given else None


def _not_served(documents: ProcessDocuments) -> list[str]:
    """What can be written down, and is not built."""
    return [f"{transform.where}: body transforms are not served yet" for transform in documents.transforms]


def later(flags: ProcessFlags) -> list[str]:
    """What is taken and has no effect yet, one sentence each."""
    if not flags.watch_interval_s:
        return []
    return ["--transport-config-watch-interval has no effect yet: the documents are read once, at the start"]


def _joined(settings: Settings, documents: ProcessDocuments) -> Settings:
    """The environment with the transport's Redis in it: results lie beside the queues."""
    transport = documents.transport
    if transport.kind == "rabbitmq":
        url = settings.rabbitmq.url if transport.url is None else transport.url
        return settings.model_copy(update={"rabbitmq": settings.rabbitmq.model_copy(update={"url": url})})
    redis = settings.redis if transport.url is None else settings.redis.model_copy(update={"url": transport.url})
    kind = "redis-streams" if transport.kind == "redis-streams" else settings.transport.kind
    return settings.model_copy(
        update={"redis": redis, "transport": settings.transport.model_copy(update={"kind": kind})}
    )


def _named(settings: Settings, rng: random.Random) -> Settings:
    """With a name that no other process has, where none is set: leases and slots are held under it."""
    if "replica_id" in settings.identity.model_fields_set and settings.identity.replica_id != UNNAMED:
        return settings
    name = f"{socket.gethostname()}-{rng.randrange(16**6):06x}"
    return settings.model_copy(update={"identity": settings.identity.model_copy(update={"replica_id": name})})


UNNAMED = "process"
"""What the environment's default for `process` is."""
