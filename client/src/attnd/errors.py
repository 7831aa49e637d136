"""Everything a call can raise: one class per error code of the service, and the transport's own.

AttndError                       request_id
├── TransportError               no answer was received
│   ├── ConnectionFailed         nothing was sent
│   │   └── ArenaFull            no room in the session's shared memory
│   ├── ReplyLost                sent, perhaps carried out, no whole answer came back
│   └── TimedOut                 the timeout or the call's deadline passed on this side
│       └── NeverReady           `wait_ready` waited as long as it may (a TimeoutError as well)
├── ProtocolError                an answer came that is not attnd's
└── ServiceError                 the service refused: status, code, title, detail, timings, problem
    ├── MalformedBody            400
    ├── MalformedRequest         400
    ├── Unauthorized             401
    ├── Forbidden                403 scope
    ├── UnknownSequence          404 sequences
    ├── UnknownLease             404 lease
    ├── UnknownPage              404 page_key
    ├── UnknownImport            404 sequences
    ├── NotFound                 404
    ├── MethodNotAllowed         405 allow
    ├── RequestTimeout           408
    ├── SequenceExists           409 sequences
    ├── LengthMismatch           409 lengths
    ├── SequenceTaken            409 epochs
    ├── KeyMismatch              409 page
    ├── SequenceChanged          409 sequences, generation
    ├── ImportExists             409 sequences
    ├── PartMismatch             409 part, next_part, num_parts
    ├── LostSequence             410 sequences
    ├── BodyTooLarge             413 size, limit
    ├── AnswerTooLarge           413 size, limit
    ├── UnsupportedMediaType     415 supported
    ├── InvalidRequest           422 field, value, rule
    ├── DigestMismatch           422 of, given, found
    ├── Overloaded               429 retry_after_s
    ├── HeadersTooLarge          431
    ├── Cancelled                499
    ├── Internal                 500
    ├── NotSupported             501
    ├── NotReady                 503 retry_after_s
    ├── SequenceMoving           503 sequences
    ├── DeadlineExceeded         504
    ├── OutOfPages               507 needed, free, total, available, held
    └── OutOfSequences           507 needed, free, total

A `ServiceError` changed nothing in the service; in a cluster, nothing but what `problem["done"]`
names, for a batch over several engines of which one refused its part. After `ReplyLost` and
`TimedOut` one cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attnd.results import Meta


class AttndError(Exception):
    """Base of everything this package raises for a call."""

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class TransportError(AttndError):
    """No answer was received; `__cause__` is the system's own exception where there is one."""


class ConnectionFailed(TransportError):
    """The connection was refused or could not be made: nothing was sent."""


class ArenaFull(ConnectionFailed):
    """A session's arena has no room for a request or its answer, and may not grow any more."""


class ReplyLost(TransportError):
    """The connection broke after the request went out: it may or may not have been carried out."""


class TimedOut(TransportError):
    """The client's timeout or the call's deadline passed; the request may have been carried out."""


class NeverReady(TimedOut, TimeoutError):
    """The service was not ready within the time that `wait_ready` was given, with its reason."""


class ProtocolError(AttndError):
    """The answer is not what the service's contract promises."""


class ServiceError(AttndError):
    """The service answered with a problem document (RFC 9457), kept whole in `problem`."""

    def __init__(self, problem: Mapping[str, Any], meta: Meta) -> None:
        self.problem = dict(problem)
        self.status = int(problem.get("status", 0))
        self.code = str(problem.get("code", ""))
        self.title = str(problem.get("title", ""))
        self.detail = str(problem.get("detail", self.title))
        self.meta = meta
        super().__init__(f"{self.status} {self.code}: {self.detail}", meta.request_id)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per stage, as far as the request came (`Server-Timing`)."""
        return self.meta.timings

    @property
    def retry_after_s(self) -> float | None:
        """When to come again: the document's own figure, else the `Retry-After` header's."""
        told = self.problem.get("retry_after_s")
        return float(told) if isinstance(told, (int, float)) else self.meta.retry_after_s


class MalformedBody(ServiceError):
    """The body is not what its media type says."""


class MalformedRequest(ServiceError):
    """What was sent is not HTTP, or not a frame of the road: another version of attnd."""


class Unauthorized(ServiceError):
    """The service asks for a key (`api_key`), and does not know this one."""


class Forbidden(ServiceError):
    """The key is not for this; `scope` is what it would need."""

    @property
    def scope(self) -> str:
        return str(self.problem.get("scope", ""))


class UnknownSequence(ServiceError):
    """`sequences`: the ids that do not exist."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class UnknownLease(ServiceError):
    """The lease has ended, or never was."""

    @property
    def lease(self) -> str:
        return str(self.problem.get("lease", ""))


