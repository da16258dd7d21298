"""The policy by itself."""

import random
from collections import Counter

from iw_weighted import Weighted, weighted

from inference_worker.extensions import MergePolicyParts
from inference_worker.gates.parameters import Parameters
from inference_worker.merge_guarded import GuardedPolicy


def filled(**counts: int) -> Weighted[str]:
    policy: Weighted[str] = Weighted({"chat": 3}, per_queue=100)
    for source, count in counts.items():
        assert all(policy.put(source, source, None, None) for _ in range(count))
    return policy


def test_starts_are_shared_by_weight() -> None:
    policy = filled(chat=100, batch=100)

    assert Counter(policy.pop() for _ in range(40)) == {"chat": 30, "batch": 10}


def test_a_queue_that_was_idle_does_not_catch_up() -> None:
    policy = filled(chat=60)
    for _ in range(40):
        policy.pop()
    assert all(policy.put("batch", "batch", None, None) for _ in range(20))

    assert Counter(policy.pop() for _ in range(8)) == {"chat": 6, "batch": 2}


def test_it_keeps_its_promise_whatever_comes() -> None:
    """`GuardedPolicy` is what a process asks; it falls back at the first thing that is wrong."""
    rng = random.Random(7)
    guarded = GuardedPolicy(Weighted[object]({"a": 2}, per_queue=5), "weighted", rng)
    for _ in range(2000):
        source = rng.choice("abc")
        match rng.randrange(4):
            case 0 | 1:
                assert guarded.put(object(), source, None, None) or not guarded.room(source, 0)
            case 2:
                waiting = len(guarded)
                assert (guarded.pop() is None) == (waiting == 0)
            case _ if not rng.randrange(20):
                guarded.remove(source)

    assert not guarded.failed


def test_weights_that_are_none_are_a_problem() -> None:
    problems: list[str] = []
    given = Parameters({"weights": {"chat": "0"}}, "merge.parameters", problems)

    weighted(MergePolicyParts(given=given, rng=random.Random(1), per_lane=10))

    assert problems == ['merge.parameters.weights: is {"chat": "0"}; accepted: a whole number from 1 on for chat']
