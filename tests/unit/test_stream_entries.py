"""What an entry of the stream says, and what of it a copy and a dead letter keep."""

import pytest

from inference_worker.transports.stream_entries import (
    MOST_FIELDS,
    contents_of,
    copy_of,
    entry_fields,
    letter_of,
    of_stream,
    parsed,
)

ENTRY = [b"job_id", b"a", b"attempt", b"2", b"enqueued_at", b"1.5", b"request", b"\xff{}", b"traceparent", b"00-x"]


def test_an_entry_is_read_with_its_body_as_it_came() -> None:
    said = contents_of(ENTRY)

    assert (said.body, said.message_id, said.attempts) == (b"\xff{}", "a", 2)
    assert said.headers == {"traceparent": "00-x"}
    assert not said.odd_attempt


@pytest.mark.parametrize(
    ("attempt", "counts_as", "odd"),
    [
        pytest.param(b"0", 0, False, id="none behind it"),
        pytest.param(b"2147483647", 2**31 - 1, False, id="the most there can be"),
        pytest.param(b"2147483648", 0, True, id="one too many"),
        pytest.param(b"99999999999999999999", 0, True, id="far too many"),
        pytest.param(b"-1", 0, True, id="less than none"),
        pytest.param(b"1.0", 0, True, id="a fraction"),
        pytest.param(b" 1", 0, True, id="with a space"),
        pytest.param("١".encode(), 0, True, id="digits of another script"),
        pytest.param(b"", 0, True, id="nothing"),
    ],
)
def test_an_attempt_is_a_whole_number_or_counts_as_0(attempt: bytes, counts_as: int, odd: bool) -> None:
    said = contents_of([b"request", b"{}", b"attempt", attempt])

    assert (said.attempts, said.odd_attempt) == (counts_as, odd)


def test_an_entry_with_nothing_that_we_know_is_an_empty_body() -> None:
    said = contents_of([b"foo", b"\xffbar"])

    assert (said.body, said.message_id, said.attempts, said.odd_attempt) == (b"", None, 0, False)
    assert said.headers == {"foo": "\ufffdbar"}


def test_what_is_written_is_read_again() -> None:
    fields = entry_fields(b"{}", "a", enqueued_at=1.5, headers={"traceparent": "00-x", "n": 1, "attempt": "9"})
    said = contents_of(fields)

    assert (said.body, said.message_id, said.attempts) == (b"{}", "a", 0)
    assert said.headers == {"traceparent": "00-x", "n": "1"}


def test_without_an_id_there_is_no_field_for_it() -> None:
    assert b"job_id" not in entry_fields(b"{}", None, enqueued_at=1.5)


def test_an_id_that_is_no_text_is_none() -> None:
    """With a sign in place of what cannot be read, two of them would be one, and answered as one."""
    assert contents_of([b"job_id", b"a\xff", b"request", b"no"]).message_id is None


def test_a_copy_differs_by_its_attempt_alone() -> None:
    copy = dict(zip(copy_of(ENTRY, 3)[::2], copy_of(ENTRY, 3)[1::2], strict=True))

    assert copy == dict(zip(ENTRY[::2], ENTRY[1::2], strict=True)) | {b"attempt": b"3"}


def test_a_dead_letters_own_words_stand_above_the_entrys() -> None:
    letter = letter_of([*ENTRY, b"reason", b"none of ours"], {b"reason": b"poison"})

    assert letter.count(b"reason") == 1
    assert letter[-2:] == [b"reason", b"poison"]
    assert letter[: len(ENTRY)] == ENTRY


def test_of_too_many_fields_the_request_is_kept_for_sure() -> None:
    """A script can pass on some thousands of words; an entry may have more."""
    many = [part for n in range(MOST_FIELDS * 3) for part in (str(n).encode(), b"x")]
    copy = copy_of([*many, *ENTRY], 1)

    assert len(copy) <= 2 * MOST_FIELDS + 2
    assert contents_of(copy).body == b"\xff{}"
    assert contents_of(copy).message_id == "a"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([[b"s", [[b"1-0", ENTRY]]]], id="RESP2"),
        pytest.param({b"s": [[b"1-0", ENTRY]]}, id="RESP3"),
        pytest.param({b"s": [[b"1-0", dict(zip(ENTRY[::2], ENTRY[1::2], strict=True))]]}, id="fields as a map"),
    ],
)
def test_rows_are_read_in_every_form_that_they_come_in(answer: object) -> None:
    (entry,) = parsed(of_stream(answer))

    assert (entry.entry_id, entry.count, entry.fields) == ("1-0", 1, tuple(ENTRY))


def test_what_was_deleted_before_it_was_read_is_left_out() -> None:
    assert parsed(of_stream([[b"s", [[b"1-0", None], [b"2-0", ENTRY]]]]))[0].entry_id == "2-0"
    assert parsed(of_stream(None)) == []
