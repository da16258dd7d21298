"""The behaviours that the tests of llm-d-async pin, each with our tests of the same: `python -m tests.conformance`.

A test stands for a case by its name, which ends in `_case_<n>` (`_case_<n>_<m>` for several), or by being named here.
What does not apply says why. The numbers have holes; none is missing. Prints a table by group, and with `--list` every
case with its tests; exits with 1 where a case that applies has none.

Not here: whether the tests pass. `tests/unit/test_conformance.py` holds the table to the files.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
_NUMBERS: Final = re.compile(r"_case_(\d+(?:_\d+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One behaviour."""

    number: int
    said: str
    named: tuple[str, ...] = ()
    """Tests whose names do not say so; below `tests/`: file::name, or file::class::name."""
    does_not_apply: str = ""
    """Why, where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case, and all of its tests."""

    case: Case
    tests: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """It is about something that is here."""
        return not self.case.does_not_apply

    @property
    def missing(self) -> bool:
        """It applies, and no test stands for it."""
        return self.applies and not self.tests


def case(number: int, said: str, *named: str) -> Case:
    return Case(number=number, said=said, named=named)


def not_ours(because: str, *cases: tuple[int, str]) -> tuple[Case, ...]:
    return tuple(Case(number=number, said=said, does_not_apply=because) for number, said in cases)


GCP_PRODUCER: Final = "Google's own libraries publish and pull: there is no producer of ours"
ROWS: Final = "there are no partitions: rows are claimed singly, fenced by attempt"
TYPED: Final = "an envelope has its request by its type; what is handed in from outside is case 98"
NO_DIRECT: Final = "our intake sends nothing past the queue; a stream is served from the queue instead"
NO_CHART: Final = "the manifests are written out: there are no values, so nothing is rendered or left out"

ENVELOPES: Final = (
    case(1, "a plain request is read as it was written"),
    case(2, "a request with routes of its own keeps them in its data"),
    case(4, "an envelope without a kind is refused"),
    case(5, "an unknown kind is refused"),
    case(6, "an envelope without data is refused"),
    *not_ours(TYPED, (8, "no request cannot be written, no envelope is null")),
    case(9, "an endpoint survives, an empty one is not written"),
    case(10, "a request of another type is copied field by field"),
    case(12, "the text of an error: message, drop reason in brackets, cause"),
    case(13, "a payload that was split off and attached again is the same"),
    case(14, "a payload that lies elsewhere is not in the bytes, an inline one is, as it came"),
)

RESULTS: Final = (
    case(16, "a 200 gives status and raw body, no error code"),
    case(17, "another 2xx keeps its real status"),
    case(18, "a final 4xx or 5xx keeps status and body, no error code"),
    case(20, "a drop without an answer of its own is GATE_DROPPED"),
    case(21, "a result that cannot be written is replaced by one that can"),
)

DEQUEUE: Final = (
    case(22, "a message arrives with the id and the labels of its queue"),
    case(24, "of one deadline the first submitted comes first, also after a requeue"),
    case(25, "what is delivered again has its original score"),
    case(26, "an expired message is taken out and answered, not sent"),
    case(28, "an expired one does not keep a valid one from its result"),
    case(29, "what is no request holds nobody up"),
    case(30, "cancelled before it was taken: one CANCELLED, never sent"),
    case(32, "with a budget of 0 nothing is taken"),
    case(33, "a closed gate counts looks at a queue that has something, and none at an empty one"),
    case(34, "no more is taken than there is room for"),
    case(36, "consuming ends promptly"),
    case(37, "several producers and consumers lose and double nothing"),
    case(38, "a queue's id is its name unless it has one"),
    case(40, "gate parameters stay text or number as written; what is no JSON is an error"),
    case(41, "a queue without a pool is served by `default`, or is an error at the start"),
    case(42, "an unknown pool and a missing base URL are errors at the start"),
    case(44, "a key of another kind is an error of its queue alone"),
    case(45, "the backlog tells what expires within each window"),
    case(46, "a message is handed on before the gate is asked for the next one"),
)

