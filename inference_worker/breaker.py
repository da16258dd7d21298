"""When a model that says it is healthy and fails everything is taken at its deeds. Pure: it is told, and answers.

Closed, all is well. After so many failures in a row it opens: nothing is consumed for a while. Then it lets one request
at a time through: a success closes it, a failure opens it again for twice as long.
"""

from typing import Final, Literal

from inference_worker.disposition import Concluded, Failed, Outcome

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 60.0

State = Literal["closed", "open", "trying"]


class Breaker:
    """Counts what comes of calls to the model. `most_failures` in a row open it; 0 = never."""

    def __init__(self, most_failures: int) -> None:
        self._most_failures = most_failures
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self.state: State = "closed"

    def saw(self, outcome: Outcome) -> float | None:
        """Take note of an outcome; the seconds to pause, where this one opens it."""
        failed = _is_failure(outcome)
        if failed is None or self._most_failures == 0:
            return None
        if not failed:
            self._failures, self._pause_s = 0, FIRST_PAUSE_S
            self.state = "closed"
            return None
        self._failures += 1
        if self.state == "open" or (self.state == "closed" and self._failures < self._most_failures):
            return None
        if self.state == "trying":
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        self.state = "open"
        return self._pause_s

    def try_again(self) -> None:
        """The pause is over."""
        if self.state == "open":
            self.state = "trying"

    @property
    def failures(self) -> int:
        """In a row, up to now."""
        return self._failures


def _is_failure(outcome: Outcome) -> bool | None:
    """Whether the model failed; None where the outcome says nothing of it."""
    match outcome:
        case Failed():
            return True
        case Concluded(reply=reply):
            match reply.error_code:
                case None:
                    return False
                case "model_error":
                    return reply.status_code >= 500
                case "bad_response" | "deadline_exceeded":
                    return True
                case _:
                    return None
        case _:
            return None
