"""How a process of many queues is set up: flags, documents and environment, read and checked together.

All that is wrong is said at once, whichever of them it is in. Not here: what each of them may hold (`config/`), and
opening anything.
"""

import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from inference_worker.billing.making import sink_problems
from inference_worker.config.documents import ProcessDocuments
from inference_worker.config.process_flags import (
    NO_DOCUMENT,
    ProcessFlags,
    documents_of,
    flags_and_problems,
    read_flags,
)
from inference_worker.config.settings import Settings, load
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import Extensions
from inference_worker.gates.making import gate_problems
from inference_worker.process_changes import needs_restart
from inference_worker.process_extensions import extension_problems
from inference_worker.process_files import ReadFile, Snapshot
from inference_worker.process_pubsub import pubsub_problems
from inference_worker.transforms.making import transform_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSetup:
    """All of it, and how the documents are read again."""

    settings: Settings
    """Of the environment; its queue and its model are not used, and its Redis is the transport's where that is one."""
    flags: ProcessFlags
    documents: ProcessDocuments
    given: Mapping[str, str] = field(repr=False)
    """The flags as they were given."""
    url: str | None = field(repr=False)
    """The broker's by the environment, where a variable names it."""
    read_file: ReadFile
    paths: tuple[str, ...]
    """The files that flags name."""
    fingerprint: str
    """What was in them."""
    extensions: Extensions = field(default_factory=Extensions)
    """What other packages bring."""


def read_setup(
    given: Mapping[str, str],
    environ: Mapping[str, str],
    read_file: Callable[[str], str],
    rng: random.Random,
    extensions: Extensions | None = None,
) -> ProcessSetup:
    """Read flags (by their names), the documents that they name, and the environment.

    `read_file` raises OSError or ValueError.

    Raises:
        ConfigurationError: with every problem.
    """
    problems: list[str] = []
    extensions = extensions or Extensions()
    files = Snapshot(read_file)
    settings: Settings | None = None
    documents: ProcessDocuments | None = None
    try:
        settings = load(environ, needs="process")
        problems += sink_problems(settings, extensions)
    except ConfigurationError as exc:
        problems += exc.problems
    flags, wrong_flags = flags_and_problems(given, files, extensions.names)
    problems += wrong_flags
    url = None if settings is None else _broker_url(flags.kind, settings)
    if not wrong_flags or flags.transport_json not in NO_DOCUMENT:  # What is not named or not there is wrong already.
        try:
            documents = _documents(flags, url, extensions)
        except ConfigurationError as exc:
            problems += exc.problems
    if settings is None or documents is None or problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return ProcessSetup(
        settings=_named(_joined(settings, documents), rng),
        flags=flags,
        documents=documents,
        given=given,
        url=url,
        read_file=read_file,
        paths=files.paths,
        fingerprint=files.fingerprint,
        extensions=extensions,
    )


def documents_again(setup: ProcessSetup, read_file: ReadFile) -> ProcessDocuments:
    """What the documents say now, for a process that runs: no queue at all is fine, too.

    Raises:
        ConfigurationError: with every problem; what has changed and cannot change while it runs is one.
    """
    flags = read_flags(setup.given, read_file, setup.extensions.names)
    documents = _documents(flags, setup.url, setup.extensions, without_queues=True)
    if problems := needs_restart(setup.documents, documents):
        raise ConfigurationError(tuple(problems))
    return documents


def _documents(
    flags: ProcessFlags, url: str | None, extensions: Extensions, *, without_queues: bool = False
) -> ProcessDocuments:
    check = partial(gate_problems, prometheus_url=flags.prometheus_url, extensions=extensions)
    documents = documents_of(
        flags, url=url, gate_problems=check, without_queues=without_queues, others=extensions.names
    )
    if problems := (
        *transform_problems(documents, extensions),
        *extension_problems(documents, extensions),
        *pubsub_problems(documents.transport),
    ):
        raise ConfigurationError(problems)
    return documents


def _broker_url(kind: str, settings: Settings) -> str | None:
    """The broker's by the environment, where a variable names it."""
    if kind == "rabbitmq":
        return settings.rabbitmq.url_now() if settings.rabbitmq.given else None
    if kind == "sql":
        return settings.sql.url_now() or None
    return settings.redis.url_now() if settings.redis.given else None


def _joined(settings: Settings, documents: ProcessDocuments) -> Settings:
    """The environment with the transport's Redis in it: results lie beside the queues."""
    transport = documents.transport
    if transport.kind == "rabbitmq":
        url = settings.rabbitmq.url if transport.url is None else transport.url
        return settings.model_copy(update={"rabbitmq": settings.rabbitmq.model_copy(update={"url": url})})
    if transport.kind == "sql":
        # The variable wins, also as a file that is read again.
        url = transport.url if settings.sql.url is None else settings.sql.url
        return settings.model_copy(update={"sql": settings.sql.model_copy(update={"url": url})})
    if transport.kind == "extension":
        return settings  # Its address is its own; results lie in the Redis of the environment.
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
