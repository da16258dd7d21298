"""A JSON object as the bytes that came, of which one member alone is read or replaced. Pure.

Nothing else of it changes: not a space, not the form of a number. Not here: members that lie deeper.
"""

import re
from typing import Final

import msgspec

from inference_worker.messages import json_mended

_NAME: Final = re.compile(rb'\s*,?\s*"(?:[^"\\]|\\.)*+"\s*:\s*')
_END: Final = re.compile(rb"\s*\}\s*")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def members_of(text: bytes) -> dict[str, bytes] | None:
    """Each member's value as JSON, of one given twice the last; None where the text is no object."""
    try:
        return {name: bytes(raw) for name, raw in _object(json_mended(text)).items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def with_member(text: bytes, name: str, value: bytes, *, added: bool = False) -> bytes | None:
    """The text with another `value` for a member.

    One that is missing is put in front if it may be `added`. None where the text is no object, or nothing changes.
    """
    members = members_of(text)
    if members is None or (name not in members and not added):
        return None
    if name not in members:
        start = text.index(b"{") + 1
        return text[:start] + msgspec.json.encode(name) + b":" + value + (b"," if members else b"") + text[start:]
    if members[name] == value:
        return None
    span = _span(json_mended(text), members, name)
    if span is None:  # A member stands there twice. Who reads it may take the first: so one is left of each.
        return msgspec.json.encode({n: msgspec.Raw(value if n == name else raw) for n, raw in members.items()})
    return text[: span[0]] + value + text[span[1] :]


def _span(text: bytes, members: dict[str, bytes], name: str) -> tuple[int, int] | None:
    """From where to where the value stands: members follow each other, each as long as its value is."""
    at, found = text.index(b"{") + 1, None
    for known, raw in members.items():
        head = _NAME.match(text, at)
        if head is None or text[head.end() : head.end() + len(raw)] != raw:
            return None
        at = head.end() + len(raw)
        if known == name:
            found = head.end(), at
    return found if _END.fullmatch(text, at) else None


def text_of(raw: bytes | None) -> str | None:
    """The text that a value is; None where it is none."""
    if raw is None or not raw.startswith(b'"'):
        return None
    return msgspec.json.decode(raw, type=str)
