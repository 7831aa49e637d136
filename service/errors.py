"""The errors that callers get, those of `service/core/errors.py` among them.

`attnd.wire.errors` has the meaning of each, its status, code and title, and its members' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from attnd.wire.errors import ERRORS, ErrorCode
from pydantic import BaseModel, ValidationError

from config.wording import first_of, hint, place_of, rule_of
from service.core.errors import AttndError as AttndError
from service.core.errors import CoreError, some
from service.core.errors import InvalidRequest as InvalidRequest
from service.core.errors import KeyMismatch as KeyMismatch
from service.core.errors import LengthMismatch as LengthMismatch
from service.core.errors import OutOfPages as OutOfPages
from service.core.errors import SequenceExists as SequenceExists
from service.core.errors import UnknownLease as UnknownLease
from service.core.errors import UnknownPage as UnknownPage
from service.core.errors import UnknownSequence as UnknownSequence
from service.core.errors import WindowReturned as WindowReturned

E = TypeVar("E", bound=Exception)


def without_frames(error: E) -> E:
    """The error without the frames that raised it and its causes: they refer to the call that keeps
    the error, and only a garbage collection would free both."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class MalformedBody(AttndError): ...


class MalformedRequest(AttndError): ...


class Unauthorized(AttndError): ...


class Forbidden(AttndError): ...


class NoSuchRoute(AttndError): ...


class UnknownImport(CoreError):
    """No import of this id is in progress: not started, finished, cancelled or expired."""

    def __init__(self, name: str) -> None:
        detail = f"no import of {name} is in progress: start it with the export's header"
        super().__init__(detail, sequences=[name])


class MethodNotAllowed(AttndError):
    """The path has no such method; `allow` lists its methods."""

    def __init__(self, detail: str, allow: Sequence[str]) -> None:
        super().__init__(detail, allow=list(allow))


class RequestTimeout(AttndError): ...


class SequenceChanged(CoreError):
    """The sequence was appended to, truncated or recreated since its export's header was read.

    `generation` is its present one.
    """

    def __init__(self, name: str, generation: str) -> None:
        detail = f"{name} has changed since its export started: start again, or export a fork of it"
        super().__init__(detail, sequences=[name], generation=generation)


class ImportExists(CoreError):
    """The id is being imported from another export."""

    def __init__(self, name: str) -> None:
        detail = f"another export is being imported as {name}: finish that or delete it first"
        super().__init__(detail, sequences=[name])


class PartMismatch(AttndError):
    """A part is missing, duplicate or out of order; `next_part` is the expected one."""

    def __init__(self, part: int, next_part: int, num_parts: int) -> None:
        detail = f"received part {part} of {num_parts}, expected part {next_part}"
        if part >= num_parts:
            detail = f"received {next_part} of {num_parts} parts, expected part {next_part}"
        if next_part >= num_parts:
            detail = f"received part {part} after all {num_parts} parts: end with the last digest"
        super().__init__(detail, part=part, next_part=next_part, num_parts=num_parts)


class DigestMismatch(AttndError):
    """The data received differs from the export; `of` is the header, a part, or the end."""

    def __init__(self, of: str, given: str, found: str) -> None:
        detail = f"the digest of {of} is {found}, not {given}: send it again, or export it again"
        super().__init__(detail, of=of, given=given, found=found)


class LostSequence(AttndError):
    """In a cluster: the engine that had the sequences ended."""

    def __init__(self, ids: Sequence[str]) -> None:
        detail = f"lost with their engine: {some(ids)}: create them again"
        super().__init__(detail, sequences=list(ids))


class BodyTooLarge(AttndError): ...


class AnswerTooLarge(AttndError):
    """The reply would exceed `limit` bytes; `remedy` says how to request less."""

    def __init__(self, size: int, limit: int, remedy: str) -> None:
        detail = f"the reply would have {size} bytes, the limit is {limit}: {remedy}"
        super().__init__(detail, size=size, limit=limit)


class UnsupportedMediaType(AttndError): ...


SPLITTABLE: Final = frozenset({"sequences", "ids"})
"""Lists of a request that further calls can have the rest of."""


def invalid_fields(model: type[BaseModel], error: ValidationError) -> InvalidRequest:
    """The error for the first rule of `model` that a request's fields break."""
    found = first_of(error.errors(include_url=False))
    place, owner = place_of(model, found["loc"])
    field = place or "fields"
    if found["type"] == "missing":
        return InvalidRequest(field, None, "must be given")
    if found["type"] == "extra_forbidden":
        names = () if owner is None else tuple(owner.model_fields)
        close = hint(field.rpartition(".")[2], names, "fields")
        return InvalidRequest(field, found["input"], f"this route has no such field{close}")
    rule = rule_of(found)
    if found["type"] == "too_long" and field in SPLITTABLE:
        return InvalidRequest(field, f"{len(found['input'])} items", f"{rule}: send more calls")
    return InvalidRequest(field, found["input"], rule)


def unknown_name(
    name: str, value: object, owner: str, kind: str, known: Sequence[str]
) -> InvalidRequest:
    """The error for a parameter, input or output that `owner`, a route or model, does not have."""
    close = hint(name.rpartition(".")[2], known, f"{kind}s")
    return InvalidRequest(name, value, f"{owner} has no such {kind}{close}")


def unknown_tensor(name: str, known: Sequence[str]) -> InvalidRequest:
    """The error for a tensor that is not among the operation's `known` ones."""
    rule = f"this route reads no such tensor{hint(name, known, 'tensors')}"
    return InvalidRequest(f"tensors.{name}", "given", rule)


class Overloaded(AttndError): ...


class HeadersTooLarge(AttndError): ...


class Internal(AttndError): ...


class NotErased(AttndError): ...


class NotSupported(AttndError): ...


class NotReady(AttndError): ...


class Cancelled(AttndError): ...


class DeadlineExceeded(AttndError): ...


class OutOfSequences(AttndError):
    """The engine, or the namespace's share of it, has its maximum number of sequences.

    `total` is engine.max_sequences, or the share; then `share_retry_s` is the time to retry after.
    """

    def __init__(
        self, needed: int, free: int, total: int, *, share_retry_s: float | None = None
    ) -> None:
        numbers: dict[str, Any] = {"needed": needed, "free": free, "total": total}
        if share_retry_s is None:
            whose, setting = "are free", "engine.max_sequences"
        else:
            whose, setting = "are free for this namespace", "engine.namespace_share"
            numbers["retry_after_s"] = share_retry_s
        detail = f"{needed} sequences needed, {free} of {total} {whose}: "
        super().__init__(f"{detail}delete sequences or raise {setting}", **numbers)


BY_NAME: Final = {error.__name__: error.kind for error in ERRORS.values()}
KINDS: Final[dict[type[AttndError], ErrorCode]] = {
    error: BY_NAME["NotFound" if error is NoSuchRoute else error.__name__]
    for error in (*AttndError.__subclasses__(), *CoreError.__subclasses__())
    if error is not CoreError
}
"""Status, code and title by class."""


def kind_of(error: BaseException) -> ErrorCode:
    """The code of an error's nearest class; `internal` for any other error."""
    for cls in type(error).__mro__:
        if cls in KINDS:
            return KINDS[cls]
    return KINDS[Internal]


def problem(error: BaseException) -> dict[str, Any]:
    """An RFC 9457 problem document, with the error's numbers as further members."""
    kind = kind_of(error)
    document: dict[str, Any] = {
        "type": f"urn:attnd:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": "the service failed; its log has the traceback",
        "code": kind.code,
    }
    if isinstance(error, AttndError):
        document |= {"detail": str(error), **error.extra}
    return document
