"""The metrics buffer is bounded, and knows exactly what it lost."""

import dataclasses

from inference_worker.metrics_buffer import MetricsBuffer, RequestRecord

RECORD = RequestRecord(
    request_id="r-0",
    status_code=200,
    status="completed",
    disposition="ack",
    attempt=0,
    received_at=1.0,
    finished_at=2.0,
    queue_s=0.5,
    model_s=0.5,
    ttft_s=None,
    tbt_s=None,
    prompt_tokens=3,
    completion_tokens=4,
    total_tokens=7,
)


def record(request_id: str) -> RequestRecord:
    return dataclasses.replace(RECORD, request_id=request_id)


def test_taking_empties_the_buffer() -> None:
    buffer = MetricsBuffer(10)
    buffer.add(record("a"))
    buffer.add(record("b"))

    assert buffer.take() == ([record("a"), record("b")], 0)
    assert buffer.take() == ([], 0)
    assert buffer.held_bytes == 0


def test_a_full_buffer_keeps_the_latest_and_counts_the_rest() -> None:
    buffer = MetricsBuffer(2)

    for name in "abcde":
        buffer.add(record(name))

    assert buffer.take() == ([record("d"), record("e")], 3)


def test_the_bound_in_bytes_holds_whatever_the_ids_are() -> None:
    buffer = MetricsBuffer(1000, limit_bytes=10_000)

    for number in range(100):
        buffer.add(record(f"{number:0512}"))

    assert 0 < buffer.held_bytes <= 10_000
    records, dropped = buffer.take()
    assert len(records) + dropped == 100
    assert records[-1].request_id == f"{99:0512}"


def test_a_record_larger_than_the_bound_is_lost_and_counted() -> None:
    buffer = MetricsBuffer(10, limit_bytes=100)

    buffer.add(record("a"))

    assert buffer.take() == ([], 1)
    assert buffer.held_bytes == 0


def test_what_was_lost_stays_exact_over_failed_flushes() -> None:
    """Contract, section 7: `dropped` is what was lost since the last flush; one that failed has told nobody."""
    buffer = MetricsBuffer(2)
    for name in "abc":
        buffer.add(record(name))

    records, dropped = buffer.take()  # Two, and one lost.
    buffer.add(record("d"))
    buffer.not_sent(len(records), dropped)
    records, dropped = buffer.take()  # One, and three lost.
    buffer.not_sent(len(records), dropped)

    assert buffer.take() == ([], 4)
    assert buffer.take() == ([], 0)


def test_each_lost_record_is_told_once() -> None:
    told: list[int] = []
    buffer = MetricsBuffer(2, count_lost=told.append)
    for name in "abc":
        buffer.add(record(name))

    buffer.not_sent(len(buffer.take()[0]), 1)
    buffer.not_sent(0, buffer.take()[1])

    assert sum(told) == 3