LEASES: Final = (
    case(48, "a second claim of one member fails without an error"),
    case(49, "an id that is queued again while it is claimed is claimed anew"),
    case(50, "a claim is released by its owner alone"),
    case(52, "an ack for a claim of another changes and sends nothing"),
    case(53, "of two claims the lapsed one alone goes back, to its place"),
    case(54, "renewing moves the end out and creates nothing"),
    case(56, "a longer lease moves it further out"),
    case(57, "two generations of one id have two owners"),
    case(58, "what is refused stays queued, and its payload is not fetched"),
    case(60, "payloads that lie apart are fetched in one question"),
    case(61, "a payload that has gone is PAYLOAD_UNAVAILABLE, not sent"),
    case(62, "payloads that cannot be fetched give the whole batch back"),
    case(64, "a retry of a payload that lies apart is parked without it"),
    case(65, "the owner's ack alone deletes the payload"),
    case(66, "in a Cluster the keys of claims lie with their queue, and an ack is fenced over slots"),
    case(68, "standalone, cluster and sentinel are told apart; a wrong mode is an error"),
)

RETRIES: Final = (
    case(69, "a retry is parked at the time at which it is due"),
    case(70, "when due it goes to its own queue, at its deadline"),
    case(72, "a retry that names no queue goes to ours, never to an empty key"),
    case(73, "many retries at once are all parked"),
    case(74, "where the write fails and then does not, the batch is there"),
)

RESULT_LISTS: Final = (
    case(76, "results go out together, each on its route"),
    case(77, "queues with lists of their own and the common one"),
    case(78, "the queue's list goes before the message's"),
    case(80, "a result whose first write fails appears once"),
    case(81, "a result with its generation's token frees that generation's keys"),
    case(82, "a result of an old generation leaves the newer one's keys"),
)

PUBSUB: Final = (
    case(84, "a request on the channel gives a result on the result channel"),
    case(85, "results in batches of at most 32, none lost"),
    case(86, "a publish that fails twice is delivered"),
    case(
        88,
        "retries that are due leave the set, later ones stay",
        "integration/test_redis_sorted_set_rules.py::test_a_due_retry_goes_to_its_own_queue_at_its_deadline_case_70",
    ),
    case(89, "of several who look for due retries each one is taken once"),
    case(90, "retries in hand at a stop are written back"),
    case(
        92,
        "a stop during an idle wait is prompt",
        "integration/test_redis_sorted_set_rules.py::test_consuming_ends_promptly_case_36",
        "unit/test_listener_reconnect.py::test_a_worker_that_waits_to_connect_again_stops_at_once",
    ),
    case(93, "a channel that closes is subscribed to again"),
    case(
        94,
        "writes to Redis are tried again, for a bounded time, and a stop does not wait for them",
        "integration/test_redis_faults.py::"
        "test_answers_that_are_ready_while_the_store_is_away_are_stored_when_it_is_back",
        "unit/test_listener.py::test_an_answer_that_could_not_be_stored_is_kept_and_its_message_handed_back",
        "unit/test_listener.py::test_a_store_that_hangs_does_not_hold_up_the_end",
    ),
    case(
        96,
        "a Redis with a password is reached with it and not without",
        "integration/test_environment.py::test_the_stores_url_and_password_are_read_again_at_each_try",
    ),
)

PRODUCER: Final = (
    case(97, "a submission lies in the set at its deadline, with an active key and no cancel key"),
    case(98, "what is no request is refused"),
    case(100, "a cancellation has the submission's token; an unknown id leaves no key"),
    case(101, "a new submission clears an old cancellation"),
    case(102, "a result that waits is returned; time and cancellation end a wait"),
    case(104, "what is no result is an error, no crash"),
    case(105, "a producer without a result queue is an error"),
    case(106, "a client that is handed in is used and left open"),
    case(108, "submitted, cancelled behind a closed gate, opened: one CANCELLED"),
    case(109, "a received result has a lease: renewed, acknowledged, or delivered again"),
    case(110, "a stale ack is refused, a repeated one is fine"),
    case(112, "a payload is an object or null, and keeps its bytes"),
)