class UnknownPage(ServiceError):
    """No page of that key is cached; for a pin to be taken away: or it has none."""

    @property
    def page_key(self) -> str:
        return str(self.problem.get("page_key", ""))


class UnknownImport(ServiceError):
    """None was begun in `sequences`, or it was finished, given up, or left alone for too long."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class NotFound(ServiceError):
    """No such route: not attnd, or another version of it."""


class MethodNotAllowed(ServiceError):
    """The route is not for this method, only for those in `allow`: another version of attnd."""

    @property
    def allow(self) -> tuple[str, ...]:
        return tuple(self.problem.get("allow", ()))


class RequestTimeout(ServiceError):
    """The request came in too slowly."""


class SequenceExists(ServiceError):
    """`sequences`: the ids that exist already."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class LengthMismatch(ServiceError):
    """`lengths`: the true kv_len of every sequence of the request, at its layer."""

    @property
    def lengths(self) -> dict[str, int]:
        return {str(name): int(length) for name, length in self.problem.get("lengths", {}).items()}


class SequenceTaken(ServiceError):
    """Somebody else changes a sequence over several engines; `epochs` by sequence. Try again."""

    @property
    def epochs(self) -> dict[str, int]:
        return {str(name): int(epoch) for name, epoch in self.problem.get("epochs", {}).items()}


class SequenceMoving(ServiceError):
    """`sequences` are on their way from one engine of a cluster to another: try again."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class KeyMismatch(ServiceError):
    """`page` of the sequence is committed under another name, or the name stands for another."""

    @property
    def page(self) -> int:
        return int(self.problem.get("page", 0))


class SequenceChanged(ServiceError):
    """The sequence is not what its export's header told: begin again, or export a fork of it."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))

    @property
    def generation(self) -> str:
        return str(self.problem.get("generation", ""))


class ImportExists(ServiceError):
    """Another export is being imported as one of `sequences`."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class LostSequence(ServiceError):
    """`sequences` were lost with the engine of the cluster that they were on: create them anew."""

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(self.problem.get("sequences", ()))


class PartMismatch(ServiceError):
    """`part` of an import came where `next_part` of `num_parts` is wanted."""

    @property
    def part(self) -> int:
        return int(self.problem.get("part", 0))

    @property
    def next_part(self) -> int:
        return int(self.problem.get("next_part", 0))

    @property
    def num_parts(self) -> int:
        return int(self.problem.get("num_parts", 0))


class BodyTooLarge(ServiceError):
    """The body has `size` bytes or more, and the service reads at most `limit`."""

    @property
    def size(self) -> int:
        return int(self.problem.get("size", 0))

    @property
    def limit(self) -> int:
        return int(self.problem.get("limit", 0))


class AnswerTooLarge(ServiceError):
    """The answer would have `size` bytes, and at most `limit` may go: ask for less at a time."""

    @property
    def size(self) -> int:
        return int(self.problem.get("size", 0))

    @property
    def limit(self) -> int:
        return int(self.problem.get("limit", 0))


class HeadersTooLarge(ServiceError):
    """The request's headers are more than the service reads."""


class UnsupportedMediaType(ServiceError):
    """Not one of the media types in `supported`."""

    @property
    def supported(self) -> tuple[str, ...]:
        return tuple(self.problem.get("supported", ()))


