"""How long a failed call waits that is tried until its deadline, however often; and what a status means then. Pure.

The rule of llm-d-async: exponential steps with equal jitter, `Retry-After` as a floor that leaves time for another try,
no bound on attempts. `disposition.decide` makes a disposition of it, as of the rule that bounds the attempts.
What differs from theirs: a redirect is no success, 408 and 425 are tried again, and so is a call that took too long
while its request still has time; each status can be set otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from inference_worker.retry_ladder import LADDER_S, rungs_below

FIRST_STEP_S: Final = 2.0
LONGEST_STEP_S: Final = 60.0
SHORTEST_STEP_S: Final = 0.25
SPREAD: Final = 0.25
"""How much longer than asked a `Retry-After` may become, so that not everybody comes back at once."""
MOST_DOUBLINGS: Final = 60

Judgement = Literal["answer", "final", "retry"]
JUDGEMENTS: Final[tuple[Judgement, ...]] = ("answer", "final", "retry")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRule:
    """What an HTTP status means for its request."""

    judgement: Judgement
    """A success; a failure that another try would not mend; or one that may pass."""
    shed: bool = False
    """The model turned it away for want of room: counted as shed."""

    @property
    def heeds_retry_after(self) -> bool:
        """Whether a `Retry-After` beside it is believed."""
        return self.judgement == "retry"


ANSWER: Final = StatusRule(judgement="answer")
FINAL: Final = StatusRule(judgement="final")
RETRY: Final = StatusRule(judgement="retry")
SHED: Final = StatusRule(judgement="retry", shed=True)

CLASSES: Final[Mapping[int, StatusRule]] = {1: FINAL, 2: ANSWER, 3: FINAL, 4: FINAL, 5: RETRY}
STATUSES: Final[Mapping[int, StatusRule]] = {408: RETRY, 425: RETRY, 429: SHED}
"""408: the server gave up waiting for us. 425: too early, by its own word. Both say that the request may come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusTable:
    """What each status means: the status's own rule, else that of its class, else final."""

    statuses: Mapping[int, StatusRule] = field(default_factory=lambda: STATUSES)
    classes: Mapping[int, StatusRule] = field(default_factory=lambda: CLASSES)

    def of(self, status_code: int) -> StatusRule:
        """The rule for one status."""
        return self.statuses.get(status_code) or self.classes.get(status_code // 100, FINAL)

    def judged(self, judgement: Judgement) -> frozenset[int]:
        """The statuses from 300 to 599 that are judged so, as the processor wants them."""
        return frozenset(code for code in range(300, 600) if self.of(code).judgement == judgement)


def status_table(settings: Mapping[str, str]) -> tuple[StatusTable, tuple[str, ...]]:
    """The table with `settings` in it, such as {"404": "retry", "5xx": "final"}; and what is wrong with them.

    2xx stays a success: an answer that is thrown away was paid for.
    """
    statuses, classes, problems = dict(STATUSES), dict(CLASSES), []
    for name in sorted(settings, key=lambda name: (not name.endswith("xx"), name)):
        judgement = settings[name]
        if judgement not in JUDGEMENTS:
            problems.append(f"{name} is {judgement!r}; accepted: {', '.join(JUDGEMENTS)}")
        elif len(name) == 3 and name.endswith("xx") and name[0] in "345":
            first = int(name[0])
            classes[first] = StatusRule(judgement=judgement)
            statuses = {code: rule for code, rule in statuses.items() if code // 100 != first}
        elif len(name) == 3 and name.isascii() and name.isdigit() and name[0] in "345":
            statuses[int(name)] = StatusRule(judgement=judgement, shed=judgement == "retry" and name == "429")
        else:
            problems.append(f"{name} is no status that can be set; accepted: 300 to 599, 3xx, 4xx, 5xx")
    return StatusTable(statuses=statuses, classes=classes), tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilDeadline:
    """How temporary failures are tried again: until the request's deadline."""

    first_step_s: float = FIRST_STEP_S
    longest_step_s: float = LONGEST_STEP_S
    shortest_step_s: float = SHORTEST_STEP_S
    """Steps get shorter towards the deadline, for all requests that have the same one: not shorter than that."""
    on_ladder: bool = False
    """Only delays of `retry_ladder.LADDER_S`, for a broker that needs a waiting queue for each distinct one."""


def backoff_s(retry_count: int, policy: UntilDeadline, *, left_s: float, jitter: float) -> float:
    """Equal jitter in [d/2, d), d = min(cap, first * 2**(retry_count + 1), seconds to the deadline): 2 to 4 s at first.

    `jitter` is in [0, 1). Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    doubled = policy.first_step_s * 2.0 ** min(retry_count + 1, MOST_DOUBLINGS)
    whole = max(min(doubled, policy.longest_step_s, left_s), 0.0)
    return whole / 2 * (1 + jitter)


def delay_s(
    retry_count: int,
    policy: UntilDeadline,
    *,
    left_s: float,
    retry_after_s: float | None,
    jitter: float,
    spread: float | None = None,
) -> float:
    """Seconds until a request is tried again that was tried `retry_count` + 1 times.

    A `Retry-After` above the backoff is heeded up to half of what is left, times 1 to 1.25: however much is asked, it
    costs at most 62.5 % of the time, so that there is another try. `spread` in [0, 1) says how much more; `jitter`
    where it is left out.
    """
    delay = max(
        backoff_s(retry_count, policy, left_s=left_s, jitter=jitter), min(policy.shortest_step_s, max(left_s, 0.0))
    )
    if retry_after_s is not None and retry_after_s > delay:
        asked = min(retry_after_s, max(left_s, 0.0) / 2)
        delay = max(delay, asked * (1 + SPREAD * (jitter if spread is None else spread)))
    return _rung(delay, left_s) if policy.on_ladder else delay


def failure_text(message: str, reason: str | None, cause: str | None) -> str:
    """What failed, the gateway's own reason for dropping it in brackets, and what lies behind it."""
    text = f"{message} [{reason}]" if reason else message
    return f"{text}: {cause}" if cause else text


def _rung(delay: float, left_s: float) -> float:
    """The next longer delay that exists, unless the deadline stands before it."""
    above = rungs_below(delay)
    if above < len(LADDER_S) and LADDER_S[above] <= left_s:
        return LADDER_S[above]
    return LADDER_S[above - 1] if above else 0.0
