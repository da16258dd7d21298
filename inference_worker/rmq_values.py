"""Has the driver read whatever a producer may have written into a message's properties, and write it as it came.

The driver gives up the connection over a text that is not UTF-8 (an id of raw bytes) or a timestamp beyond the year
9999 (one in microseconds): the broker then delivers that message again, for ever, and no other. Of what it can read it
changes some when a copy is made: timestamps in milliseconds, doubles, long names. Not here: what any of it means.
"""

import struct
from datetime import UTC, datetime
from typing import Any, Final

from pamqp import decode, encode

_SECONDS: Final = struct.Struct(">Q")
_LAST_SECOND: Final = 253_402_300_799
"""Of the year 9999."""


class ForeignText(str):
    """A text that is not UTF-8: readable, with `\\x…` for what is none, and the bytes that it is written with."""

    raw: bytes

    @classmethod
    def of(cls, raw: bytes) -> "ForeignText":
        text = cls(raw.decode(errors="backslashreplace"))
        text.raw = raw
        return text


class Instant(datetime):
    """A timestamp whose number is kept as it came: seconds by the standard, milliseconds or less by some libraries."""

    number: int

    @classmethod
    def of(cls, number: int) -> "Instant":
        seconds = number if number <= 0xFFFFFFFF else number / 1000
        instant = cls.fromtimestamp(min(seconds, _LAST_SECOND), UTC)
        instant.number = number
        return instant

    def timestamp(self) -> float:
        """The number that is written: an integer, since a float would round a large one."""
        return self.number


def text_of(value: str | None) -> str | None:
    """A property's text; None where it is no text that can be told from others."""
    return None if isinstance(value, ForeignText) else value


def install() -> None:
    """Put these in the place of the driver's own, for the whole process; for what both can do they do the same."""
    decode.METHODS["shortstr"] = _read_short_text
    decode.METHODS["timestamp"] = decode.TABLE_MAPPING[b"T"] = _read_timestamp
    decode.METHODS["table"] = decode.TABLE_MAPPING[b"F"] = _read_table
    encode.METHODS["shortstr"] = _write_short_text
    encode.METHODS["table"] = encode.field_table = _write_table
    encode.encode_table_value = _write_value


def _read_short_text(value: bytes) -> tuple[int, str]:
    if not value or len(value) <= value[0]:
        raise ValueError("a short string is cut off")
    end = value[0] + 1
    raw = bytes(value[1:end])
    try:
        return end, raw.decode()
    except UnicodeDecodeError:
        return end, ForeignText.of(raw)


def _read_timestamp(value: bytes) -> tuple[int, datetime]:
    if len(value) < _SECONDS.size:
        raise ValueError("a timestamp is cut off")
    return _SECONDS.size, Instant.of(_SECONDS.unpack_from(value)[0])


def _read_table(value: bytes) -> tuple[int, dict[str, Any]]:
    if len(value) < 4 or len(value) < (end := 4 + int.from_bytes(value[:4])):
        raise ValueError("a table is cut off")
    table: dict[str, Any] = {}
    at = 4
    while at < end:
        used, name = _read_short_text(value[at:end])
        at += used
        used, table[name] = decode.embedded_value(value[at:end])
        at += used
    return end, table


def _write_short_text(value: str) -> bytes:
    if isinstance(value, ForeignText):
        return bytes([len(value.raw)]) + value.raw
    return encode.short_string(value)


def _write_table(value: Any) -> bytes:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"a table is expected, got {type(value).__name__}")
    whole = b"".join(_write_short_text(name) + encode.encode_table_value(item) for name, item in (value or {}).items())
    return len(whole).to_bytes(4) + whole


_driver_writes = encode.encode_table_value


def _write_value(value: Any) -> bytes:
    match value:
        case float():  # As a double: the driver's single precision rounds, and fails beyond 3e38.
            return b"d" + encode.double(value)
        case bytes():  # What the driver makes of a long string that is not UTF-8.
            return b"S" + len(value).to_bytes(4) + value
        case _:
            return _driver_writes(value)
