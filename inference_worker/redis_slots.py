"""Where a key lies in a Redis Cluster: its slot, names of keys that share a slot, and the key that a command is about.

Pure. Who owns a slot is not here (`redis_cluster`).
"""

from binascii import crc_hqx
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Final

SLOTS: Final = 16384
KEY_SECOND: Final = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY"})
"""Commands of two words: the key comes after them."""

KEYLESS: Final = frozenset({"PING", "INFO", "SCRIPT", "TIME", "ACL", "CLUSTER", "CLIENT", "CONFIG", "ROLE"})
"""What may be asked of any server."""


def slot_of(key: str) -> int:
    """The slot of a key: of its hash tag, where it has one.

    Source: the Redis Cluster specification, "Key distribution model" and "Hash tags".
    """
    raw = key.encode(errors="surrogateescape")
    tag = _tag_in(raw)
    return crc_hqx(raw if tag is None else tag, 0) % SLOTS


def tag_of(key: str) -> str:
    """What has to stand between braces in a key that is to share the slot of this one."""
    tag = _tag_in(key.encode(errors="surrogateescape"))
    if tag is not None:
        return tag.decode(errors="surrogateescape")
    # A brace in it would end the tag: a number that hashes to the same slot.
    return key if key and "}" not in key else _numbers()[slot_of(key)]


def beside(key: str, name: str) -> str:
    """The name of a key that lies in the slot of another: `{queue}:name`, or `queue:name` where that has a tag.

    No two keys have one in common. Where that would be so (`{queue}` is all tag), or a tag cannot be had of the key
    itself, the name ends in a mark.
    """
    tag = tag_of(key)
    if key == f"{{{tag}}}":
        return f"{key}:{name}#"
    if _tag_in(key.encode(errors="surrogateescape")) is not None:
        return f"{key}:{name}"
    return f"{{{key}}}:{name}" if tag == key else f"{{{tag}}}{key}:{name}#"


def key_of(parts: Sequence[object]) -> str | None:
    """The key that a command is about; None where any server will do. Not for commands of several keys."""
    name = str(parts[0]).upper()
    if name in KEYLESS or len(parts) < 2:
        return None
    if name == "XREADGROUP":
        return _text(parts[parts.index("STREAMS") + 1])
    return _text(parts[2 if name in KEY_SECOND else 1])


def _tag_in(raw: bytes) -> bytes | None:
    begin = raw.find(b"{")
    end = raw.find(b"}", begin + 1) if begin >= 0 else -1
    return raw[begin + 1 : end] if end > begin + 1 else None


@cache
def _numbers() -> tuple[str, ...]:
    """The smallest number that hashes to each slot."""
    found: dict[int, str] = {}
    for number in count():
        found.setdefault(crc_hqx(str(number).encode(), 0) % SLOTS, str(number))
        if len(found) == SLOTS:
            break
    return tuple(found[slot] for slot in range(SLOTS))


def _text(part: object) -> str:
    return part.decode(errors="surrogateescape") if isinstance(part, bytes) else str(part)
