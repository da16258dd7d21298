"""Quotas, reservations, budgets and leased rates as a document names them; and what a request may cost."""

from collections.abc import Callable

import pytest

from inference_worker.gates.parameters import Parameters
from inference_worker.gates.quota import ConcurrencyQuota, RateQuota, redis_quota, reservation_classifier, value_of
from inference_worker.gates.redis_gates import redis_budget, redis_leased_rate
from inference_worker.gates.token_cost import MOST_TOKENS, estimated_tokens
from inference_worker.ports import Asked, Gate
from inference_worker.redis_scripts import RedisLink, RedisTls

Make = Callable[[Parameters], Gate]


def link_to(address: str) -> RedisLink:
    return RedisLink(lambda: f"redis://{address}", lambda: None, client_name="test", tls=RedisTls())


def quota(given: Parameters) -> Gate:
    return redis_quota(given, link_to, holder="p")


def classifier(given: Parameters) -> Gate:
    return reservation_classifier(given, link_to, holder="p")


def budget(given: Parameters) -> Gate:
    return redis_budget(given, link_to)


def leased(given: Parameters) -> Gate:
    return redis_leased_rate(given, link_to, pool_id="pool", told=lambda _: None)


def made(make: Make, **parameters: object) -> Gate:
    given = Parameters(parameters, "gate_params")
    gate = make(given)
    given.raise_problems()
    return gate


def problems(make: Make, **parameters: object) -> list[str]:
    given = Parameters(parameters, "gate_params")
    make(given)
    return given.problems


ADDRESS = {"address": "redis:6379"}


@pytest.mark.parametrize("limit", [5, "5", 5.0])
def test_a_quota_has_defaults_and_takes_numbers_as_text_case_186(limit: object) -> None:
    gate = made(quota, **ADDRESS, limit=limit)

    assert isinstance(gate, RateQuota)
    assert gate.closes_at() == "5 requests within 60 s for each userid, or what quota-limits:userid says"


def test_a_quota_of_slots_says_what_it_counts() -> None:
    gate = made(
        quota,
        **ADDRESS,
        limit=5,
        mode="concurrency",
        attribute="team",
        prefix="q:",
        gating_mode="classifying",
        counts="tokens",
        limits_key="limits",
        window="30s",
    )

    assert isinstance(gate, ConcurrencyQuota)
    assert gate.closes_at() == "5 tokens at once for each team, or what limits says; then it only says overflow"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (quota, "address"),
        (quota, "limit"),
        (classifier, "address"),
        (classifier, "labels"),
        (budget, "address"),
        (leased, "address"),
        (leased, "control_key"),
    ],
)
def test_what_is_needed_is_asked_for_case_186(make: Make, name: str) -> None:
    assert any(problem.startswith(f"gate_params.{name}: is missing") for problem in problems(make))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (quota, "mode", "sometimes"),
        (quota, "gating_mode", "strict"),
        (quota, "counts", "bytes"),
        (quota, "window", "0s"),
        (quota, "window", "-1m"),
        (quota, "limit", 0),
        (quota, "limit", "many"),
        (quota, "limit", 1.5),
        (quota, "lease", "1ms"),
        (quota, "colour", "red"),
        (classifier, "fallback_cap", -1),
        (classifier, "ttl", "0s"),
        (budget, "refresh", "0s"),
        (leased, "burst_seconds", 0),
        (leased, "burst_seconds", "inf"),
    ],
)
def test_a_parameter_that_is_none_is_an_error_at_the_start_case_185(make: Make, name: str, value: object) -> None:
    enough: dict[str, object] = {"address": "r:1"}
    by_gate: dict[Make, dict[str, object]] = {
        quota: {"limit": 1},
        classifier: {"labels": "team"},
        leased: {"control_key": "c"},
        budget: {},
    }

    said = problems(make, **enough | by_gate[make] | {name: value})

    assert len(said) == 1
    assert said[0].startswith(f"gate_params.{name}: is ")


def test_a_leased_rate_keeps_its_state_beside_its_command_and_is_of_the_owning_pool() -> None:
    assert made(leased, **ADDRESS, control_key="c").closes_at() == (
        "closed beyond the rate that c lends to pool pool, and without it"
    )


def test_a_classifier_says_where_its_caps_stand() -> None:
    gate = made(classifier, **ADDRESS, labels="team, tier", fallback_cap=3)

    assert gate.closes_at() == "never; overflow beyond rmp:cap:<team:tier>, else 3"


def test_a_budget_says_its_key() -> None:
    assert "dispatch-gate-budget" in made(budget, **ADDRESS).closes_at()


@pytest.mark.parametrize(
    ("payload", "tokens"),
    [
        pytest.param(b"", 1, id="nothing still counts"),
        pytest.param(b"x" * 400, 100, id="no JSON: its length"),
        pytest.param(b'{"max_tokens": 100}', 104, id="the output that it allows itself"),
        pytest.param(b'{"max_tokens": 7, "max_completion_tokens": 100}', 111, id="the newer name wins"),
        pytest.param(b'{"max_tokens": -5}', 4, id="a number that is none"),
        pytest.param(b'{"max_tokens": "all"}', 5, id="a text"),
        pytest.param(b'{"max_output_tokens": 1e300}', MOST_TOKENS, id="more than there are"),
        pytest.param(b"[" * 100_000, 25_000, id="deep"),
    ],
)
def test_a_request_costs_its_length_and_what_it_may_say(payload: bytes, tokens: int) -> None:
    assert estimated_tokens(payload) == tokens


@pytest.mark.parametrize(
    ("attribute", "metadata", "labels", "tenant", "value"),
    [
        ("userid", {"userid": "ann"}, {}, None, "ann"),
        ("userid", {}, {}, "t", None),
        ("userid", {"userid": ""}, {}, None, None),
        ("team", {"team": "forged"}, {"team": "real"}, None, "real"),
        ("tenant", {}, {}, "t", "t"),
        ("tenant", {"tenant": "m"}, {}, "t", "m"),
    ],
)
def test_whose_quota_a_request_is_counted_on(
    attribute: str, metadata: dict[str, str], labels: dict[str, str], tenant: str | None, value: str | None
) -> None:
    asked = Asked(request_id="r", metadata=metadata, labels=labels, deadline=0, tenant=tenant)

    assert value_of(asked, attribute) == value


def test_a_long_value_is_counted_under_its_hash() -> None:
    def of(user: str) -> str | None:
        return value_of(Asked(request_id="r", metadata={"u": user}, labels={}, deadline=0), "u")

    assert of("x" * 256) == "x" * 256
    long = of("x" * 257)
    assert long is not None
    assert long.startswith("sha256-")
    assert long != of("x" * 258)
