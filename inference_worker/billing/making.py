"""From the variables to the billing sink that they name: the billing server, or one of another package."""

import json
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final, cast

from inference_worker.billing.cloudevents import CroesusSink
from inference_worker.billing.guarded import GuardedSink
from inference_worker.config.parts import CROESUS
from inference_worker.config.settings import Settings
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import BillingSinkParts, Extensions
from inference_worker.gates.parameters import Parameters
from inference_worker.ports import BillingSink

PARAMETERS: Final = "BILLING_SINK_PARAMETERS"


@asynccontextmanager
async def billing_sink(
    settings: Settings, extensions: Extensions, *, now: Callable[[], float], verify: ssl.SSLContext | bool
) -> AsyncGenerator[BillingSink | None, None]:
    """The sink, with what it has open; None where there is none.

    Raises:
        ConfigurationError: with all that is wrong with it.
    """
    billing = settings.billing
    if not billing.on:
        yield None
    elif billing.sink == CROESUS and billing.url is not None:
        async with CroesusSink(billing.url.now, now=now, verify=verify) as sink:
            yield sink
    else:
        tls = verify if isinstance(verify, ssl.SSLContext) else None
        made = _made(settings, extensions, now=now, tls=tls)
        async with AsyncExitStack() as stack:
            if isinstance(made, AbstractAsyncContextManager):
                await stack.enter_async_context(made)
            yield GuardedSink(made, billing.sink)


def sink_problems(settings: Settings, extensions: Extensions) -> tuple[str, ...]:
    """What is wrong with the sink; nothing is opened."""
    if settings.billing.sink == CROESUS:
        return ()
    try:
        _made(settings, extensions, now=lambda: 0.0, tls=None)
    except ConfigurationError as exc:
        return exc.problems
    return ()


def _made(
    settings: Settings, extensions: Extensions, *, now: Callable[[], float], tls: ssl.SSLContext | None
) -> BillingSink:
    problems: list[str] = []
    billing, identity = settings.billing, settings.identity
    parts = BillingSinkParts(
        given=Parameters(_object(billing.sink_parameters.now(), problems), PARAMETERS, problems),
        url=None if billing.url is None else billing.url.now,
        now=now,
        tls=tls,
        deployment_id=identity.deployment_id,
        replica_id=identity.replica_id,
    )
    made = extensions.make("billing sink", billing.sink, parts, "BILLING_SINK")
    if problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return cast(BillingSink, made)


def _object(text: str, problems: list[str]) -> dict[str, object]:
    """Never shown where it is wrong: it may hold a secret."""
    try:
        read = json.loads(text or "{}")
    except ValueError:
        read = None
    if isinstance(read, dict):
        return read
    problems.append(f"{PARAMETERS}: is no JSON object; accepted: a JSON object on one line")
    return {}
