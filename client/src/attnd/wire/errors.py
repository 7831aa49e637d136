"""The errors of the service: status, code, title and members of each, as clients raise them.

A class is one kind of error in a problem document (RFC 9457). Members of the document that a class
annotates are its attributes. The service looks up status, code and title here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import get_annotations
from typing import Any, ClassVar, Final

from attnd.wire.meta import Meta

PUBLIC: Final = "attnd.errors"
"""The module by whose name callers know the classes."""
READ: Final[dict[str, tuple[Callable[[Any], Any], object]]] = {
    "int": (int, 0),
    "str": (str, ""),
    "tuple[str, ...]": (lambda given: tuple(map(str, given)), ()),
    "dict[str, int]": (lambda given: {str(name): int(one) for name, one in given.items()}, {}),
    "Any": (lambda given: given, None),
}
"""How a member of the problem document is read, and its default, by its annotation."""


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """How one kind of error looks in a problem document, and the names of its members."""

    status: int
    code: str
    title: str
    members: tuple[str, ...] = ()


class AttndError(Exception):
    """Base of everything that this package raises for a call."""

    __module__ = PUBLIC

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class ServiceError(AttndError):
    """The service answered with a problem document (RFC 9457), kept whole in `problem`.

    `status` is the HTTP status, `code` the name of the error, `detail` the cause and the remedy,
    `meta` the request id and the seconds per stage.
    """

    __module__ = PUBLIC
    kind: ClassVar[ErrorCode]

    def __init_subclass__(cls, status: int, title: str) -> None:
        cls.__module__ = PUBLIC
        code = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        members = get_annotations(cls)
        cls.kind = ErrorCode(status, code, title, tuple(members))
        for name, kind in members.items():
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


class MalformedBody(ServiceError, status=400, title="The body cannot be read"):
    """The body is not of its media type: truncated, trailing bytes, a wrong header."""


class MalformedRequest(ServiceError, status=400, title="The request cannot be read"):
    """The request is not HTTP, or not a frame of the road: another version of attnd."""


class Unauthorized(ServiceError, status=401, title="A key is needed"):
    """The service needs a key (`api_key`), or does not know this one."""


class Forbidden(ServiceError, status=403, title="This is not allowed"):
    """The key lacks `scope`. If that is empty: the request has another `Host`, or comes from
    another web page."""

    scope: str


class UnknownSequence(ServiceError, status=404, title="No such sequence"):
    """`sequences`: the ids that do not exist."""

    sequences: tuple[str, ...]


class UnknownLease(ServiceError, status=404, title="No such lease"):
    """`lease` has ended or never existed."""

    lease: str


class UnknownPage(ServiceError, status=404, title="No such page"):
    """No page with `page_key` is cached; for `unpin`: or it has no pin."""

    page_key: str


class UnknownImport(ServiceError, status=404, title="No such import"):
    """No import into `sequences` is under way: not begun, finished, cancelled or expired."""

    sequences: tuple[str, ...]


class NotFound(ServiceError, status=404, title="No such route"):
    """No such route: not attnd, or another version of it."""


class MethodNotAllowed(ServiceError, status=405, title="The route has other methods"):
    """The route takes only the methods in `allow`: another version of attnd."""

    allow: tuple[str, ...]


class RequestTimeout(ServiceError, status=408, title="The request took too long to arrive"):
    """The request did not arrive within server.receive_timeout_s."""


class SequenceExists(ServiceError, status=409, title="The sequence exists already"):
    """`sequences`: the ids that exist already."""

    sequences: tuple[str, ...]


class LengthMismatch(ServiceError, status=409, title="Offsets differ from the stored lengths"):
    """`lengths`: the true kv_len of every sequence of the request, at its layer."""

    lengths: dict[str, int]


class KeyMismatch(ServiceError, status=409, title="A page has another name already"):
    """`page` of the sequence has another name, or the name belongs to another page."""

    page: int


class WindowReturned(ServiceError, status=409, title="Pages before the window were returned"):
    """A row would see token `first` of a sequence, at the layers of `group`, whose pages before
    token `kept` were returned when its `window` had passed them."""

    sequences: tuple[str, ...]
    group: int
    window: int
    first: int
    kept: int


class SequenceChanged(ServiceError, status=409, title="The sequence changed during its export"):
    """The sequence has changed since its export's header was made, and has `generation` now.

    Begin the export again, or export a fork.
    """

    sequences: tuple[str, ...]
    generation: str


class ImportExists(ServiceError, status=409, title="The id is being imported from another export"):
    """Another export is being imported as one of `sequences`."""

    sequences: tuple[str, ...]


class PartMismatch(ServiceError, status=409, title="Another part is expected next"):
    """`part` of an import was sent; `next_part` of `num_parts` is expected."""

    part: int
    next_part: int
    num_parts: int


class LostSequence(ServiceError, status=410, title="The sequence was lost with its engine"):
    """`sequences` were lost with their engine of the cluster: create them again."""

    sequences: tuple[str, ...]


class BodyTooLarge(ServiceError, status=413, title="The body is too large"):
    """The body has `size` bytes or more; the service reads at most `limit`."""

    size: int
    limit: int


class AnswerTooLarge(ServiceError, status=413, title="The answer is too large"):
    """The answer would have `size` bytes, at most `limit` are sent: request less per call."""

    size: int
    limit: int


class UnsupportedMediaType(ServiceError, status=415, title="The media type is not supported"):
    """The media type is not one of `supported`."""

    supported: tuple[str, ...]


class InvalidRequest(ServiceError, status=422, title="The request breaks a rule"):
    """`field` has `value`, which breaks `rule`."""

    field: str
    value: Any
    rule: str


class DigestMismatch(ServiceError, status=422, title="The data is not the exported data"):
    """`of` is the header, a part or the end; `given` its digest as sent, `found` as computed."""

    of: str
    given: str
    found: str


class Overloaded(ServiceError, status=429, title="The queue is full"):
    """A queue or limit is full: retry after `retry_after_s` seconds."""


class HeadersTooLarge(ServiceError, status=431, title="The request's headers are too large"):
    """The request's headers are larger than the service reads."""


