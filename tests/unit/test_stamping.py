"""What goes along with a request, and what a caller cannot make of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.stamping import (
    FAIRNESS_HEADER,
    NOT_THE_CALLERS,
    OBJECTIVE_HEADER,
    OLD_OBJECTIVE_HEADER,
    Stamps,
    legal_name,
    legal_value,
    stamped,
    target,
)


def headers(
    stamps: Stamps | None = None,
    *,
    lane: int = 5,
    objective: str | None = None,
    given: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    tenant: str | None = None,
) -> dict[str, str]:
    return stamped(
        stamps or Stamps(), lane=lane, objective=objective, given=given or {}, metadata=metadata or {}, tenant=tenant
    ).headers


# ---------------------------------------------------------------- fairness


def test_the_caller_is_named_under_the_default_header_from_the_default_attribute_case_242() -> None:
    assert headers(metadata={"userid": "acme"}) == {"x-llm-d-inference-fairness-id": "acme"}


def test_header_and_attribute_can_be_configured_case_242() -> None:
    stamps = Stamps(fairness_header="X-Tenant", fairness_attribute="team")

    assert headers(stamps, metadata={"userid": "acme", "team": "red"}) == {"X-Tenant": "red"}


@pytest.mark.parametrize(
    ("stamps", "metadata"),
    [
        pytest.param(Stamps(fairness_header=""), {"userid": "acme"}, id="an empty header switches it off"),
        pytest.param(Stamps(), {}, id="no attribute"),
        pytest.param(Stamps(), {"userid": ""}, id="an empty attribute"),
        pytest.param(Stamps(), {"userid": "a\r\nx-evil: 1"}, id="an illegal value is skipped"),
        pytest.param(Stamps(), {"userid": "\x7f"}, id="so is DEL"),
        pytest.param(Stamps(), {"userid": "\ud800"}, id="and half a character"),
        pytest.param(Stamps(), {"userid": "x" * 257}, id="257 bytes are too many"),
        pytest.param(Stamps(), {"userid": "ü" * 129}, id="bytes count, not letters"),
    ],
)
def test_nothing_is_stamped_without_an_identity_that_can_be_case_242(stamps: Stamps, metadata: dict[str, str]) -> None:
    assert headers(stamps, metadata=metadata) == {}


@pytest.mark.parametrize("identity", ["x" * 256, "ü" * 128, "a b\tc"])
def test_an_identity_of_up_to_256_bytes_is_stamped_case_242(identity: str) -> None:
    assert headers(metadata={"userid": identity}) == {FAIRNESS_HEADER: identity}


def case_variants(name: str) -> st.SearchStrategy[str]:
    return st.tuples(*(st.sampled_from([letter, letter.upper()]) for letter in name)).map("".join)


@given(st.lists(case_variants(FAIRNESS_HEADER), max_size=5), st.sampled_from(["acme", "", "x" * 257]))
def test_a_caller_cannot_name_itself_in_any_letter_case_case_242(names: list[str], identity: str) -> None:
    """Also where nothing is stamped in its place."""
    seen = headers(given={name: "rich" for name in names}, metadata={"userid": identity})

    assert seen == ({FAIRNESS_HEADER: "acme"} if identity == "acme" else {})


def test_who_the_caller_has_proven_to_be_outranks_what_it_claims() -> None:
    assert headers(metadata={"userid": "rich"}, tenant="acme") == {FAIRNESS_HEADER: "acme"}


# ---------------------------------------------------------------- objectives


def test_a_lane_without_an_objective_of_its_own_keeps_its_queues_case_246() -> None:
    stamps = Stamps(lane_objectives={"reserved-interactive": "gold"})

    assert headers(stamps, lane=0, objective="queue") == {OBJECTIVE_HEADER: "gold"}
    assert headers(stamps, lane=5, objective="queue") == {OBJECTIVE_HEADER: "queue"}
    assert headers(stamps, lane=5) == {}


@given(
    st.one_of(case_variants(OBJECTIVE_HEADER), case_variants(OLD_OBJECTIVE_HEADER)),
    st.integers(0, 5),
    st.sampled_from(["queue", None]),
)
def test_a_caller_cannot_rank_itself_in_any_letter_case_case_246(name: str, lane: int, objective: str | None) -> None:
    """Nor in a lane that has no objective, nor by the name that older gateways know."""
    stamps = Stamps(lane_objectives={"reserved-interactive": "gold", "overflow-batch": "low"})
    of_lane = {0: "gold", 5: "low"}.get(lane, objective)

    seen = headers(stamps, lane=lane, objective=objective, given={name: "forged"})

    assert seen == ({} if of_lane is None else {OBJECTIVE_HEADER: of_lane})


def test_a_callers_objective_stands_where_the_operator_has_none() -> None:
    assert headers(given={OBJECTIVE_HEADER: "mine"}) == {OBJECTIVE_HEADER: "mine"}


def test_the_objective_header_can_be_the_old_one() -> None:
    stamps = Stamps(objective_header=OLD_OBJECTIVE_HEADER)

    assert headers(stamps, objective="queue", given={OBJECTIVE_HEADER: "forged"}) == {OLD_OBJECTIVE_HEADER: "queue"}


# ---------------------------------------------------------------- priority


@pytest.mark.parametrize("lane", [0, 1, 3, 5])
def test_the_priority_header_has_the_number_of_the_lane_case_238(lane: int) -> None:
    stamps = Stamps(priority_header="x-gateway-priority")

    assert headers(stamps, lane=lane, given={"X-Gateway-Priority": "0"}) == {"x-gateway-priority": str(lane)}
    assert headers(lane=lane) == {}


# ---------------------------------------------------------------- the caller's


def test_other_headers_of_the_caller_pass_as_they_are() -> None:
    given_headers = {"Content-Type": "application/json; charset=utf-8", "X-Trace": "1", "Authorization": "Bearer x"}

    assert headers(given=given_headers, objective="q") == {**given_headers, OBJECTIVE_HEADER: "q"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-a", "1\r\nx-b: 2"),
        ("x-a", "\x00"),
        ("x a", "1"),
        ("x-a:", "1"),
        ("", "1"),
        ("x-ü", "1"),
        ("x-a\n", "1"),
        ("Content-Length", "5"),
        ("TRANSFER-ENCODING", "chunked"),
        ("Host", "elsewhere"),
    ],
)
def test_what_cannot_be_sent_or_is_not_the_callers_is_skipped_and_told(name: str, value: str) -> None:
    made = stamped(Stamps(), lane=5, objective=None, given={name: value, "x-fine": "1"}, metadata={})

    assert made.headers == {"x-fine": "1"}
    assert made.skipped == (name,)


@given(
    st.dictionaries(st.text() | st.sampled_from(sorted(NOT_THE_CALLERS)), st.text()),
    st.dictionaries(st.sampled_from(["userid", "x"]), st.text()),
    st.integers(0, 5),
)
def test_whatever_a_caller_writes_the_headers_can_be_sent(
    given_headers: dict[str, str], metadata: dict[str, str], lane: int
) -> None:
    made = stamped(
        Stamps(priority_header="x-priority"), lane=lane, objective="q", given=given_headers, metadata=metadata
    )

    assert all(legal_name(name) and legal_value(value) for name, value in made.headers.items())
    assert made.headers["x-priority"] == str(lane)
    assert made.headers[OBJECTIVE_HEADER] == "q"
    assert not NOT_THE_CALLERS & {name.lower() for name in made.headers}
    assert set(made.skipped) <= set(given_headers)


# ---------------------------------------------------------------- the target


@pytest.mark.parametrize(
    ("base_url", "path", "endpoint", "url"),
    [
        ("http://gw", "/v1/completions", None, "http://gw/v1/completions"),
        ("http://gw/", "/v1/completions", "", "http://gw/v1/completions"),
        ("http://gw", "v1/completions", "/v1/chat/completions", "http://gw/v1/chat/completions"),
        ("http://gw:8080/base/", "//v1//x", None, "http://gw:8080/base/v1/x"),
        ("http://gw/base", "", None, "http://gw/base"),
        ("http://gw/base", "v1/", None, "http://gw/base/v1/"),
        ("http://gw/base", "a/./b/../c", None, "http://gw/base/a/c"),
        ("http://gw", "/v1/models/a b", None, "http://gw/v1/models/a%20b"),
        ("http://gw", "/v1/models/a%20b", None, "http://gw/v1/models/a%20b"),
        ("http://gw?key=1", "/v1", None, "http://gw/v1?key=1"),
    ],
)
def test_an_endpoint_replaces_the_queues_path_and_parts_meet_at_one_slash_case_234(
    base_url: str, path: str, endpoint: str | None, url: str
) -> None:
    assert target(base_url, path, endpoint) == url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://evil/x", "http://gw/base/http:/evil/x"),
        ("//evil/x", "http://gw/base/evil/x"),
        ("@evil/x", "http://gw/base/@evil/x"),
        ("../../admin", "http://gw/base/admin"),
        ("%2e%2e/%2E./admin", "http://gw/base/admin"),
        ("x?stream=1#y", "http://gw/base/x%3Fstream=1%23y"),
        ("a\r\nb", "http://gw/base/a%0D%0Ab"),
        ("..", "http://gw/base"),
        ("%2e%2e%2f%2e%2e%2fadmin", "http://gw/base"),
        ("x/..%5C../y", "http://gw/base/x/y"),
        ("a/\ud800", "http://gw/base/a/%3F"),
    ],
)
def test_an_endpoint_leads_nowhere_but_below_the_base_case_234(endpoint: str, url: str) -> None:
    assert target("http://gw/base", "/v1", endpoint) == url


@given(st.text(st.characters() | st.sampled_from("./\\%2eE5cf"), min_size=1))
def test_no_endpoint_changes_the_host_or_leaves_the_base_case_234(endpoint: str) -> None:
    url = target("http://gw/base", "/v1", endpoint)

    assert url == "http://gw/base" or url.startswith("http://gw/base/")
    assert not {"?", "#", "\\", " ", "\n"} & set(url)
    assert ".." not in url.split("/")
