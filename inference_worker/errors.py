"""Every exception of ours, one tree a neighbour. Expected answers are values, not exceptions.

InferenceWorkerError
├── ConfigurationError         the environment: all problems at once
├── MalformedRequest           the message cannot be read as a request
├── TransportLost              the broker: this connection is over, open a new one
├── QueueFull                  the queue takes no more for now
├── GateFailed                 a gate cannot say whether a request may go
├── StoreUnavailable           the result store cannot be asked now; outcome unknown
│   └── StatementRefused       Postgres has said no: nothing was done
├── ModelFailure               the model gave no usable answer
│   ├── ModelGone              refused, reset, DNS: nobody is there
│   ├── ModelCut               it answered, and stopped in the middle
│   ├── ModelSlow              the time for a call has passed
│   └── BadResponse            it answered what cannot be stored as an answer
├── SinkUnavailable            metric server or billing cannot take it now
└── ClientError                a caller's request, cancellation or question
    ├── NotSupported           this way of reaching the system cannot do it
    ├── InvalidSubmission      a request that cannot be meant
    ├── NotAccepted            a request was not taken over, for sure or perhaps
    │   ├── KeyTaken           its idempotency key stands for another request
    │   └── PartlyAccepted     of many, the first were, the rest not
    ├── NoResultYet            the time to wait is over
    ├── UnreadableResult       what lies among the results is none
    ├── LeaseLost              a leased result is not ours any more
    └── NoSuchRequest          nobody knows of it (any more)
"""

from collections.abc import Awaitable, Callable, Mapping


class InferenceWorkerError(Exception):
    """Whatever we raise on purpose."""


class ConfigurationError(InferenceWorkerError):
    """The configuration is missing something or has something wrong; `problems` has one line for each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class MalformedRequest(InferenceWorkerError):
    """A message that is no request; trying again cannot help."""

    def __init__(self, reason: str, request_id: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.request_id = request_id
        """The id to answer under, where one could be read."""


class TransportLost(InferenceWorkerError):
    """The connection to the broker is over, and with it the right to settle what came over it."""


class QueueFull(InferenceWorkerError):
    """The queue takes no more messages for now; `waiting` is how many wait, where that is known."""

    def __init__(self, reason: str, waiting: int | None = None) -> None:
        super().__init__(reason)
        self.waiting = waiting


class GateFailed(InferenceWorkerError):
    """A gate could not be asked, and has no rule for that."""


class StoreUnavailable(InferenceWorkerError):
    """The result store gave no answer. What was asked may have been done, or may be done later.

    `code` is Postgres' own name for what happened (SQLSTATE), where there is one.
    """

    def __init__(self, reason: str = "", code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class StatementRefused(StoreUnavailable):
    """Postgres did not carry a statement out, and said so."""


class ModelFailure(InferenceWorkerError):
    """The call to the model ended without a usable answer."""


class ModelGone(ModelFailure):
    """Connection refused or reset, or the name did not resolve."""


class ModelCut(ModelFailure):
    """Protocol error, or an answer that stopped before its end."""

    def __init__(
        self,
        reason: str,
        status_code: int | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.status_code = status_code
        """That of an error of which the head had come. None for half an answer, which says nothing for sure."""
        self.headers: Mapping[str, str] = headers or {}
        """Those of the error that gates learn from, by lower-case names."""
        self.retry_after_s = retry_after_s


class ModelSlow(ModelFailure):
    """The time limit of the call has passed; the connection was closed."""


class BadResponse(ModelFailure):
    """An answer that is whole and cannot be stored: no JSON, too large, a redirect, an error event in a stream."""

    def __init__(self, reason: str, status_code: int | None = None) -> None:
        super().__init__(reason)
        self.status_code = status_code
        """What the model said of it: the HTTP status, or the `code` of an error event."""


class SinkUnavailable(InferenceWorkerError):
    """A metric server or billing receiver cannot take the batch now.

    `retry_after_s` is what it asked for, if it did.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ClientError(InferenceWorkerError):
    """What `inference_worker.client` cannot do."""


class NotSupported(ClientError):
    """This way of reaching the system cannot do it."""


class NotAccepted(ClientError):
    """A request was not taken over.

    `maybe` is whether it may have been all the same: then the same `request_id` may be submitted again without harm.
    `for_good` is whether this very request never will be: too large, refused by the server.
    """

    def __init__(self, reason: str, *, maybe: bool, for_good: bool = False) -> None:
        super().__init__(reason)
        self.maybe = maybe
        self.for_good = for_good


class InvalidSubmission(ClientError, ValueError):
    """A request that cannot be meant: the message says which field is wrong, what came and what is accepted."""


class KeyTaken(NotAccepted):
    """An idempotency key stands for another request, whose id is `request_id`."""

    def __init__(self, idempotency_key: str, request_id: str) -> None:
        super().__init__(
            f"idempotency_key {idempotency_key!r} stands for another request, {request_id!r}: the same key needs the "
            "same request, its deadline and routes included",
            maybe=False,
            for_good=True,
        )
        self.idempotency_key = idempotency_key
        self.request_id = request_id


class PartlyAccepted(NotAccepted):
    """Of many requests the first were taken over, and the rest not; the cause says why.

    `accepted` has the submissions, in the order of the requests. `maybe` is about the next ones.
    """

    def __init__(self, reason: str, accepted: tuple[object, ...], *, maybe: bool, for_good: bool) -> None:
        super().__init__(reason, maybe=maybe, for_good=for_good)
        self.accepted = accepted


class UnreadableResult(ClientError):
    """Something among the results that cannot be read as one: `raw`.

    Where it was received, it is leased like a result, and comes again once the lease has lapsed. `discard` ends that.
    """

    def __init__(self, reason: str, raw: bytes, discard: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(reason)
        self.raw = raw
        self.discard = discard
        """None where it is gone already."""


class LeaseLost(ClientError):
    """The lease on a result has lapsed or is somebody else's: it may have been received again."""


class NoResultYet(ClientError, TimeoutError):
    """The time to wait is over, and there is no result. It may still come."""


class NoSuchRequest(ClientError):
    """The server does not know the request, or its result is not kept any more."""
