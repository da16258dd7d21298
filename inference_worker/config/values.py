"""What one variable may hold: texts that may live in files, URLs, names, numbers, and how each is declared.

Not here: which variables there are; `settings` has those.
"""

import base64
import binascii
import ipaddress
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import SplitResult, parse_qs, quote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

MOST_FILE_BYTES = 65536
DAY_S = 86400
AMQP_SHORT_STRING_BYTES = 255
SECRET_PREFIX = "whsec_"
FEWEST_SECRET_BYTES = 24
MOST_SECRET_BYTES = 64
"""Of a webhook's secret, as Standard Webhooks 1.0 has it."""
DELAY_SUFFIX_BYTES = 24
"""Room that the request queue's name leaves for the names of its delay queues."""


class Text:
    """A URL or a secret. One that came from a file is read again by `now()`, so that it can be rotated.

    Prints as `***`, and a URL without its user part and its query.
    """

    __slots__ = ("_cast", "_path", "_secret", "_value")

    def __init__(self, value: str, *, path: str | None = None) -> None:
        self._value = value
        self._path = path
        self._cast: Callable[[str], str] = str
        self._secret = True

    def checked(self, cast: Callable[[str], str], *, secret: bool) -> "Text":
        """The same text behind `cast`, which is asked again whenever the file is read again."""
        text = Text(cast(self._value), path=self._path)
        text._cast, text._secret = cast, secret
        return text

    def now(self) -> str:
        """The value as it stands now; the last good one where the file is gone, empty or wrong."""
        if self._path is not None:
            try:
                self._value = self._cast(read_file(self._path)) or self._value
            except (OSError, ValueError):
                return self._value
        return self._value

    def __repr__(self) -> str:
        return "***" if self._secret else without_user(self._value)


def url_text(url: str) -> Text:
    """A URL that no variable gave: a default, or an address that `dev` has just opened."""
    return Text(url).checked(str, secret=False)


