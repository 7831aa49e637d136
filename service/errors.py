"""The errors that callers get; `attnd.wire.codes` has status, code and title of each, and the
docstring of `attnd.errors` their members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from reprlib import Repr
from typing import Any, Final

from attnd.wire.codes import CODES, ErrorCode, code_of
from pydantic import BaseModel, ValidationError

from config.wording import first_of, hint, place_of, rule_of

LONGEST_VALUE: Final = 200
"""Maximum characters of a value in an error."""


class AttndError(Exception):
    """Base of all errors; `extra` are the members of its document besides the detail."""

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.extra = extra


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


MOST_SHOWN: Final = 16
"""Maximum ids in the text of an error."""
MOST_IDS: Final = 4096
"""Maximum ids in the members of an error."""


def some(names: Sequence[str], count: int | None = None) -> str:
    """The first of `names`, and how many more of `count` (None: of `names`) there are."""
    more = (len(names) if count is None else count) - MOST_SHOWN
    shown = ", ".join(names[:MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


class UnknownSequence(AttndError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = (
            f"unknown sequence: {some(ids)}: it was not created, or was deleted, or expired: "
            "create it, or check its id"
        )
        super().__init__(detail, sequences=list(ids[:MOST_IDS]))


class UnknownLease(AttndError):
    def __init__(self, lease: str) -> None:
        detail = f"unknown lease: {lease}: it was released or ended: match the prefix for a new one"
        super().__init__(detail, lease=lease)


class UnknownPage(AttndError):
    """The page is not cached or, to remove a pin, not pinned."""

    def __init__(self, page_key: str) -> None:
        detail = (
            f"no such page: {page_key}: it is not cached, or has no pin to remove: commit the "
            "tokens again, or match the prefix to see its cached pages"
        )
        super().__init__(detail, page_key=page_key)


class UnknownImport(AttndError):
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


class SequenceExists(AttndError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = (
            f"sequence exists already: {some(ids)}: delete it first, or create under another id"
        )
        super().__init__(detail, sequences=list(ids[:MOST_IDS]))


class LengthMismatch(AttndError):
    """The request's `offsets` differ from the stored lengths: sequence id -> stored kv_len."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        first = islice(lengths.items(), MOST_SHOWN)
        true = some([f"{name} has {length}" for name, length in first], len(lengths))
        detail = f"offsets differ from the stored lengths: {true}"
        super().__init__(
            f"{detail}: append from these lengths on, or truncate the sequences first",
            lengths=dict(lengths),
        )


class SequenceTaken(AttndError):
    """Another door writes to a sharded sequence; `epochs` has the present epoch by sequence id.

    Nothing was done; the request can be repeated.
    """

    def __init__(self, epochs: Mapping[str, int]) -> None:
        detail = f"another writer is changing {some(list(epochs))}: try again"
        super().__init__(detail, epochs=dict(epochs))


class KeyMismatch(AttndError):
    """A page has another name already, or another page has the name."""

    def __init__(self, page: int, rule: str, sequence: str | None = None) -> None:
        """`sequence`: in a batch, the id of the sequence that has the page."""
        place = f"page {page}" if sequence is None else f"page {page} of {sequence}"
        detail = f"{place}: {rule}: use its present name, or commit under another cache_salt"
        extra = {} if sequence is None else {"sequences": [sequence]}
        super().__init__(detail, page=page, **extra)


class SequenceChanged(AttndError):
    """The sequence was appended to, truncated or recreated since its export's header was read.

    `generation` is its present one.
    """

    def __init__(self, name: str, generation: str) -> None:
        detail = f"{name} has changed since its export started: start again, or export a fork of it"
        super().__init__(detail, sequences=[name], generation=generation)


class ImportExists(AttndError):
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


class InvalidRequest(AttndError):
    """`field` had `value` (shortened), which breaks `rule`."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        field, value = printable(field), shorten(value)
        super().__init__(f"{field} = {value}: {rule}", field=field, value=value, rule=rule)
        self.field, self.value, self.rule = field, value, rule


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


class SequenceMoving(AttndError):
    """The sequences are moving from one engine of a cluster to another; nothing was changed.

    `handed`: those whose ownership this engine has transferred, and which it will delete.
    """

    def __init__(self, ids: Sequence[str], handed: Sequence[str] = ()) -> None:
        detail = f"moving to another engine: {', '.join(ids)}: try again"
        extra = {"handed": list(handed)} if handed else {}
        super().__init__(detail, sequences=list(ids), **extra)


class Cancelled(AttndError):
    """The caller cancelled the operation; it changed nothing."""


class DeadlineExceeded(AttndError):
    """The deadline passed before the operation was done; it changed nothing."""


class OutOfPages(AttndError):
    """Too few pages are free or evictable within the caller's quota; `available` counts both.

    `held`: the namespace's own pages by state, and its leases.
    """

    def __init__(
        self, needed: int, free: int, total: int, held: Mapping[str, int], available: int = 0
    ) -> None:
        detail = (
            f"{needed} pages needed, {available} of {total} are available: "
            "delete sequences or raise pool.num_pages"
        )
        super().__init__(
            detail, needed=needed, free=free, total=total, available=available, held=dict(held)
        )


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
    for error in AttndError.__subclasses__()
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


def shorten(value: object) -> object:
    """A value for an error document: numbers and short strings unchanged, others shortened.

    Of large lists and objects only the beginning is read.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):  # JSON has no others
        return value
    if isinstance(value, int) and value.bit_length() > LONGEST_VALUE:
        return f"an integer of {value.bit_length()} bits"
    return printable(value if isinstance(value, str) else BRIEF.repr(value))


def printable(text: str) -> str:
    """A caller's text, shortened and with lone surrogates escaped, to be logged and sent."""
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 3]}..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


BRIEF: Final = Repr()
BRIEF.maxlevel = 3
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 24
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = LONGEST_VALUE
