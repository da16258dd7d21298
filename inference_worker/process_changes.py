"""What documents say, to be compared with what they said before; and what of it a process cannot change while it runs.

Pure. Two parts are the same where they were written the same: where they stand in their documents does not count.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Final

from inference_worker.config.documents import ProcessDocuments
from inference_worker.config.values import Text

PLACE: Final = "where"
"""The field of a part that says where it stands in its document."""
RELOADED: Final = "queues"
"""The field of the transport that may become another one."""


def written(part: object) -> str:
    """A part of the documents as one text, the same for what is the same. It may hold secrets: not to be shown."""
    return json.dumps(_plain(part), sort_keys=True)


def needs_restart(before: ProcessDocuments, now: ProcessDocuments) -> list[str]:
    """What has changed and cannot change while it runs, one sentence each, without what is written there."""
    transport = [
        f"transport.{field.name}"
        for field in fields(now.transport)
        if field.name != RELOADED
        and written(getattr(before.transport, field.name)) != written(getattr(now.transport, field.name))
    ]
    transforms = [
        name
        for name in ("transforms", "answer_transforms")
        if written(getattr(before, name)) != written(getattr(now, name))
    ]
    return [f"{name}: has changed, which needs a restart" for name in (*transport, *transforms)]


def _plain(part: object) -> object:
    match part:
        case Text():
            return part.now()
        case str() | bool() | int() | float() | None:
            return part
        case Mapping():
            return {str(key): _plain(value) for key, value in part.items()}
        case list() | tuple():
            return [_plain(item) for item in part]
        case _ if is_dataclass(part):
            return {field.name: _plain(getattr(part, field.name)) for field in fields(part) if field.name != PLACE}
        case _:
            raise TypeError(f"documents hold no {type(part).__name__}")
