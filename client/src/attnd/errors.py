"""Everything a call can raise: one class per error code of the service, and the transport's own.

AttndError                       request_id
├── TransportError               no answer was received
│   ├── ConnectionFailed         nothing was sent
│   │   └── ArenaFull            no room in the session's shared memory
│   ├── ReplyLost                sent, possibly executed, no complete answer received
│   └── TimedOut                 the timeout or the call's deadline passed at this end
│       └── NeverReady           `wait_ready` reached its timeout (a TimeoutError as well)
├── ProtocolError                the answer is not one of attnd's
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
    ├── NotErased                500
    ├── NotSupported             501
    ├── NotReady                 503 retry_after_s
    ├── DeadlineExceeded         504
    ├── OutOfPages               507 needed, free, total, available, held
    └── OutOfSequences           507 needed, free, total

After a `ServiceError` nothing has changed in the service. In a cluster, a batch over several
engines may have changed what `problem["done"]` names, also in an earlier attempt. After
`ReplyLost` and `TimedOut` the call may or may not have been executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import get_annotations
from typing import Any, Final

from attnd.meta import Meta
from attnd.wire.codes import CODES, code_of


class AttndError(Exception):
    """Base of everything that this package raises for a call."""

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class TransportError(AttndError):
    """No answer was received; `__cause__` is the system's own exception where there is one."""


class ConnectionFailed(TransportError):
    """The connection was refused or could not be made: nothing was sent."""


class ArenaFull(ConnectionFailed):
    """A session's arena has no room for a request or its answer, and cannot grow."""


class ReplyLost(TransportError):
    """The connection broke after the request was sent: it may or may not have been executed."""


class TimedOut(TransportError):
    """The client's timeout or the call's deadline passed; the request may have been executed."""


class NeverReady(TimedOut, TimeoutError):
    """The service was not ready within the timeout of `wait_ready`; the message has its reason."""


class ProtocolError(AttndError):
    """The answer breaks the service's contract."""


READ: Final[dict[str, tuple[Callable[[Any], Any], object]]] = {
    "int": (int, 0),
    "str": (str, ""),
    "tuple[str, ...]": (lambda given: tuple(map(str, given)), ()),
    "dict[str, int]": (lambda given: {str(name): int(one) for name, one in given.items()}, {}),
    "Any": (lambda given: given, None),
}
"""How a member of the problem document is read, and its default, by its annotation."""


class ServiceError(AttndError):
    """The service answered with a problem document (RFC 9457), kept whole in `problem`.

    `status` is the HTTP status, `code` the name of the error, `detail` the cause and the remedy,
    `meta` the request id and the seconds per stage. Members of the document that a subclass
    annotates are its attributes.
    """

    def __init_subclass__(cls) -> None:
        for name, kind in get_annotations(cls).items():
            setattr(cls, name, property(partial(cls._member, name, *READ[kind])))

    @staticmethod
    def _member(name: str, read: Callable[[Any], Any], default: object, error: ServiceError) -> Any:
        return read(error.problem.get(name, default))

    def __init__(self, problem: Mapping[str, Any], meta: Meta) -> None:
        self.problem = dict(problem)
        self.status = int(problem.get("status", 0))
        self.code = str(problem.get("code", ""))
        self.title = str(problem.get("title", ""))
        self.detail = str(problem.get("detail", self.title))
        self.meta = meta
        super().__init__(f"{self.status} {self.code}: {self.detail}", meta.request_id)

    def __reduce__(self) -> tuple[type[ServiceError], tuple[dict[str, Any], Meta]]:
        """Pickled as its document: a process pool returns it to its caller."""
        return type(self), (self.problem, self.meta)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per stage that the request reached (`Server-Timing`)."""
        return self.meta.timings

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before a retry, of the document or the `Retry-After` header."""
        given = self.problem.get("retry_after_s")
        return float(given) if isinstance(given, (int, float)) else self.meta.retry_after_s


class MalformedBody(ServiceError):
    """The body is not of its media type."""


class MalformedRequest(ServiceError):
    """The request is not HTTP, or not a frame of the road: another version of attnd."""


class Unauthorized(ServiceError):
    """The service needs a key (`api_key`), or does not know this one."""


class Forbidden(ServiceError):
    """The key lacks `scope`."""

    scope: str


class UnknownSequence(ServiceError):
    """`sequences`: the ids that do not exist."""

    sequences: tuple[str, ...]


