"""What a producer wrote into a message's properties is read whatever it is, and written as it came."""

import struct

import pytest
from pamqp import decode
from pamqp.commands import Basic

from inference_worker import rmq_values
from inference_worker.rmq_values import ForeignText, Instant, text_of

rmq_values.install()

LAST_OF_64_BITS = 2**64 - 1


def name(raw: bytes) -> bytes:
    return bytes([len(raw)]) + raw


def table(*entries: bytes) -> bytes:
    return struct.pack(">I", len(whole := b"".join(entries))) + whole


def of_number(number: int) -> bytes:
    return struct.pack(">Q", number)


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b"T" + of_number(1_700_000_000), id="a timestamp in seconds"),
        pytest.param(b"T" + of_number(1_700_000_000_000), id="a timestamp in milliseconds"),
        pytest.param(b"T" + of_number(1_700_000_000_000_000), id="a timestamp in microseconds"),
        pytest.param(b"T" + of_number(LAST_OF_64_BITS), id="the last timestamp"),
        pytest.param(b"S\x00\x00\x00\x02\xff\xfe", id="a long string that is not UTF-8"),
        pytest.param(b"S\x00\x00\x00\x02\xc3\xa9", id="a long string that is"),
        pytest.param(b"d" + struct.pack(">d", 0.1), id="a double that single precision would round"),
        pytest.param(b"d" + struct.pack(">d", 1e300), id="a double beyond single precision"),
        pytest.param(b"x\x00\x00\x00\x01\xff", id="bytes"),
        pytest.param(b"A" + table(b"V", b"T" + of_number(LAST_OF_64_BITS)), id="inside an array"),
        pytest.param(b"F" + table(name(b"\xe9") + b"S\x00\x00\x00\x01\xff"), id="inside a table"),
    ],
)
def test_a_header_is_written_as_it_came(written: bytes) -> None:
    came = table(name(b"before") + b"t\x01", name(b"odd \xff") + written, name(b"n" * 255) + b"V")

    used, headers = decode.METHODS["table"](came)

    assert used == len(came)
    assert isinstance(headers, dict)
    assert Basic.Properties(headers=headers).marshal()[2:] == came


@pytest.mark.parametrize("number", [0, 1_700_000_000, 1_700_000_000_000_000, LAST_OF_64_BITS])
def test_the_property_timestamp_is_written_as_it_came(number: int) -> None:
    came = Basic.Properties()

    came.unmarshal(Basic.Properties.flags["timestamp"], of_number(number))

    assert came.marshal()[2:] == of_number(number)


def test_an_id_of_raw_bytes_can_be_read_and_is_written_as_it_came_and_names_nothing() -> None:
    came, raw = Basic.Properties(), name(b"id-\xff\x00")

    came.unmarshal(Basic.Properties.flags["message_id"], raw)

    assert came.message_id == "id-\\xff\x00"
    assert came.marshal()[2:] == raw
    assert text_of(came.message_id) is None


def test_plain_text_stays_what_it_is() -> None:
    assert text_of("é") == "é"
    assert text_of(None) is None
    assert not isinstance(decode.METHODS["shortstr"](name("é".encode()))[1], ForeignText)


def test_a_timestamp_is_told_in_seconds() -> None:
    assert Instant.of(1_700_000_000_000).isoformat() == "2023-11-14T22:13:20+00:00"


@pytest.mark.parametrize(
    ("kind", "cut"), [("shortstr", b"\x05ab"), ("timestamp", b"\x00"), ("table", b"\x00\x00\x00\x09")]
)
def test_what_is_cut_off_is_an_error_of_the_kind_that_the_driver_expects(kind: str, cut: bytes) -> None:
    with pytest.raises(ValueError, match="cut off"):
        decode.METHODS[kind](cut)


def test_headers_that_are_no_table_are_refused() -> None:
    with pytest.raises(TypeError, match="a table is expected"):
        Basic.Properties(headers=["a list"]).marshal()  # type: ignore[arg-type]  # The mistake under test.
