"""`dlq --sorted-set` on a real Redis: what died is shown, goes back once and as new, or is removed."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from inference_worker.config.settings import load
from inference_worker.disposition import Ack, DeadLetter, Hold, Token
from inference_worker.dlq import renewed
from inference_worker.dlq_command import DlqOptions, run_dlq
from inference_worker.llmd_messages import Envelope, Routing, read_member
from inference_worker.ports import Claimed, Delivery
from inference_worker.redis_scripts import RedisLink
from inference_worker.sorted_set_dead_letters import SortedSetDeadLetters
from inference_worker.transports.redis_sorted_set import SortedSetTransport
from tests.integration.test_dlq import dlq
from tests.sorted_set_kit import QUEUE, SortedSets, id_in, sorted_sets_at
from tests.transport_contract import failed, reply, request, take
from tests.waiting import eventually


@pytest.fixture
async def sets(redis_url: str) -> AsyncGenerator[SortedSets]:
    async with sorted_sets_at(redis_url) as made:
        yield made


async def hold(sets: SortedSets, delivery: Delivery) -> Hold:
    name = json.loads(delivery.body)["request_id"] if delivery.request is None else delivery.request.request_id
    assert isinstance(await sets.store.claim(name, 0, Token("h"), time.time() + 60), Claimed)
    return Hold(request_id=name, token=Token("h"))


async def die(sets: SortedSets, transport: SortedSetTransport) -> None:
    """As a request does that has killed its workers."""
    delivery = await take(transport)
    held = await hold(sets, delivery)
    end = failed(held.request_id)
    letter = DeadLetter(reason="poison", detail="it kills", attempts=3, status_code=500, reply=end, claim=held)
    await transport.settle(delivery, letter)


async def command(sets: SortedSets, do: Any, **options: Any) -> int:
    settings = load({"REDIS_URL": sets.url}, needs="process")
    asked = DlqOptions(do=do, sorted_set=QUEUE.name, **({"rate": 0.0} | options))
    return await run_dlq(settings, asked, time.time, asyncio.Event())


async def test_a_dead_request_is_put_back_once_as_a_new_submission_and_ends_with_a_result(
    sets: SortedSets, capsys: pytest.CaptureFixture[str]
) -> None:
    await sets.submit("r", "old", routing=Routing(request_token="old", result_queue_name="mine"))
    async with sets.session() as transport, transport.consuming(1):
        await die(sets, transport)

    assert await command(sets, "list", json=True) == 0
    (shown,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()][:1]
    assert (shown["request_id"], shown["reason"], shown["attempts"], shown["result"]) == ("r", "poison", 3, "failed")
    assert await command(sets, "replay", everything=True) == 0

    ((member, score),) = await sets.scored(QUEUE.name)
    envelope = read_member(member)
    assert isinstance(envelope, Envelope)
    token = envelope.routing.request_token
    assert token not in ("", "old")
    assert score == envelope.score
    assert await sets.client.get("request-active:r") == token.encode()
    assert (await sets.inside()).dead == Counter()
    async with sets.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        held = await hold(sets, delivery)
        await transport.settle(delivery, Ack(reply=reply(held.request_id), claim=held))
    assert [result.get("request_token") for result in await sets.results("mine")] == ["old", token]


async def test_one_of_our_own_format_begins_anew_under_its_id(sets: SortedSets) -> None:
    await sets.add(request("own"), "m-1")
    async with sets.session() as transport, transport.consuming(1):
        await die(sets, transport)

        assert await command(sets, "replay", ids=frozenset({"own"})) == 0

        delivery = await take(transport)
        held = await hold(sets, delivery)
        await transport.settle(delivery, Ack(reply=reply("own"), claim=held))
    assert (delivery.message_id, delivery.attempts) == ("m-1", 0)
    known = await sets.store.known("own")
    assert known is not None
    assert known.status == "completed"
    assert (await sets.inside()).dead == Counter()


async def test_of_two_who_put_it_back_one_does(sets: SortedSets) -> None:
    await sets.submit("theirs", "old")
    await sets.add(request("ours"))
    async with sets.session() as transport, transport.consuming(1):
        await die(sets, transport)
        await die(sets, transport)
    link = sets.link
    assert isinstance(link, RedisLink)
    letters = SortedSetDeadLetters(link, queue=QUEUE.name, ttl_s=60, now=time.time)
    await letters.begin()
    both = [letter for _ in range(2) if (letter := await letters.next()) is not None]

    said = [await letters.put_back(letter, renewed(letter.body, time.time()) or b"", QUEUE.name) for letter in both * 2]

    assert said == [None, None, "gone", "gone"]
    assert sorted(id_in(member) for member, _ in await sets.scored(QUEUE.name)) == ["ours", "theirs"]


async def test_what_cannot_go_back_stays_a_dead_letter(sets: SortedSets) -> None:
    """Its id was used again, its payload is gone, it is running, it is no request."""
    await sets.submit("again", "old")
    await sets.submit("apart", "tok", routing=Routing(request_token="tok"))
    async with sets.session() as transport, transport.consuming(1):
        await die(sets, transport)
        await die(sets, transport)
        await sets.client.zadd(QUEUE.name, {b"no request": time.time() + 60})

        async def parked() -> bool:
            return (await sets.inside()).dead.total() == 3

        await eventually(parked, within=5, what="three dead letters")
    letters: Any = await sets.client.xrange(QUEUE.dead_letters)
    for entry_id, fields in letters:
        if fields[b"job_id" if b"job_id" in fields else b"request"] == b"apart":
            said = json.loads(fields[b"request"])
            said["internal"]["payload_ref"], said["data"]["payload"] = "request-payload:apart:tok", None
            await sets.client.xdel(QUEUE.dead_letters, entry_id)
            await sets.client.xadd(QUEUE.dead_letters, {**fields, b"request": json.dumps(said)})
    await sets.client.set("request-active:again", "newer")

    assert await command(sets, "replay", everything=True) == 1

    assert (await sets.inside()).dead.total() == 3
    assert await sets.scored(QUEUE.name) == []


async def test_a_letter_whose_time_is_no_number_keeps_no_other_from_going_back(sets: SortedSets) -> None:
    for body in ('{"request_id": "odd", "timeout_s": null}', '{"request_id": "text", "timeout_s": "5"}'):
        await sets.client.xadd(QUEUE.dead_letters, {"request": body})
    await sets.client.xadd(QUEUE.dead_letters, {"request": request("good")})

    assert await command(sets, "replay", everything=True) == 0

    assert sorted(id_in(member) for member, _ in await sets.scored(QUEUE.name)) == ["good", "odd", "text"]
    assert (await sets.inside()).dead == Counter()


async def test_the_command_needs_the_name_of_the_queue_and_redis_alone(sets: SortedSets) -> None:
    await sets.submit("r", "old")
    async with sets.session() as transport, transport.consuming(1):
        await die(sets, transport)

    listed = await dlq({"REDIS_URL": sets.url}, "list", "--sorted-set", QUEUE.name, "--json")
    purged = await dlq({"REDIS_URL": sets.url}, "purge", "--sorted-set", QUEUE.name, "--everything", "--yes", "--json")

    assert (listed.code, listed.lines[0]["request_id"]) == (0, "r"), listed.err
    assert (purged.code, purged.lines[-1]["purged"]) == (0, 1), purged.err
    assert (await sets.inside()).dead == Counter()