class UnknownLease(ServiceError):
    """`lease` has ended or never existed."""

    lease: str


class UnknownPage(ServiceError):
    """No page with `page_key` is cached; for `unpin`: or it has no pin."""

    page_key: str


class UnknownImport(ServiceError):
    """No import into `sequences` is under way: not begun, finished, cancelled or expired."""

    sequences: tuple[str, ...]


class NotFound(ServiceError):
    """No such route: not attnd, or another version of it."""


class MethodNotAllowed(ServiceError):
    """The route takes only the methods in `allow`: another version of attnd."""

    allow: tuple[str, ...]


class RequestTimeout(ServiceError):
    """The request arrived too slowly."""


class SequenceExists(ServiceError):
    """`sequences`: the ids that exist already."""

    sequences: tuple[str, ...]


class LengthMismatch(ServiceError):
    """`lengths`: the true kv_len of every sequence of the request, at its layer."""

    lengths: dict[str, int]


class KeyMismatch(ServiceError):
    """`page` of the sequence has another name, or the name belongs to another page."""

    page: int


class SequenceChanged(ServiceError):
    """The sequence has changed since its export's header was made, and has `generation` now.

    Begin the export again, or export a fork.
    """

    sequences: tuple[str, ...]
    generation: str


class ImportExists(ServiceError):
    """Another export is being imported as one of `sequences`."""

    sequences: tuple[str, ...]


class LostSequence(ServiceError):
    """`sequences` were lost with their engine of the cluster: create them again."""

    sequences: tuple[str, ...]


class PartMismatch(ServiceError):
    """`part` of an import was sent; `next_part` of `num_parts` is expected."""

    part: int
    next_part: int
    num_parts: int


class BodyTooLarge(ServiceError):
    """The body has `size` bytes or more; the service reads at most `limit`."""

    size: int
    limit: int


class AnswerTooLarge(ServiceError):
    """The answer would have `size` bytes, at most `limit` are sent: request less per call."""

    size: int
    limit: int


class HeadersTooLarge(ServiceError):
    """The request's headers are larger than the service reads."""


class UnsupportedMediaType(ServiceError):
    """The media type is not one of `supported`."""

    supported: tuple[str, ...]


class InvalidRequest(ServiceError):
    """`field` has `value`, which breaks `rule`."""

    field: str
    value: Any
    rule: str


class DigestMismatch(ServiceError):
    """The data is not the exported data. `of` is the header, a part or the end; `given` its
    digest as sent, `found` as computed."""

    of: str
    given: str
    found: str


class Overloaded(ServiceError):
    """The queue is full: retry after `retry_after_s` seconds."""


class NotSupported(ServiceError):
    """The service cannot do this, or it is switched off."""


class NotReady(ServiceError):
    """The service is starting or draining, or the device is lost."""


class DeadlineExceeded(ServiceError):
    """The deadline passed before the request was done; nothing changed."""


class OutOfPages(ServiceError):
    """`needed` pages, of which `available` of `total` can be had now: delete sequences and retry.

    `free` pages need no eviction. `held` are the namespace's own pages by state, and its leases. In
    a cluster `engines_with_room` have as many pages; new sequences go there.
    """

    engines_with_room: tuple[str, ...]
    held: dict[str, int]
    needed: int
    free: int
    total: int

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted, within the quota."""
        return int(self.problem.get("available", self.free))


class OutOfSequences(ServiceError):
    """`needed` sequences, of which `free` of `total` can be made: delete some and retry."""

    needed: int
    free: int
    total: int


class Cancelled(ServiceError):
    """The caller cancelled the call or disconnected; nothing changed."""


class Internal(ServiceError):
    """A bug in the service; its log has the traceback under the request id."""


class NotErased(ServiceError):
    """A `clear` could not overwrite all of the namespace on the disk, which failed: its operator
    has to delete the files. Nothing of the namespace can be found any more."""


ERRORS: Final[dict[str, type[ServiceError]]] = {
    code_of(error.__name__): error for error in ServiceError.__subclasses__()
}
"""The class of each code in `attnd.wire.codes`."""
if missing := CODES.keys() ^ ERRORS.keys():
    raise RuntimeError(f"codes without a class, or classes without a code: {sorted(missing)}")


def service_error(problem: Mapping[str, Any], meta: Meta) -> ServiceError:
    """The problem document as an exception: `ServiceError` itself for an unknown code."""
    return ERRORS.get(str(problem.get("code", "")), ServiceError)(problem, meta)