GCP: Final = (
    case(113, "let in and answered: acknowledged and released"),
    case(114, "let in and failed: not acknowledged, released"),
    case(116, "a concurrency gate holds on the real flow"),
    case(117, "what is over a rate is delivered later"),
    case(118, "a topic's labels are on its messages"),
    case(120, "what health means for a subscription"),
    case(121, "a result has the route of its request"),
    *not_ours(
        GCP_PRODUCER,
        (122, "a producer makes topics and subscriptions once"),
        (124, "a result that was not handed over stays unacknowledged"),
    ),
)

SQL_STORE: Final = (
    case(125, "which addresses are taken; no password in an error"),
    case(126, "migrating twice, and eight at once"),
    case(128, "many rows in their partitions; a batch is whole or not there"),
    case(129, "dispatch by deadline, up to a limit, by the owner"),
    case(130, "equal deadlines in the order of submission"),
    *not_ours(ROWS, (132, "only owned partitions of this epoch are in flight")),
    case(133, "a lapsed lease is taken over, its former owner is fenced"),
    case(134, "a partition that was lost and won back fences its old dispatch"),
    case(136, "a reset takes what it is told and skips what is locked"),
    case(137, "heartbeats count members; who leaves frees everything"),
    *not_ours(ROWS, (138, "the owner alone releases")),
    case(140, "what is given back has its place"),
    case(141, "a retry waits with its old payload"),
    case(142, "a cancellation marks live generations"),
    case(144, "the backlog and what expires"),
    case(145, "results come in their order, up to a limit"),
    case(146, "payload bytes stay as they are"),
    *not_ours(ROWS, (148, "partitions are shared out evenly")),
    *not_ours(ROWS, (149, "handing partitions over to who joins")),
    case(150, "a dead peer's work moves, its ack is fenced"),
    *not_ours(ROWS, (152, "a peer that leaves meanwhile ends a hand-over")),
    case(153, "what was given up is delivered at the next rebalance"),
    case(154, "rows of a lost reply return"),
    case(156, "releases are by attempt"),
    case(157, "a locked table costs one time-out"),
    case(158, "defaults and what is wrong with them"),
)

SQL_QUOTA: Final = (
    case(160, "one limit over several holders"),
    case(161, "nothing below zero, and only own slots"),
    case(162, "slots of a lapsed holder are free"),
    case(164, "many workers at random never exceed it"),
    case(165, "a window slides"),
    case(166, "exactly the limit under a flood"),
    case(168, "who gives up returns its grant"),
    case(169, "a release that times out retires its holder"),
    case(170, "a lost reply subtracts once"),
    case(172, "a retired holder renews until its grants end"),
    case(173, "a lapsed lease fails no request"),
    case(174, "closing frees what is held"),
)

GATES: Final = (
    case(176, "an unknown gate is an error here; an empty one is open"),
    case(177, "a metric gate without its address, pool or query is an error"),
    case(178, "thresholds, fallbacks, baselines and limits are checked"),
    case(180, "text, numbers, durations and maps are read from both forms"),
    case(181, "nested gates are read from text and from objects"),
    case(182, "a metric gate knows its queue or pool, however it is wrapped"),
    case(184, "one look a refresh; a failed one counts as one"),
    case(185, "a wrong mode, window or limit of a quota is an error at the start"),
    case(186, "a quota's defaults, and what it cannot do without"),
)

METRIC_GATES: Final = (
    case(188, "what a saturation leaves below its threshold"),
    case(189, "a saturation that is not seen is the fallback"),
    case(190, "a budget is what is free less the baseline"),
    case(192, "gauges of value, threshold and source"),
    case(193, "a binary metric is 0 or closed"),
    case(194, "a cascade uses the first source that speaks"),
    case(196, "what Prometheus may say"),
    case(197, "queries have their metrics, pool and namespace"),
    case(198, "a page is scraped, a capacity is computed"),
    case(200, "a page may say the budget itself; an absent series has a value"),
    case(201, "counted admission takes what a reading shows free"),
    case(202, "without a reading nothing is admitted; parallel calls get exactly what is free"),
    case(204, "a budget in a Redis key is followed"),
    case(205, "several routers of one pool are added up"),
)

