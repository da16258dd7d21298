"""Writes multipart/form-data (RFC 7578), names escaped as browsers do (WHATWG HTML, "multipart form data"). Pure."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from inference_worker.transforms.chain import Body, Unfit

MOST_FIELDS: Final = 1000
LONGEST_NAME: Final = 1000
"""Characters. Each field costs a head with its name: from a list of some megabytes, under a name of some more, would
come a form that no memory holds.
"""

_ESCAPES: Final = str.maketrans({'"': "%22", "\r": "%0D", "\n": "%0A"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A file in a form."""

    field: str
    filename: str
    content_type: str
    content: bytes


def form(fields: Iterable[tuple[str, bytes]], *files: FilePart) -> Body | Unfit:
    """A form of fields, and files behind them; Unfit where it would be many times what it is made of.

    The boundary is drawn by chance: a caller who knew it could pass a part of a value off as another field.
    """
    boundary = uuid.uuid4().hex
    pieces: list[bytes] = []
    for number, (name, value) in enumerate(fields, start=1):
        if number > MOST_FIELDS or len(name) > LONGEST_NAME:
            return Unfit(f"a form has at most {MOST_FIELDS} fields, with names of at most {LONGEST_NAME} characters")
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_escaped(name)}"\r\n\r\n'
        pieces += (head.encode(), value, b"\r\n")
    for part in files:
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{_escaped(part.field)}"; '
            f'filename="{_escaped(part.filename)}"\r\nContent-Type: {part.content_type}\r\n\r\n'
        )
        pieces += (head.encode(), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    return Body(content=b"".join(pieces), content_type=f"multipart/form-data; boundary={boundary}")


def _escaped(name: str) -> str:
    return name.translate(_ESCAPES)
