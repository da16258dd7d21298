"""With what a request ends that a gate has dropped, in our own terms. Pure."""

from collections.abc import Mapping
from typing import Final

from inference_worker.messages import ErrorCode
from inference_worker.ports import Dropped

NO_STATUS: Final = 0
"""There was no HTTP answer, and none was made up."""
LATE: Final = 408
GATE_FAILED: Final = 500
"""The status of a request whose gate could not be asked."""
ERRORS: Final[Mapping[str, ErrorCode]] = {"GATE_DROPPED": "gate_dropped", "DEADLINE_EXCEEDED": "expired"}
"""Our error codes for those of the gates."""


def ending(dropped: Dropped) -> tuple[int, ErrorCode, str]:
    """Status, error code and text of its reply. What came too late is 408, as it is anywhere."""
    error_code = ERRORS.get(dropped.error_code)
    if error_code == "expired":
        return LATE, error_code, dropped.error
    text = dropped.error if error_code is not None else f"{dropped.error_code}: {dropped.error}"
    return NO_STATUS if dropped.status_code is None else dropped.status_code, "gate_dropped", text