QUOTAS: Final = (
    case(206, "what is over a concurrency limit is refused until something ends"),
    case(208, "what is over a rate is refused until the window has slid"),
    case(209, "a classifying quota lets the overflow go on as such"),
    case(210, "a request without the attribute is not counted"),
    case(212, "a local limit is exact under parallel calls"),
    case(213, "a blocking limit waits; who stops waiting takes nothing"),
    case(214, "several gates: the smallest budget, all or nothing"),
    case(216, "only a refusal becomes a wait"),
    case(217, "who goes on in a full pool, by tier and classification"),
    case(218, "the same behind a metric"),
)

LEASED: Final = (
    case(220, "a leased rate lets its rate through"),
    case(221, "the clock of Redis counts, and the rate is shared"),
    case(222, "a lease that lapsed or is another's closes"),
    case(224, "its gauges exist from the start"),
)

AIMD: Final = (
    case(225, "a full window waits or refuses, and grows by what is accepted"),
    case(226, "the rejections of one flight halve it once"),
    case(228, "a rejection below holds the bands above"),
    case(229, "a rejection above closes the bands below"),
    case(230, "an order to wait, an expiry, an eviction"),
    case(232, "what was seen and the signal pass through wrappers"),
)

MERGE: Final = (
    case(233, "messages of all queues arrive; a queue that goes leaves the others"),
    case(234, "a message's endpoint replaces its queue's path"),
    case(236, "nothing is lost between queues and pool"),
    case(237, "a queue of an unknown pool stops the start"),
    case(238, "six lanes in their order, told in a header"),
    case(240, "the queues of a lane take turns"),
    case(241, "a full lane blocks no other"),
    case(242, "who the caller is, is stamped and cannot be forged"),
    case(244, "a policy's file is read, an unknown field is an error"),
    case(245, "reserved ones overtake a backlog with one worker"),
    case(246, "a lane's objective is stamped, else its queue's stays"),
)

WORKER: Final = (
    case(248, "a 200 is a result, not tried again"),
    case(249, "429, 500 and 503 are tried again, 400 and 404 are not"),
    case(250, "a connection that fails is tried again"),
    case(252, "at its deadline a request is not tried again"),
    case(253, "time over after a 429: that 429 with its body"),
    case(254, "a retry counts one more and waits within the ladder"),
    case(256, "which Retry-After is one"),
    case(257, "a Retry-After is a floor that leaves time for another try"),
    case(
        258,
        "who is told to stop returns promptly from everywhere",
        "unit/test_listener.py::test_a_cancelled_listener_hands_back_what_it_has",
        "unit/test_listener.py::test_what_has_not_begun_is_handed_back_at_once",
    ),
    case(260, "while cancellation cannot be looked up, nothing is sent or counted"),
    case(261, "one look for a cancellation before a call"),
    case(262, "cancelled at the gate, after it, right before sending: no call"),
    case(264, "what is buffered at a stop goes back at once"),
    case(265, "a call that runs when consuming stops gives its result"),
    case(266, "after the time to drain a call is closed and goes back at once"),
    case(268, "each verdict of a pool's gate"),
    case(269, "a blocking limit of two with four workers and three requests"),
    case(270, "a deadline passes at the gate"),
    case(272, "what was taken of a queue's and a pool's gate goes back once"),
    case(273, "verdicts are counted by reason, a wait once"),
    case(274, "a backend that hangs in one pool delays no other pool"),
    case(276, "tokens are counted by direction"),
)

CLIENT: Final = (
    case(277, "status and body come back; headers go along"),
    case(278, "a 429 or 503 with its Retry-After, or without one"),
    case(280, "no connection, no URL and a cancelled call are told apart"),
    case(281, "a body that is cut keeps status, drop reason and Retry-After"),
    case(282, "the gateway's drop reason is in the error"),
)

