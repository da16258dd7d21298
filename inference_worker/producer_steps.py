"""Submitting and cancelling on a Redis Cluster: in steps, as the keys of a request lie in several slots.

What only prepares a request comes first, the queue last: whoever dies in between leaves keys that expire with the
deadline and are in nobody's way. Not here: idempotency keys, which need the record and the queue in one step.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from inference_worker.errors import NotAccepted, StoreUnavailable
from inference_worker.producer_requests import PAYLOAD_GRACE_S, Prepared, active_key, cancel_key, payload_key
from inference_worker.redis_scripts import Argument, RedisCommands


async def submit_in_steps(commands: RedisCommands, chunk: Sequence[Prepared]) -> None:
    """Put requests into their queues, those of one queue as a whole or not at all.

    Raises:
        NotAccepted
    """
    preparing: list[Awaitable[Any]] = []
    queues: dict[str, list[Argument]] = {}
    for one in chunk:
        submission = one.submission
        request_id, deadline = submission.id, submission.deadline
        if one.payload is not None:
            key, until = payload_key(request_id, submission.token), deadline + PAYLOAD_GRACE_S
            preparing.append(commands.do("SET", key, one.payload, "EXAT", until))
        preparing.append(commands.do("SET", active_key(request_id), submission.token, "EXAT", deadline))
        preparing.append(commands.do("DEL", cancel_key(request_id)))
        queues.setdefault(submission.request_queue, []).extend((repr(one.score), one.member))
    await _done(preparing, maybe=False)
    await _done([commands.do("ZADD", queue, *members) for queue, members in queues.items()], maybe=True)


async def cancel_in_steps(commands: RedisCommands, meant: Sequence[tuple[str, str]], kept_for_s: int) -> Sequence[str]:
    """Mark requests (id, and token or '' for whichever lives) as cancelled; the ids of those that were marked.

    Raises:
        StoreUnavailable
    """
    marked = await asyncio.gather(*(_cancel(commands, request_id, token, kept_for_s) for request_id, token in meant))
    return [request_id for (request_id, _), done in zip(meant, marked, strict=True) if done]


async def _cancel(commands: RedisCommands, request_id: str, token: str, kept_for_s: int) -> bool:
    live = await commands.do("GET", active_key(request_id))
    if live is None or token not in ("", bytes(live).decode(errors="replace")):
        return False
    # One that ends meanwhile keeps the mark, which is of this submission alone and expires.
    await commands.do("SET", cancel_key(request_id), live, "EX", kept_for_s)
    return True


async def _done(steps: Sequence[Awaitable[Any]], *, maybe: bool) -> None:
    """Wait for all of them: what is refused was not done, what has no answer `maybe` was, if another was not."""
    answers = await asyncio.gather(*steps, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for failure in failures:
        if not isinstance(failure, StoreUnavailable):
            raise failure
    if failures:
        refused = all(isinstance(failure.__cause__, ResponseError) for failure in failures)
        some = maybe and (not refused or len(failures) < len(answers))
        said = f"Redis refuses it: {failures[0]}" if refused else f"not confirmed: {failures[0]}"
        raise NotAccepted(said[:220], maybe=some) from failures[0]
