"""`multipart`: a form with a file that came inside the message, for servers that take uploads (audio above all).

It acts on requests to its paths whose payload has the file as base64. The other members become fields: a text as it
is, a list under a name that ends in `[]` as one field for each item, anything else as JSON; null is left out.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import Body, Unfit
from inference_worker.transforms.forms import FilePart, form
from inference_worker.transforms.gcs_uri import PROVIDER, plain
from inference_worker.transforms.members import members_of, text_of

AUDIO_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
FILENAME: Final = "filename"
CONTENT_TYPE: Final = "content_type"
ANY_TYPE: Final = "application/octet-stream"
TYPES: Final = {
    "flac": "audio/flac",
    "m4a": "audio/mp4",
    "mp3": "audio/mpeg",
    "mp4": "audio/mp4",
    "mpeg": "audio/mpeg",
    "mpga": "audio/mpeg",
    "oga": "audio/ogg",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "wav": "audio/wav",
    "webm": "audio/webm",
}
"""By a file's ending, where its message does not say; the same on every machine."""

_TYPE: Final = re.compile(r"[\w!#$&^.+-]{1,127}/[\w!#$&^.+-]{1,127}(; ?[\w-]+=[\w.-]+)*", re.ASCII)

_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipart:
    """See `BodyTransform`."""

    endpoints: Sequence[str] = AUDIO_PATHS
    providers: Sequence[str] = ()
    """Where there are any, only requests whose metadata `provider` is one of them."""
    base64_field: str = "file_base64"
    """The member that has the file."""
    file_field: str = "file"
    """The part's name."""
    filename: str = "audio.wav"
    """Where the message does not say."""

    def validate(self, request: InferenceRequest) -> Unfit | None:
        """A stream, which cannot be put together. The file is read once, when it is sent."""
        if request.stream and self._mine(request) is not None:
            return Unfit("an answer to a form cannot be streamed: leave stream out")
        return None

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        """The form."""
        members = self._mine(request)
        if members is None:
            return None
        part = self._part(members)
        if isinstance(part, Unfit):
            return part
        taken = (self.base64_field, self.file_field, FILENAME, CONTENT_TYPE)
        rest = (field for name, raw in members.items() if name not in taken for field in _fields(name, raw))
        return form(rest, part)

    def _mine(self, request: InferenceRequest) -> dict[str, bytes] | None:
        """The members of a request that is for this transform."""
        if request.endpoint.strip("/") not in {path.strip("/") for path in self.endpoints}:
            return None
        if self.providers and request.metadata.get(PROVIDER, "") not in self.providers:
            return None
        members = members_of(request.payload)
        return members if members and text_of(members.get(self.base64_field)) else None

    def _part(self, members: dict[str, bytes]) -> FilePart | Unfit:
        filename = text_of(members.get(FILENAME)) or self.filename
        ending = filename.rpartition(".")[2].lower()
        content_type = text_of(members.get(CONTENT_TYPE)) or TYPES.get(ending, ANY_TYPE)
        if not _TYPE.fullmatch(content_type):
            return Unfit(f"{CONTENT_TYPE} is no media type such as audio/wav")
        try:
            # The command base64 breaks its lines.
            content = base64.b64decode("".join((text_of(members[self.base64_field]) or "").split()), validate=True)
        except ValueError as exc:
            return Unfit(f"{self.base64_field} is no base64: {exc}")
        return FilePart(field=self.file_field, filename=filename, content_type=content_type, content=content)


def _fields(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
    if name.endswith("[]") and raw.startswith(b"["):
        yield from ((name, plain(bytes(item))) for item in _items(raw))
    elif raw != b"null":
        yield name, plain(raw)