BODIES: Final = (
    case(284, "the first that handles a body wins, the first error stops"),
    case(285, "what is wrong with a list of transforms is an error at the start"),
    case(286, "gcs: a form with the signed address"),
    case(288, "gcs: what is fatal, and when an address expires"),
    case(289, "gcs: providers are asked for"),
    case(290, "the transformed body is sent; a refused one makes no call"),
)

CONFIGURATION: Final = (
    case(292, "a pool file, and what is wrong with one"),
    case(293, "old flags make a configuration that the new reader takes"),
    case(294, "new flags win, old ones are warned of"),
    case(296, "the merge policy's old flag, and the new one wins"),
    case(297, "TLS: none, one way, both ways, and what is wrong"),
    case(298, "plug-ins are found by name; a name twice is an error"),
)

WATCHING: Final = (
    case(300, "the list of metrics"),
    case(301, "setters change their own labels; reasons exist at 0"),
    case(302, "depth and calls return to 0; queues are told apart"),
    case(304, "what the spans of a success, of each failure, and of what is handed back say"),
    case(305, "a request's trace reaches the backend through the worker"),
    case(306, "without an endpoint no tracing; a trace of its own is linked"),
    case(308, "how much is logged"),
    case(309, "how near deadlines are is a snapshot that is replaced, and ends with its queue"),
)

RELOADING: Final = (
    case(310, "queues that come, go and change without a restart"),
    case(312, "what is wrong with a list of queues is an error"),
    case(313, "an empty list drains all"),
    case(314, "what was half done is tried again"),
)

FRONT_END: Final = (
    case(
        316,
        "a job is asked for until it is done, by its own tenant",
        "unit/test_gateway_jobs.py::test_a_job_is_queued_until_somebody_runs_it",
        "unit/test_gateway_jobs.py::test_a_result_is_shown_as_the_bytes_that_were_stored",
        "unit/test_gateway_jobs.py::test_a_job_whose_result_has_gone_is_gone",
        "unit/test_gateway_keys.py::test_a_job_of_another_tenant_is_exactly_one_that_does_not_exist",
    ),
    case(
        317,
        "each error as a status; the model's own as it came",
        "unit/test_gateway_openai.py::test_a_failed_job_is_an_error_with_its_status_and_words",
        "integration/test_openai_client.py::test_the_models_own_errors_are_the_clients",
    ),
    *not_ours(NO_DIRECT, (318, "a request past the queue is labelled and classified")),
    case(
        320,
        "broker down is a 503; a stream through the queue, refused there, is served here",
        "integration/test_gateway.py::test_a_broker_that_cannot_be_reached_is_a_503_and_nothing_is_accepted",
        "unit/test_gateway_jobs.py::test_a_job_that_the_broker_has_not_taken_is_not_accepted",
        "unit/test_gateway_openai.py::test_a_stream_has_every_part_of_the_answer",
    ),
    case(
        321,
        "waits have bounds, and what is wrong with the configuration is said",
        "unit/test_gateway_openai.py::test_a_caller_may_wait_less_and_not_more",
        "unit/test_gateway_openai.py::test_who_does_not_want_to_wait_gets_the_job",
        "unit/test_gateway_jobs.py::test_a_field_that_is_wrong_is_named_with_what_is_accepted",
        "unit/test_gateway_keys.py::test_a_bad_file_is_told_with_what_and_where_and_no_secret",
    ),
    case(
        322,
        "models are listed, requests counted by route and status",
        "unit/test_gateway_openai.py::test_models_are_listed_and_found_by_their_names",
        "unit/test_gateway_metrics.py::test_requests_are_counted_by_route_and_class_of_status",
    ),
)