def read_file(path: str) -> str:
    """The text of a small regular file, less one trailing newline.

    Raises: OSError, or ValueError where it is no text or too large.
    """
    with open_regular(path) as opened:
        raw = opened.read(MOST_FILE_BYTES + 1)
    if len(raw) > MOST_FILE_BYTES:
        raise ValueError(f"is larger than {MOST_FILE_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        # No cause: the exception's text would quote the bytes of a secret.
        raise ValueError("is not UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")


def open_regular(path: str) -> BinaryIO:
    """Opened for reading; ValueError for a pipe or a device, which would block or never end."""
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("is not a regular file")
    return file.open("rb")


def without_user(url: str) -> str:
    """A checked URL as it may be shown: without the user part, and the query, where some drivers take passwords."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{parts.path}"


def percent_encoded(text: str) -> str:
    return quote(text, safe="")


# What a URL may be


def _split(url: str, schemes: tuple[str, ...]) -> SplitResult:
    """Never says what came: a URL may hold a password, also one that was not recognised as a URL."""
    url = _plain(url.strip())
    if not url:
        raise ValueError("is empty")
    if url[0] in "\"'":
        raise ValueError("is wrapped in quotes, which would be part of the value")
    if "#" in url:
        raise ValueError("has a '#' inside; in a user or a password it is written %23")
    if re.search(r"\s", url):
        raise ValueError("has white space inside")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(
            "has a port that is no number from 1 to 65535, or a '/' or '?' in a password, which are written %2F and %3F"
        ) from None
    if parts.scheme not in schemes or "://" not in url:
        raise ValueError("does not begin with " + " or ".join(f"{scheme}://" for scheme in schemes))
    if port == 0:
        raise ValueError("has the port 0")
    if not parts.hostname and parts.scheme != "unix":
        raise ValueError("names no host")
    return parts


def _base_url(url: str) -> str:
    if _split(url, ("http", "https")).query:
        raise ValueError("has a query, and paths are put behind it")
    return url.strip().rstrip("/")


def _page_url(url: str) -> str:
    _split(url, ("http", "https"))
    return url.strip()


def _amqp_url(url: str) -> str:
    parts = _split(url, ("amqp", "amqps"))
    if "/" in parts.path[1:]:
        raise ValueError("has a second '/' in its path; in the name of a virtual host it is written %2F")
    for beat in parse_qs(parts.query, keep_blank_values=True).get("heartbeat", []):
        whole_heartbeat(beat)
    return url.strip()


def _redis_url(url: str) -> str:
    parts = _split(url, ("redis", "rediss", "unix"))
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise ValueError("names no socket file")
    elif not re.fullmatch(r"/?|/\d{1,9}", parts.path):
        raise ValueError("has a path that is no database number")
    return url.strip()


def _sql_url(url: str) -> str:
    _split(url, ("postgres", "postgresql"))
    return url.strip()


def is_off(given: object) -> bool:
    """The word that switches a sink off on purpose."""
    return (given.now() if isinstance(given, Text) else str(given)).strip().lower() == "off"


def _sink_url(given: object) -> Text | None:
    """None for a sink that is off."""
    text = given if isinstance(given, Text) else Text(str(given))
    return None if is_off(text) else text.checked(_base_url, secret=False)


def whole_heartbeat(given: object) -> int:
    """RabbitMQ takes whole seconds, so that a fraction is rounded up."""
    try:
        beat = math.ceil(float(str(given)))
    except (ValueError, OverflowError):
        raise ValueError("has a heartbeat that is no number of seconds") from None
    if beat == 0:
        raise ValueError("has a heartbeat of 0: without heartbeats a dead peer would never be noticed")
    if not 1 <= beat <= 65535:
        raise ValueError("has a heartbeat that is out of bounds")
    return beat


# What a text may be


def _plain(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8") from None
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        raise ValueError("has a control character inside")
    return text


def _token(text: str) -> str:
    if not re.fullmatch(r"[ -~]*", text):
        raise ValueError("has a character that no HTTP header can carry: a line break, or one outside ASCII")
    return text


def _host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if re.search(r"[\s/@:\[\]?#]", _plain(text)):
            raise ValueError("is no host name or address; port, user and scheme do not belong here") from None
    return text


def _amqp_name(text: str) -> str:
    size = len(_plain(text).encode())
    if size > AMQP_SHORT_STRING_BYTES:
        raise ValueError(f"is {size} bytes long")
    return text


def _declared_name(text: str) -> str:
    if text.startswith("amq."):
        raise ValueError("begins with 'amq.', which RabbitMQ keeps for itself")
    return _amqp_name(text)


def _deployment_id(text: str) -> str:
    size = len(_plain(text).encode())
    most = AMQP_SHORT_STRING_BYTES - DELAY_SUFFIX_BYTES - len("infer_req.")
    if size > most:
        raise ValueError(f"is {size} bytes long, and RabbitMQ's names leave {most}")
    return text


def _identity(text: str) -> str:
    if len(_plain(text)) > 512:
        raise ValueError("is longer than 512 characters")
    return text


def _http_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("does not start with '/'")
    if re.search(r"[\s#]", _plain(text)):
        raise ValueError("has white space or a '#' inside")
    return text


def _header_name(text: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", text):
        raise ValueError("is no name of an HTTP header")
    return text.lower()


def _status_codes(given: object) -> frozenset[int]:
    if isinstance(given, frozenset):
        return given
    codes = [code.strip() for code in str(given).split(",")]
    if not all(re.fullmatch(r"[45]\d\d", code) for code in codes):
        raise ValueError("is no list of statuses")
    return frozenset(int(code) for code in codes)


def _retry_statuses(given: object) -> frozenset[int]:
    """None at all for the word `off`, since an empty variable is an unset one."""
    return frozenset() if is_off(given) else _status_codes(given)


def _networks(given: object) -> tuple[str, ...]:
    if isinstance(given, tuple):
        return given
    networks = [network.strip() for network in str(given).split(",")]
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as exc:
            raise ValueError(f"has a part that is no network: {str(exc)[:200]}") from None
    return tuple(networks)


def read_secrets(text: str) -> tuple[bytes, ...]:
    """The keys of one or several secrets with spaces between them: several while they are being rotated.

    Raises:
        ValueError: what is wrong, without the secret.
    """
    keys = []
    for secret in text.split():
        try:
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not secret.startswith(SECRET_PREFIX) or not FEWEST_SECRET_BYTES <= len(key) <= MOST_SECRET_BYTES:
            raise ValueError(
                f"is no webhook secret; accepted: {SECRET_PREFIX} and {FEWEST_SECRET_BYTES} to {MOST_SECRET_BYTES} "
                "bytes as base64"
            )
        keys.append(key)
    if not keys:
        raise ValueError("there is no webhook secret")
    return tuple(keys)


def _webhook_secret(text: str) -> str:
    try:
        read_secrets(text)
    except ValueError:
        raise ValueError("is no webhook secret") from None
    return text


def _stream_name(text: str) -> str:
    if not text or len(_plain(text).encode()) > 512:
        raise ValueError("is empty, or longer than 512 bytes")
    return text


def _rounded_up(given: object) -> object:
    """Whole seconds where the other side takes no fractions; what is no number is left for the field to refuse."""
    try:
        return math.ceil(float(str(given)))
    except (ValueError, OverflowError):
        return given


def _text_of(cast: Callable[[str], str], *, secret: bool) -> PlainValidator:
    def validate(given: object) -> Text:
        text = given if isinstance(given, Text) else Text(str(given))
        return text.checked(cast, secret=secret)

    return PlainValidator(validate)


BaseUrl = Annotated[Text, _text_of(_base_url, secret=False)]
PageUrl = Annotated[Text, _text_of(_page_url, secret=False)]
AmqpUrl = Annotated[Text, _text_of(_amqp_url, secret=False)]
RedisUrl = Annotated[Text, _text_of(_redis_url, secret=False)]
SqlUrl = Annotated[Text, _text_of(_sql_url, secret=False)]
SinkUrl = Annotated[Text | None, PlainValidator(_sink_url)]
Password = Annotated[Text, _text_of(_plain, secret=True)]
WebhookSecret = Annotated[Text, _text_of(_webhook_secret, secret=True)]
Token = Annotated[Text, _text_of(_token, secret=True)]
Host = Annotated[str, AfterValidator(_host)]
Plain = Annotated[str, AfterValidator(_plain)]
AmqpName = Annotated[str, AfterValidator(_amqp_name)]
DeclaredName = Annotated[str, AfterValidator(_declared_name)]
DeploymentId = Annotated[str, AfterValidator(_deployment_id)]
Identity = Annotated[str, AfterValidator(_identity)]
HttpPath = Annotated[str, AfterValidator(_http_path)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
StatusCodes = Annotated[frozenset[int], PlainValidator(_retry_statuses)]
Networks = Annotated[tuple[str, ...], PlainValidator(_networks)]
StreamName = Annotated[str, AfterValidator(_stream_name)]
WholeSeconds = Annotated[int, BeforeValidator(_rounded_up)]
Heartbeat = Annotated[int, BeforeValidator(whole_heartbeat)]
Lower = BeforeValidator(lambda given: str(given).lower())


# How a variable is declared: its name, its default (... where there is none), its meaning, what is accepted


def variable(
    name: str,
    default: object,
    meaning: str,
    accepted: str,
    *,
    secret: bool = False,
    file: bool = False,
    shown: str | None = None,
    **bounds: Any,  # pydantic's own keywords (ge, le, …), which pydantic checks
) -> Any:  # a default that pydantic replaces by the field's value, of any type
    """`file`: the variable has a `_FILE` twin. `shown`: the default in words, where the value does not say it."""
    return Field(
        default,
        validation_alias=name,
        description=meaning,
        json_schema_extra={"accepted": accepted, "secret": secret, "file": file or secret, "shown": shown},
        **bounds,
    )


def whole(name: str, default: int, meaning: str, least: int, most: int) -> Any:
    return variable(name, default, meaning, f"a whole number from {least} to {most}", ge=least, le=most)


def seconds(name: str, default: float, meaning: str, most: float = DAY_S, *, least: float | None = None) -> Any:
    """A duration; above 0 where no `least` is named."""
    low = "above 0" if least is None else f"from {least:g}"
    above = 0 if least is None else None
    accepted = f"seconds {low} to {most:.10g}"
    return variable(name, default, meaning, accepted, gt=above, ge=least, le=most, allow_inf_nan=False)


def whole_seconds(name: str, default: int, meaning: str, most: int) -> Any:
    accepted = f"seconds above 0 to {most}; a fraction is rounded up"
    return variable(name, default, meaning, accepted, ge=1, le=most)
