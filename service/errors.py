"""The errors that callers get, those of `service/core/errors.py` among them. `attnd.wire.codes` has
status, code and title of each, and the docstring of `attnd.errors` their members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attnd.wire.codes import CODES, ErrorCode, code_of
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


class MalformedBody(AttndError):
    """The body is not valid for its media type: truncated, trailing bytes, a wrong header."""


class MalformedRequest(AttndError):
    """The bytes received are not HTTP, or not a frame of the road."""


class Unauthorized(AttndError):
    """The request has no key, or an unknown one."""


class Forbidden(AttndError):
    """The key lacks `scope`. If `scope` is empty: the request has another `Host`, or comes from
    another web page."""


class NoSuchRoute(AttndError):
    """No route has this path."""


class UnknownImport(CoreError):
    """No import of this id is in progress: not started, finished, cancelled or expired."""

    def __init__(self, name: str) -> None:
        detail = f"no import of {name} is in progress: start it with the export's header"
        super().__init__(detail, sequences=[name])


class MethodNotAllowed(AttndError):
    """The path has no such method; `allow` lists its methods."""

    def __init__(self, detail: str, allow: Sequence[str]) -> None:
        super().__init__(detail, allow=list(allow))


class RequestTimeout(AttndError):
    """The request did not arrive within server.receive_timeout_s."""


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


class BodyTooLarge(AttndError):
    """The body exceeds server.max_body_bytes, or server.max_json_bytes for JSON."""


class AnswerTooLarge(AttndError):
    """The reply would exceed `limit` bytes; `remedy` says how to request less."""

    def __init__(self, size: int, limit: int, remedy: str) -> None:
        detail = f"the reply would have {size} bytes, the limit is {limit}: {remedy}"
        super().__init__(detail, size=size, limit=limit)


class UnsupportedMediaType(AttndError):
    """The route accepts none of the request's media types."""


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
    return InvalidRequest(field, found["input"], rule_of(found))


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


class Overloaded(AttndError):
    """A queue or limit is full; retry after `retry_after_s` seconds."""


class HeadersTooLarge(AttndError):
    """The headers exceed server.max_header_count or server.max_header_bytes."""


class Internal(AttndError):
    """A bug in the service."""


class NotErased(AttndError):
    """A disk failed before all of a cleared namespace was overwritten; nothing of it is found."""


class NotSupported(AttndError):
    """A feature of a protocol that this service does not support, or has disabled."""


class NotReady(AttndError):
    """The service is starting or draining, or the device is lost."""


class Cancelled(AttndError):
    """The caller cancelled the operation; it changed nothing."""


class DeadlineExceeded(AttndError):
    """The deadline passed before the operation was done; it changed nothing."""


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


KINDS: Final[dict[type[AttndError], ErrorCode]] = {
    error: CODES["not_found" if error is NoSuchRoute else code_of(error.__name__)]
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