END_TO_END: Final = (
    case(324, "a backend that is away for five seconds costs time alone"),
    case(325, "long calls at a stop with time: some end, none is lost"),
    case(326, "long calls at a stop without time: all go back"),
    case(328, "a budget of 0 holds everything, and then none is lost"),
    case(329, "each metric gate holds and lets go; a cascade uses a later source"),
    case(330, "two gates in a row, each can hold"),
    case(332, "a full quota of one team does not delay another"),
    case(333, "a full pool keeps its requests and goes on when it is not"),
    case(334, "a full pool with tiers: one is told at once, the rest comes later"),
    case(
        336,
        "alive and ready",
        "unit/test_ops_server.py::test_a_live_worker_is_alive_whatever_its_neighbours_do",
        "unit/test_ops_server.py::test_a_worker_is_ready_while_every_condition_is_met",
    ),
    case(337, "five thousand requests in time, with a queue's gate and with a pool's"),
)

DEPLOYMENT: Final = (
    case(
        338,
        "the deployment: security, resources, the port of its metrics",
        "unit/test_deploy.py::test_the_kubernetes_worker_may_do_nothing_that_it_need_not",
        "unit/test_deploy.py::test_kubernetes_sets_variables_that_exist",
        "unit/test_gateway_manifest.py::test_its_memory_is_more_than_what_it_may_hold",
    ),
    *not_ours(
        NO_CHART,
        (340, "an install without what it needs fails"),
        (341, "what is there only where it is configured"),
    ),
    case(
        342,
        "monitors, alerts and dashboards",
        "unit/test_deploy.py::test_the_pod_monitor_finds_the_pods_and_names_the_deployment",
        "integration/test_alert_rules.py::test_each_alert_fires_when_it_should_and_not_before",
        "integration/test_alert_rules.py::test_prometheus_takes_every_query_of_the_dashboard",
    ),
)

PROPERTIES: Final = (
    case(343, "a quota is taken in one step: never over its limit"),
    case(344, "a delivery is settled as itself, not as its message"),
    case(345, "admission is bounded by what is left, not by the last reading"),
    case(346, "a cancellation is of a generation, not of an id"),
    case(347, "no lane starves under the policy without starvation"),
    case(348, "who waits has a list of results of its own"),
    case(349, "what is to be tried again holds no place meanwhile"),
    case(
        350,
        "what settles outlives what runs, at a stop",
        "unit/test_listener.py::test_a_cut_during_the_drain_loses_nothing",
        "unit/test_listener.py::test_an_answer_at_the_end_of_the_grace_with_the_store_away_is_given_up",
    ),
    case(351, "a leaked slot is freed, a live one is not"),
)

GAPS: Final = (
    case(
        352,
        "killed at every step: each request has exactly one terminal result",
        "unit/test_conservation.py::test_a_kill_at_any_step_of_a_message_loses_nothing",
        "integration/test_kills.py::test_a_worker_killed_in_any_window_costs_at_most_the_calls_that_the_design_says",
    ),
    case(
        353,
        "acks and nacks are seen by a real broker",
        "transport_contract.py::TransportContract::test_acked_is_gone_whatever_becomes_of_the_connection",
        "transport_contract.py::TransportContract::test_nacked_comes_back_at_once_and_uncounted",
    ),
    case(354, "a real Redis: failing over, full"),
    case(
        355,
        "large and slow bodies, many queues, a skewed clock, a queue's wait, a panic, a result that cannot be written",
        "integration/test_model_client.py::test_a_large_body_arrives",
        "integration/test_model_client.py::test_a_call_that_takes_too_long_is_slow_and_its_connection_closed",
        "unit/test_listener.py::test_an_answer_that_could_not_be_stored_is_kept_and_its_message_handed_back",
    ),
    case(
        356,
        "latency and rate have a limit that a test holds",
        "integration/test_redis_sorted_set_rules.py::test_a_message_is_picked_up_within_milliseconds_by_zadd_alone",
        "integration/test_redis_sorted_set_rules.py::test_an_idle_queue_is_asked_for_a_few_times_a_second_and_no_more",
    ),
)

