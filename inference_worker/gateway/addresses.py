"""Where a webhook may go: what its URL may look like, and which addresses its host may have.

The name is resolved here, every address is looked at, and what is sent goes to one of exactly those addresses
(`webhook_posting.py`), so that neither a name server that changes its mind nor an odd spelling leads inside. Nothing
here opens a connection.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises OSError where it has none."""

LONGEST_URL: Final = 2048
MOST_ADDRESSES: Final = 32
RESOLVE_S: Final = 5.0
MOST_RESOLVING: Final = 32
"""Names that are looked up at once, those included that nobody waits for any more."""

# The registries of special addresses (RFC 6890 and after), written out: what the standard library takes for global
# differs from one patch release of Python to the next.
NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # Looks public, and is the platform's own server inside every machine of Azure.
            *("2001::/23", "2001:db8::/32", "3fff::/20"),  # Teredo is in the first.
        ),
    )
)
PUBLIC_V6: Final = ipaddress.IPv6Network("2000::/3")
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
SIX_TO_FOUR: Final = ipaddress.IPv6Network("2002::/16")
COMPATIBLE: Final = ipaddress.IPv6Network("::/96")
ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})


class NotAllowed(Exception):
    """The host has no address, or one that webhooks may not go to; which of both is for our own log alone.

    A caller who was told the difference could map a network's inner names with it.
    """


class AddressFilter:
    """Tells the addresses that webhooks may go to: public ones, and those of the networks that are named."""

    def __init__(self, networks: Sequence[str] = (), *, resolve: Resolve | None = None) -> None:
        self._networks = tuple(map(ipaddress.ip_network, networks))
        self._resolve = resolve or Resolver().resolve

    def allows(self, text: str) -> bool:
        """Whether a webhook may go to an address, in its usual spelling."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            return False
        forms = (address, *_inner(address))
        if any(form in network for form in forms for network in self._networks):
            return True
        return all(map(_is_public, forms))

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Every address of a host, all of which are allowed.

        Raises:
            NotAllowed
        """
        literal = literal_address(host)
        if literal is not None:
            found: Sequence[str] = (literal,)
        else:
            try:
                async with asyncio.timeout(RESOLVE_S):
                    found = await self._resolve(host, port)
            except TimeoutError as exc:
                raise NotAllowed(f"not resolved within {RESOLVE_S:g} s") from exc
            except (OSError, UnicodeError) as exc:
                raise NotAllowed(f"not resolved: {exc}") from exc
        if not found or len(found) > MOST_ADDRESSES:
            raise NotAllowed(f"{len(found)} addresses")
        for address in found:
            if not self.allows(address):
                raise NotAllowed(f"{address} is not public")
        return found


def _is_public(address: Address) -> bool:
    if any(address in network for network in NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    # All else of IPv6 is local, multicast, or nobody's. One that means an IPv4 address is judged by that, too.
    return address in PUBLIC_V6 or bool(_inner(address))


def _inner(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    """The IPv4 address that an IPv6 address means, where it means one."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    number = int(address)
    if address in NAT64 or (address in COMPATIBLE and number > 0xFFFF):
        return (ipaddress.IPv4Address(number & 0xFFFFFFFF),)
    if address in SIX_TO_FOUR:
        return (ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if number >> 32 & 0xFFFFFFFF in ISATAP:
        return (ipaddress.IPv4Address(number & 0xFFFFFFFF),)
    return ()


def literal_address(host: str) -> str | None:
    """The address that a host spells, also in the old ways (`127.1`, `0x7f000001`, `0177.0.0.1`); None for a name."""
    text = host.rstrip(".")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text))
    last = text.rpartition(".")[2]
    if not re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]*", last):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        return socket.inet_ntoa(socket.inet_aton(text))
    return None


# ---------------------------------------------------------------- URLs


def validate_url(text: str, allowed: AddressFilter) -> str | None:
    """What is wrong with a webhook's URL; None where nothing is. Names are not resolved here: that is done each time
    something is sent."""
    if len(text) > LONGEST_URL:
        return f"is longer than {LONGEST_URL} characters"
    if re.search(r"[\x00-\x20\x7f-\x9f\\\ud800-\udfff]", text):
        return "has a space, a backslash or a control character"
    try:
        url = httpx.URL(text)
        host = url.raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError) as exc:
        return f"is no URL: {str(exc)[:200]}"
    if url.scheme not in ("https", "http"):
        return "begins with neither https:// nor http://"
    if not host:
        return "has no host"
    if url.userinfo:
        return "has a user or a password"
    if url.port is not None and not 0 < url.port <= 65535:
        return "has no usable port"
    return _host_problem(host, allowed)


def _host_problem(host: str, allowed: AddressFilter) -> str | None:
    literal = literal_address(host)
    name = host.rstrip(".").lower()
    if literal is not None:
        return None if allowed.allows(literal) else "leads to an address that is not public"
    if name == "localhost" or name.endswith(".localhost"):
        here = allowed.allows("127.0.0.1") or allowed.allows("::1")
        return None if here else "leads to an address that is not public"
    # An underscore is no host name's, and yet in use.
    label = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
    if len(name) > 253 or not re.fullmatch(rf"{label}(\.{label})*", name) or name.rpartition(".")[2].isdigit():
        return "has no usable host"
    return None


# ---------------------------------------------------------------- name servers


class Resolver:
    """Asks the system for a host's addresses, in threads of its own.

    The loop's own threads are few, and the connections to Redis and RabbitMQ need them to come back; a tenant's name
    server that never answers may not hold them, nor the end of this process. Hence daemon threads, and a bound on them.
    """

    def __init__(self, look_up: Callable[[str, int], Sequence[str]] | None = None) -> None:
        self._look_up = look_up or _look_up
        self._under_way = asyncio.Semaphore(MOST_RESOLVING)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The addresses, in the order in which they are best tried. Raises OSError."""
        await self._under_way.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def tell(found: Sequence[str] | OSError | UnicodeError) -> None:
            self._under_way.release()
            if answer.done():  # Who asked has gone.
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def work() -> None:
            try:
                found: Sequence[str] | OSError | UnicodeError = self._look_up(host, port)
            except (OSError, UnicodeError) as exc:
                found = exc
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody is left to tell.
                loop.call_soon_threadsafe(tell, found)

        try:
            threading.Thread(target=work, name="webhook name", daemon=True).start()
        except RuntimeError as exc:
            self._under_way.release()
            raise OSError(f"no thread can be had: {exc}") from exc
        return await answer


def _look_up(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
