"""Every error a client can meet: one exception tree, one table from class to (status, code, title).

AttndError
├── MalformedBody         400 malformed_body
├── NoSuchRoute           404 not_found
├── MethodNotAllowed      405 method_not_allowed
├── BodyTooLarge          413 body_too_large
├── UnsupportedMediaType  415 unsupported_media_type
├── Overloaded            429 overloaded
├── NotReady              503 not_ready
├── DeadlineExceeded      504 deadline_exceeded
└── Internal              500 internal
core.errors.CoreError     404, 409, 422, 507 (see service/core/errors.py)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from service.core import errors as core

InvalidRequest = core.InvalidRequest
"""Also raised by the HTTP side, for what the request alone shows to be wrong."""


class AttndError(Exception):
    """An error outside the core; `extra` are the numbers that go beside the detail."""

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.extra = extra


class MalformedBody(AttndError):
    """Not what its media type says: truncated, trailing bytes, a lying header."""


class NoSuchRoute(AttndError):
    """The path names nothing."""


class MethodNotAllowed(AttndError):
    """The path is there, the method is not; `extra["allow"]` lists those that are."""


class BodyTooLarge(AttndError):
    """Longer than server.max_body_bytes."""


class UnsupportedMediaType(AttndError):
    """Neither of the two media types."""


class Overloaded(AttndError):
    """The queue is full; `extra["retry_after_s"]`."""


class NotReady(AttndError):
    """Starting, draining, or the device is lost."""


class DeadlineExceeded(AttndError):
    """The deadline passed before the operation ran; it did not run."""


class Internal(AttndError):
    """A bug."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one class of error looks from outside."""

    status: int
    code: str
    title: str


KINDS: Final[dict[type[Exception], Kind]] = {
    MalformedBody: Kind(400, "malformed_body", "The body cannot be read"),
    NoSuchRoute: Kind(404, "not_found", "No such route"),
    MethodNotAllowed: Kind(405, "method_not_allowed", "The route has other methods"),
    core.UnknownSequence: Kind(404, "unknown_sequence", "No such sequence"),
    core.SequenceExists: Kind(409, "sequence_exists", "The sequence exists already"),
    core.LengthMismatch: Kind(409, "length_mismatch", "Offsets differ from the stored lengths"),
    BodyTooLarge: Kind(413, "body_too_large", "The body is too large"),
    UnsupportedMediaType: Kind(415, "unsupported_media_type", "The media type is not supported"),
    core.InvalidRequest: Kind(422, "invalid_request", "The request breaks a rule"),
    Overloaded: Kind(429, "overloaded", "The queue is full"),
    NotReady: Kind(503, "not_ready", "The service is not ready"),
    DeadlineExceeded: Kind(504, "deadline_exceeded", "The deadline passed before the request ran"),
    core.OutOfPages: Kind(507, "out_of_pages", "The pool is out of pages"),
    Internal: Kind(500, "internal", "A bug in the service"),
}


def kind_of(error: BaseException) -> Kind:
    """The kind of an error's nearest class; anything unknown is `internal`."""
    for cls in type(error).__mro__:
        if cls in KINDS:
            return KINDS[cls]
    return KINDS[Internal]


def problem(error: BaseException) -> dict[str, Any]:
    """An RFC 9457 problem document, with the numbers that matter beside its detail."""
    kind = kind_of(error)
    known = isinstance(error, (AttndError, core.CoreError))
    document: dict[str, Any] = {
        "type": f"urn:attnd:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": str(error) if known else "the service failed; its log has the traceback",
        "code": kind.code,
    }
    return document | numbers(error)


def numbers(error: BaseException) -> dict[str, Any]:
    """The fields beside `detail` that a program would act on."""
    match error:
        case core.UnknownSequence() | core.SequenceExists():
            return {"sequences": list(error.ids)}
        case core.LengthMismatch():
            return {"lengths": error.lengths}
        case core.OutOfPages():
            return {"needed": error.needed, "free": error.free, "total": error.total}
        case core.InvalidRequest():
            return {"field": error.field, "value": shorten(error.value), "rule": error.rule}
        case AttndError():
            return error.extra
        case _:
            return {}


def shorten(value: object) -> object:
    """A value fit for an error document: numbers and short strings as they are, the rest cut."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):  # JSON has no others
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