class InvalidRequest(ServiceError):
    """`field` holds `value`, which breaks `rule`."""

    @property
    def field(self) -> str:
        return str(self.problem.get("field", ""))

    @property
    def value(self) -> Any:
        return self.problem.get("value")

    @property
    def rule(self) -> str:
        return str(self.problem.get("rule", ""))


class DigestMismatch(ServiceError):
    """What came is not what was exported: `of` is the header, a part or the end."""

    @property
    def of(self) -> str:
        return str(self.problem.get("of", ""))

    @property
    def given(self) -> str:
        return str(self.problem.get("given", ""))

    @property
    def found(self) -> str:
        return str(self.problem.get("found", ""))


class Overloaded(ServiceError):
    """The queue is full: come again in `retry_after_s` seconds."""


class NotSupported(ServiceError):
    """The service does not do this, or has it switched off."""


class NotReady(ServiceError):
    """Starting, draining, or the device is lost."""


class DeadlineExceeded(ServiceError):
    """The deadline passed before the request was done; it changed nothing."""


class OutOfPages(ServiceError):
    """`needed` pages, `available` of `total` could be had: free sequences, or preempt, then try
    again. `free` of them need no eviction.

    `held` says by state what the caller's namespace has, and how many leases. In a cluster
    `engines_with_room` have as many pages: new sequences go there.
    """

    @property
    def engines_with_room(self) -> tuple[str, ...]:
        return tuple(self.problem.get("engines_with_room", ()))

    @property
    def held(self) -> dict[str, int]:
        return {str(name): int(count) for name, count in self.problem.get("held", {}).items()}

    @property
    def needed(self) -> int:
        return int(self.problem.get("needed", 0))

    @property
    def free(self) -> int:
        return int(self.problem.get("free", 0))

    @property
    def available(self) -> int:
        return int(self.problem.get("available", self.free))

    @property
    def total(self) -> int:
        return int(self.problem.get("total", 0))


class OutOfSequences(ServiceError):
    """`needed` sequences, `free` of `total` may still be made: delete some, then try again."""

    @property
    def needed(self) -> int:
        return int(self.problem.get("needed", 0))

    @property
    def free(self) -> int:
        return int(self.problem.get("free", 0))

    @property
    def total(self) -> int:
        return int(self.problem.get("total", 0))


class Cancelled(ServiceError):
    """The caller took the call back, or went away; it left no trace."""


class Internal(ServiceError):
    """A bug in the service; its log has the traceback under the request id."""


CODES: Final[dict[str, type[ServiceError]]] = {
    "malformed_body": MalformedBody,
    "malformed_request": MalformedRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "unknown_sequence": UnknownSequence,
    "unknown_lease": UnknownLease,
    "unknown_page": UnknownPage,
    "unknown_import": UnknownImport,
    "not_found": NotFound,
    "method_not_allowed": MethodNotAllowed,
    "request_timeout": RequestTimeout,
    "sequence_exists": SequenceExists,
    "length_mismatch": LengthMismatch,
    "sequence_taken": SequenceTaken,
    "sequence_moving": SequenceMoving,
    "key_mismatch": KeyMismatch,
    "sequence_changed": SequenceChanged,
    "import_exists": ImportExists,
    "part_mismatch": PartMismatch,
    "lost_sequence": LostSequence,
    "body_too_large": BodyTooLarge,
    "answer_too_large": AnswerTooLarge,
    "unsupported_media_type": UnsupportedMediaType,
    "invalid_request": InvalidRequest,
    "digest_mismatch": DigestMismatch,
    "overloaded": Overloaded,
    "headers_too_large": HeadersTooLarge,
    "not_supported": NotSupported,
    "not_ready": NotReady,
    "deadline_exceeded": DeadlineExceeded,
    "cancelled": Cancelled,
    "out_of_pages": OutOfPages,
    "out_of_sequences": OutOfSequences,
    "internal": Internal,
}


def service_error(problem: Mapping[str, Any], meta: Meta) -> ServiceError:
    """The problem document as an exception; a code this version does not know stays general."""
    return CODES.get(str(problem.get("code", "")), ServiceError)(problem, meta)