GROUPS: Final[Mapping[str, tuple[Case, ...]]] = {
    "11.1 envelopes": ENVELOPES,
    "11.2 results": RESULTS,
    "11.3 sorted set: taking": DEQUEUE,
    "11.4 sorted set: leases": LEASES,
    "11.5 sorted set: retries": RETRIES,
    "11.6 sorted set: results": RESULT_LISTS,
    "11.7 Redis Pub/Sub": PUBSUB,
    "11.8 cancellation, producer": PRODUCER,
    "11.9 Google Pub/Sub": GCP,
    "11.10 SQL store": SQL_STORE,
    "11.11 SQL quota": SQL_QUOTA,
    "11.12 gates: basics": GATES,
    "11.13 gates: metrics": METRIC_GATES,
    "11.14 gates: quotas, wrappers": QUOTAS,
    "11.15 gates: leased rate": LEASED,
    "11.16 gates: AIMD": AIMD,
    "11.17 merge policies": MERGE,
    "11.18 worker": WORKER,
    "11.19 HTTP client": CLIENT,
    "11.20 transforms": BODIES,
    "11.21 pools, configuration": CONFIGURATION,
    "11.22 metrics, traces, logs": WATCHING,
    "11.23 reload": RELOADING,
    "11.24 front end": FRONT_END,
    "11.25 end to end": END_TO_END,
    "11.26 deployment": DEPLOYMENT,
    "11.27 checked properties": PROPERTIES,
    "11.28 gaps of theirs": GAPS,
}


def numbers_in(name: str) -> tuple[int, ...]:
    """The cases that a test's name says it stands for."""
    return tuple(int(number) for some in _NUMBERS.findall(name) for number in some.split("_"))


@cache
def all_tests() -> tuple[str, ...]:
    """Every test below `tests/`, as the table names them; nothing is imported."""
    return tuple(
        f"{path.relative_to(TESTS).as_posix()}::{name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in _tests_of(ast.parse(path.read_text()).body)
    )


def _tests_of(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                yield name
            case ast.ClassDef(name=name, body=inner):
                yield from (f"{name}::{test}" for test in _tests_of(inner))


def found(tests: Sequence[str]) -> dict[str, list[Found]]:
    """All cases by group, each with its tests."""
    by_number: dict[int, list[str]] = {}
    for test in tests:
        for number in numbers_in(test):
            by_number.setdefault(number, []).append(test)
    return {
        group: [Found(case=one, tests=(*by_number.get(one.number, ()), *one.named)) for one in cases]
        for group, cases in GROUPS.items()
    }


def report(groups: Mapping[str, Sequence[Found]], *, each: bool = False) -> Iterator[str]:
    """What is printed, line by line."""
    everything = [one for cases in groups.values() for one in cases]
    for group, cases in groups.items() if each else ():
        yield group
        for one in cases:
            yield f"  {one.case.number:3} {one.case.said}"
            if one.applies:
                yield from (f"        {test}" for test in one.tests or ["MISSING"])
            else:
                yield f"        does not apply: {one.case.does_not_apply}"
        yield ""
    yield f"{'group':<30} {'cases':>6} {'apply':>6} {'covered':>8} {'missing':>8}"
    for group, cases in groups.items():
        yield _row(group, cases)
    yield _row("all", everything)
    if missing := [one.case for one in everything if one.missing]:
        yield "\nWithout a test:"
        yield from (f"  {one.number:3} {one.said}" for one in missing)


def _row(name: str, cases: Sequence[Found]) -> str:
    apply, missing = sum(one.applies for one in cases), sum(one.missing for one in cases)
    return f"{name:<30} {len(cases):>6} {apply:>6} {apply - missing:>8} {missing:>8}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Count the cases with a test.")
    parser.add_argument("--list", action="store_true", help="every case with its tests, or why it does not apply")
    groups = found(all_tests())
    for line in report(groups, each=parser.parse_args(arguments).list):
        print(line)
    return 1 if any(one.missing for cases in groups.values() for one in cases) else 0


if __name__ == "__main__":
    raise SystemExit(main())
