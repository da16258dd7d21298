"""Webhooks reach public addresses alone, whatever the URL looks like and whatever a name server says."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from inference_worker.gateway.addresses import (
    MOST_RESOLVING,
    AddressFilter,
    NotAllowed,
    Resolver,
    literal_address,
    validate_url,
)


def filter_of(*networks: str, **names: Sequence[str]) -> AddressFilter:
    """A filter whose name server knows these names; dots are written as underscores."""

    async def resolve(host: str, _: int) -> Sequence[str]:
        try:
            return names[host.replace(".", "_")]
        except KeyError:
            raise OSError(f"{host} is not known") from None

    return AddressFilter(networks, resolve=resolve)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
        *("192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1"),
        *("198.18.0.1", "198.51.100.7", "203.0.113.7", "192.88.99.1", "224.0.0.1", "239.255.255.250"),
        *("240.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("2001::1", "3fff::1", "100::1", "5f00::1", "64:ff9b:1::7f00:1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::ffff:a00:1"),
        *("2002:7f00:1::1", "2002:a00:1::", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe"),
        *("2a00:1450::5efe:127.0.0.1", "2a00:1450::200:5efe:10.0.0.1"),
        *("", "example.com", "127.1", "1.2.3.4.5", "2606:4700:4700::1111%eth0"),
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not AddressFilter().allows(address)


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "172.32.0.0", "100.128.0.0", "223.255.255.255"),
        *("2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"),
    ],
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert AddressFilter().allows(address)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("fd00::7", True),
        ("10.2.0.1", False),
        ("127.0.0.1", False),
        ("fd01::7", False),
        ("8.8.8.8", True),
    ],
)
def test_a_private_network_is_reached_where_it_is_named(address: str, allowed: bool) -> None:
    assert AddressFilter(("10.1.0.0/16", "fd00::/16")).allows(address) is allowed


@pytest.mark.parametrize(
    ("host", "address"),
    [
        *(("127.0.0.1", "127.0.0.1"), ("127.0.0.1.", "127.0.0.1"), ("127.1", "127.0.0.1"), ("2130706433", "127.0.0.1")),
        *(("0x7f000001", "127.0.0.1"), ("0x7F.1", "127.0.0.1"), ("0177.0.0.1", "127.0.0.1"), ("0", "0.0.0.0")),
        *(("::1", "::1"), ("0:0:0:0:0:ffff:7f00:1", "::ffff:127.0.0.1"), ("017700000001", "127.0.0.1")),
        *(("example.com", None), ("127.0.0.1.example.com", None), ("0xzz", None), ("1.2.3.4.5", None), ("cafe", None)),
    ],
)
def test_old_spellings_of_an_address_are_read_as_the_system_reads_them(host: str, address: str | None) -> None:
    read = literal_address(host)

    assert read in (address, None if address is None else address.replace("::ffff:127.0.0.1", "::ffff:7f00:1"))


@pytest.mark.parametrize(
    "url",
    [
        *("https://example.com/hooks", "http://example.com:8080/a?b=c", "https://sub_domain.example.com"),
        *(
            "https://bücher.example/x",
            "https://example.com.",
            "https://8.8.8.8/",
            "https://[2606:4700:4700::1111]:8443/",
        ),
        *("HTTPS://EXAMPLE.COM/", "https://example.com/a%20b", "https://xn--bcher-kva.example/", "https://h/#part"),
    ],
)
def test_a_usual_url_is_taken(url: str) -> None:
    assert validate_url(url, AddressFilter()) is None


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("ftp://example.com/", "https://"),
        ("file:///etc/passwd", "https://"),
        ("example.com/hooks", "https://"),
        ("//example.com/hooks", "https://"),
        ("", "https://"),
        ("https:///hooks", "host"),
        ("https://user@example.com/", "user"),
        ("https://user:secret@example.com/", "user"),
        ("https://example.com@10.0.0.1/", "user"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "port"),
        ("https://example.com:port/", ""),
        ("https://example.com/" + "x" * 2048, "longer"),
        ("https://exa mple.com/", "space"),
        ("https://example.com/\r\nX: y", "space"),
        ("https://example.com\\@10.0.0.1/", "backslash"),
        ("https://example.com/\ud800", "control"),
        ("https://127.0.0.1/", "not public"),
        ("https://127.0.0.1./", "not public"),
        ("https://127.1/", "not public"),
        ("https://2130706433/", "not public"),
        ("https://0x7f000001/", "not public"),
        ("https://0177.0.0.1/", ""),
        ("https://017700000001/", "not public"),
        ("https://169.254.169.254/latest/meta-data/", "not public"),
        ("https://[::1]/", "not public"),
        ("https://[::ffff:127.0.0.1]/", "not public"),
        ("https://[::ffff:7f00:1]/", "not public"),
        ("https://[64:ff9b::127.0.0.1]/", "not public"),
        ("https://[fe80::1%25eth0]/", ""),
        ("https://[::1/", ""),
        ("https://localhost/", "not public"),
        ("https://LOCALHOST./", "not public"),
        ("https://a.localhost:8080/", "not public"),
        ("https://①②⑦.⓪.⓪.①/", ""),
        ("https://127。0。0。1/", ""),
        ("https://１２７.０.０.１/", ""),
        ("https://1.2.3.4.5/", "host"),
        ("https://-a.example/", "host"),
        ("https://a..example/", ""),
        ("https://" + "a" * 64 + ".example/", ""),
        ("https://" + ".".join(["abcdefg"] * 40) + "/", ""),
        ("https://exa%6dple.com/", ""),
        ("https://exa%00mple.com/", ""),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, wrong: str) -> None:
    problem = validate_url(url, AddressFilter())

    assert problem is not None
    assert wrong in problem


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/", "http://localhost:9/", "http://[::ffff:127.0.0.1]/", "http://2130706433/"]
)
def test_a_named_network_is_taken_in_a_url(url: str) -> None:
    assert validate_url(url, AddressFilter(("127.0.0.0/8",))) is None


async def test_a_host_has_the_addresses_that_were_looked_at() -> None:
    allowed = filter_of(example_com=["8.8.8.8", "2606:4700:4700::1111"])

    assert await allowed.addresses("example.com", 443) == ["8.8.8.8", "2606:4700:4700::1111"]
    assert list(await allowed.addresses("1.1.1.1", 443)) == ["1.1.1.1"]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(["8.8.8.8", "10.0.0.1"], id="one of several is enough"),
        pytest.param(["127.0.0.1"], id="loopback"),
        pytest.param(["::ffff:10.0.0.1"], id="mapped"),
        pytest.param(["fe80::1%2"], id="with a scope"),
        pytest.param([], id="no address"),
        pytest.param(["8.8.8.8"] * 33, id="too many"),
    ],
)
async def test_a_host_with_an_address_that_is_not_public_is_refused(found: list[str]) -> None:
    with pytest.raises(NotAllowed):
        await filter_of(example_com=found).addresses("example.com", 443)


@pytest.mark.parametrize("host", ["unknown.example", "127.1", "2130706433", "0x7f.1", "::1", "localhost"])
async def test_a_host_that_is_not_known_or_leads_inside_is_refused(host: str) -> None:
    with pytest.raises(NotAllowed):
        await filter_of().addresses(host, 443)


async def test_a_name_server_that_never_answers_is_given_up() -> None:
    async def resolve(_: str, __: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(NotAllowed, match="within"):
        await AddressFilter(resolve=resolve).addresses("example.com", 443)


@pytest.mark.real_loop
async def test_names_are_looked_up_in_threads_that_nobody_waits_for_at_the_end() -> None:
    daemons: list[bool] = []

    def look_up(host: str, _: int) -> Sequence[str]:
        daemons.append(threading.current_thread().daemon)
        if host == "bad":
            raise OSError("not known")
        return ["8.8.8.8"]

    resolver = Resolver(look_up)

    assert await resolver.resolve("good", 443) == ["8.8.8.8"]
    with pytest.raises(OSError, match="not known"):
        await resolver.resolve("bad", 443)
    assert daemons == [True, True]


@pytest.mark.real_loop
async def test_those_that_hang_are_bounded_and_their_places_come_back() -> None:
    let_go = threading.Event()
    begun: list[str] = []

    def look_up(host: str, _: int) -> Sequence[str]:
        begun.append(host)
        let_go.wait(10)
        return ["8.8.8.8"]

    resolver = Resolver(look_up)
    hanging = [asyncio.create_task(resolver.resolve(f"h{n}", 1)) for n in range(MOST_RESOLVING + 1)]
    while len(begun) < MOST_RESOLVING:
        await asyncio.sleep(0.001)
    for task in hanging[:MOST_RESOLVING]:
        task.cancel()
    await asyncio.wait(hanging[:MOST_RESOLVING])
    assert len(begun) == MOST_RESOLVING

    let_go.set()

    assert await hanging[-1] == ["8.8.8.8"]


@pytest.mark.real_loop
async def test_the_system_knows_localhost() -> None:
    found = await AddressFilter(("127.0.0.0/8", "::1/128")).addresses("localhost", 80)

    assert set(found) <= {"127.0.0.1", "::1"}
    with pytest.raises(NotAllowed):
        await AddressFilter().addresses("localhost", 80)


@pytest.mark.real_loop
async def test_where_no_thread_can_be_had_the_host_is_not_known_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver(lambda _, __: ["8.8.8.8"])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(MOST_RESOLVING + 1):
            with pytest.raises(OSError, match="thread"):
                await resolver.resolve("example.com", 443)

    assert await resolver.resolve("example.com", 443) == ["8.8.8.8"]
