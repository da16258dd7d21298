"""Where a delivery's call goes, and with which headers. Names end in the number of the peer's case, if there is one."""

import asyncio

from inference_worker.addressing import Address, Addressing
from inference_worker.messages import InferenceRequest
from inference_worker.ports import Delivery, Route
from inference_worker.stamping import FAIRNESS_HEADER, OBJECTIVE_HEADER, OLD_OBJECTIVE_HEADER, Stamps

ROUTE = Route(base_url="http://gateway:8000/base", path="/v1/completions")
TRACE = {"traceparent": "00-ours"}


def delivery(route: Route | None = ROUTE, **labels: str) -> Delivery:
    return Delivery(
        body=b"",
        attempts=0,
        queue="q",
        message_id=None,
        redelivered=False,
        receipt=None,
        lost=asyncio.Event(),
        route=route,
        labels=labels,
    )


def request(
    endpoint: str = "/v1/chat/completions",
    *,
    headers: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    tenant: str | None = None,
) -> InferenceRequest:
    return InferenceRequest(
        request_id="a",
        received_at=0.0,
        timeout_s=1.0,
        deadline=1.0,
        payload=b"{}",
        endpoint=endpoint,
        stream=False,
        tenant=tenant,
        metadata=metadata or {},
        headers=headers or {},
    )


def test_without_a_route_nothing_is_added_to_what_the_trace_sends() -> None:
    """So a sidecar's calls stay as they are, whatever their messages say."""
    sent = request(headers={"X-Mine": "1"}, metadata={"userid": "acme"})

    address = Addressing().of(delivery(None), sent, TRACE)

    assert address == Address(base_url=None, endpoint="/v1/chat/completions", headers=TRACE)


def test_a_request_goes_to_its_queues_gateway_below_the_bases_path() -> None:
    address = Addressing().of(delivery(), request("v1/chat"), {})

    assert (address.base_url, address.endpoint) == ("http://gateway:8000/base", "/base/v1/chat")


def test_a_request_without_an_endpoint_goes_to_its_queues_path() -> None:
    assert Addressing().of(delivery(), request(""), {}).endpoint == "/base/v1/completions"


def test_an_endpoint_leads_to_no_other_host_and_out_of_no_base() -> None:
    for endpoint in ("http://evil/x", "//evil/x", "../../admin", "/a/../../admin", "@evil/x"):
        endpoint = Addressing().of(delivery(), request(endpoint), {}).endpoint

        assert endpoint.startswith("/base/")
        assert ".." not in endpoint


def test_the_lane_and_the_identity_are_stamped() -> None:
    stamps = Stamps(priority_header="x-priority", lane_objectives={"reserved-interactive": "gold"})
    addressing = Addressing(stamps=stamps, tier_label="kind")
    route = Route(base_url="http://g", path="/", headers={OBJECTIVE_HEADER: "queue"})

    first = addressing.of(delivery(route, kind="interactive", classification="reserved"), request(tenant="acme"), {})
    last = addressing.of(delivery(route), request(metadata={"userid": "said"}), {})

    assert first.headers == {OBJECTIVE_HEADER: "gold", "x-priority": "0", FAIRNESS_HEADER: "acme"}
    assert last.headers == {OBJECTIVE_HEADER: "queue", "x-priority": "5", FAIRNESS_HEADER: "said"}


def test_an_objective_of_a_queue_is_found_in_any_letter_case_and_sent_once() -> None:
    route = Route(base_url="http://g", path="/", headers={OBJECTIVE_HEADER.title(): "queue"})

    forged = {OBJECTIVE_HEADER: "forged", OLD_OBJECTIVE_HEADER: "forged"}
    address = Addressing().of(delivery(route), request(headers=forged), {})

    assert list(address.headers.values()) == ["queue"]
    assert address.skipped == (OBJECTIVE_HEADER, OLD_OBJECTIVE_HEADER)


def test_a_callers_headers_replace_neither_the_queues_nor_the_traces_in_any_letter_case() -> None:
    route = Route(base_url="http://g", path="/", headers={"X-Pool": "gpu"})
    given = {"x-POOL": "forged", "TraceParent": "forged", "X-Mine": "1", "Host": "evil", "X-Bad": "a\r\nb"}

    address = Addressing().of(delivery(route), request(headers=given), TRACE)

    assert address.headers == {"X-Pool": "gpu", "X-Mine": "1", "traceparent": "00-ours"}
    assert set(address.skipped) == {"x-POOL", "Host", "X-Bad"}
