"""Reads a form by another hand than ours: aiohttp's, as a server gets it."""

import asyncio
from dataclasses import dataclass
from unittest.mock import Mock

from aiohttp import BodyPartReader, MultipartReader, StreamReader

from inference_worker.transforms.chain import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a form."""

    name: str
    content: bytes
    filename: str | None = None
    content_type: str | None = None


async def parts_of(body: Body | object) -> list[Part]:
    """Every part, in its order."""
    assert isinstance(body, Body)
    assert body.content_type is not None
    stream = StreamReader(Mock(_reading_paused=False), 2**16, loop=asyncio.get_running_loop())
    stream.feed_data(body.content)
    stream.feed_eof()
    parts = []
    async for part in MultipartReader({"Content-Type": body.content_type}, stream):
        assert isinstance(part, BodyPartReader)
        assert part.name is not None
        parts.append(
            Part(
                name=part.name,
                content=bytes(await part.read()),
                filename=part.filename,
                content_type=part.headers.get("Content-Type"),
            )
        )
    return parts


async def fields_of(body: Body | object) -> dict[str, str]:
    """Name and text of every part; none of them a file."""
    parts = await parts_of(body)
    assert [part for part in parts if part.filename is not None] == []
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: part.content.decode() for part in parts}