class Cancelled(ServiceError, status=499, title="The caller cancelled the operation"):
    """The caller cancelled the call or disconnected; nothing changed."""


class Internal(ServiceError, status=500, title="A bug in the service"):
    """A bug in the service; its log has the traceback under the request id."""


class NotErased(ServiceError, status=500, title="Not all of the namespace could be erased"):
    """A `clear` could not overwrite all of the namespace on the disk, which failed: its operator
    has to delete the files. Nothing of the namespace can be found any more."""


class NotSupported(ServiceError, status=501, title="The service does not do this"):
    """The service cannot do this, or it is switched off."""


class NotReady(ServiceError, status=503, title="The service is not ready"):
    """The service is starting or draining, or the device is lost."""


class DeadlineExceeded(
    ServiceError, status=504, title="The deadline passed before the request was done"
):
    """The deadline passed before the request was done; nothing changed."""


class OutOfPages(ServiceError, status=507, title="The pool is out of pages"):
    """`needed` pages, of which `available` of `total` can be had now: delete sequences and retry.

    `free` pages need no eviction. `held` are the namespace's own pages by state, and its leases. In
    a cluster `engines_with_room` have as many pages; new sequences go there.
    """

    needed: int
    free: int
    total: int
    held: dict[str, int]
    engines_with_room: tuple[str, ...]

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted, within the quota."""
        return int(self.problem.get("available", self.free))


class OutOfSequences(ServiceError, status=507, title="The pool is out of sequences"):
    """`needed` sequences, of which `free` of `total` can be made: delete some and retry."""

    needed: int
    free: int
    total: int


ERRORS: Final[dict[str, type[ServiceError]]] = {
    error.kind.code: error for error in ServiceError.__subclasses__()
}
"""The class of each code."""


def service_error(problem: Mapping[str, Any], meta: Meta) -> ServiceError:
    """The problem document as an exception: `ServiceError` itself for an unknown code."""
    return ERRORS.get(str(problem.get("code", "")), ServiceError)(problem, meta)
