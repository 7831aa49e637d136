"""Every error a caller can meet; attnd.wire.codes has status, code and title of each.

AttndError
├── MalformedBody         400 malformed_body
├── MalformedRequest      400 malformed_request
├── Unauthorized          401 unauthorized
├── Forbidden             403 forbidden               scope
├── NoSuchRoute           404 not_found
├── UnknownSequence       404 unknown_sequence        sequences
├── UnknownLease          404 unknown_lease           lease
├── UnknownPage           404 unknown_page            page_key
├── UnknownImport         404 unknown_import          sequences
├── MethodNotAllowed      405 method_not_allowed      allow
├── RequestTimeout        408 request_timeout
├── SequenceExists        409 sequence_exists         sequences
├── LengthMismatch        409 length_mismatch         lengths
├── SequenceTaken         409 sequence_taken          epochs
├── KeyMismatch           409 key_mismatch            page
├── SequenceChanged       409 sequence_changed        sequences, generation
├── ImportExists          409 import_exists           sequences
├── PartMismatch          409 part_mismatch           part, next_part, num_parts
├── LostSequence          410 lost_sequence           sequences
├── BodyTooLarge          413 body_too_large          size, limit
├── AnswerTooLarge        413 answer_too_large        size, limit
├── UnsupportedMediaType  415 unsupported_media_type  supported
├── InvalidRequest        422 invalid_request         field, value, rule
├── DigestMismatch        422 digest_mismatch         of, given, found
├── Overloaded            429 overloaded              retry_after_s
├── HeadersTooLarge       431 headers_too_large
├── Cancelled             499 cancelled
├── Internal              500 internal
├── NotSupported          501 not_supported
├── NotReady              503 not_ready
├── SequenceMoving        503 sequence_moving         sequences
├── DeadlineExceeded      504 deadline_exceeded
├── OutOfPages            507 out_of_pages            needed, free, total, available, held
└── OutOfSequences        507 out_of_sequences        needed, free, total
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
"""Characters of a value that an error shows."""


class AttndError(Exception):
    """Base of all; `extra` are the numbers that stand beside the detail."""

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.extra = extra


class MalformedBody(AttndError):
    """Not what its media type says: truncated, trailing bytes, a lying header."""


class MalformedRequest(AttndError):
    """Not HTTP, or not a frame of the road."""


class Unauthorized(AttndError):
    """No key, or none that the service knows."""


class Forbidden(AttndError):
    """The key's scopes do not allow it; `scope` is the one that would. Or the request comes in a
    foreign name, or from a foreign web page; then `scope` is empty."""


class NoSuchRoute(AttndError):
    """The path names nothing."""


MOST_SHOWN: Final = 16
"""Ids that the text of an error names."""
MOST_IDS: Final = 4096
"""Ids that an error lists beside its text."""


def some(names: Sequence[str], count: int | None = None) -> str:
    """The first of `count` names (None: of all these), and how many more there are."""
    more = (len(names) if count is None else count) - MOST_SHOWN
    shown = ", ".join(names[:MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


class UnknownSequence(AttndError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = f"unknown sequence: {some(ids)}: it was not created, or was deleted, or expired"
        told = f"{detail}: create it, or check its id"
        super().__init__(told, sequences=list(ids[:MOST_IDS]))


class UnknownLease(AttndError):
    def __init__(self, lease: str) -> None:
        detail = f"unknown lease: {lease}: it was released or ended: match the prefix for a new one"
        super().__init__(detail, lease=lease)


class UnknownPage(AttndError):
    """Not cached, or for a pin to be taken away: not pinned."""

    def __init__(self, page_key: str) -> None:
        detail = (
            f"no such page: {page_key}: it is not cached, or has no pin to take away: commit the "
            "tokens again, or match the prefix to see what is cached"
        )
        super().__init__(detail, page_key=page_key)


class UnknownImport(AttndError):
    """None was begun, or it was finished, given up, or left alone for too long."""

    def __init__(self, name: str) -> None:
        detail = f"no import of {name} is under way: begin it with the export's header"
        super().__init__(detail, sequences=[name])


class MethodNotAllowed(AttndError):
    """The path is there, the method is not; `allow` lists those that are."""

    def __init__(self, detail: str, allow: Sequence[str]) -> None:
        super().__init__(detail, allow=list(allow))


class RequestTimeout(AttndError):
    """The request did not arrive within server.receive_timeout_s."""


class SequenceExists(AttndError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = f"sequence exists already: {some(ids)}"
        told = f"{detail}: delete it first, or create under another id"
        super().__init__(told, sequences=list(ids[:MOST_IDS]))


class LengthMismatch(AttndError):
    """The caller's `offsets` differ from the lengths stored: sequence id -> true kv_len."""

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
    """A page that has a name already was given another, or a name was given to another page."""

    def __init__(self, page: int, rule: str, sequence: str | None = None) -> None:
        """`sequence` is the one of a batch that the page is of."""
        what = f"page {page}" if sequence is None else f"page {page} of {sequence}"
        detail = f"{what}: {rule}: give the name it has, or commit under another cache_salt"
        extra = {} if sequence is None else {"sequences": [sequence]}
        super().__init__(detail, page=page, **extra)


class SequenceChanged(AttndError):
    """A part was asked for of a sequence that is not what it was; `generation` is what it is now.

    It was appended to, cut, or made anew since the header was told.
    """

    def __init__(self, name: str, generation: str) -> None:
        detail = f"{name} has changed since its export began: begin again, or export a fork of it"
        super().__init__(detail, sequences=[name], generation=generation)


class ImportExists(AttndError):
    """The id is being imported from another export."""

    def __init__(self, name: str) -> None:
        detail = f"another export is being imported as {name}: finish that or delete it first"
        super().__init__(detail, sequences=[name])


class PartMismatch(AttndError):
    """A part that is missing, or comes twice or out of order; `next_part` is the one wanted."""

    def __init__(self, part: int, next_part: int, num_parts: int) -> None:
        detail = f"part {part} of {num_parts} came: part {next_part} is wanted next"
        if part >= num_parts:
            detail = f"{next_part} of {num_parts} parts are there: part {next_part} is wanted next"
        if next_part >= num_parts:
            detail = f"part {part} came: all {num_parts} parts are there, end with the last digest"
        super().__init__(detail, part=part, next_part=next_part, num_parts=num_parts)


class DigestMismatch(AttndError):
    """What has come is not what was exported; `of` is the header, a part, or an end."""

    def __init__(self, of: str, given: str, found: str) -> None:
        detail = f"the digest of {of} is {found}, not {given}: send it again, or export it again"
        super().__init__(detail, of=of, given=given, found=found)


class LostSequence(AttndError):
    """In a cluster: gone with the engine that they were on."""

    def __init__(self, ids: Sequence[str]) -> None:
        detail = f"lost with their engine: {some(ids)}: create them anew"
        super().__init__(detail, sequences=list(ids))


class BodyTooLarge(AttndError):
    """Longer than server.max_body_bytes, or server.max_json_bytes for JSON."""


class AnswerTooLarge(AttndError):
    """The answer would pass `limit` bytes; `remedy` says how to ask for less of it."""

    def __init__(self, size: int, limit: int, remedy: str) -> None:
        detail = f"the answer is {size} bytes, at most {limit} are sent: {remedy}"
        super().__init__(detail, size=size, limit=limit)


class UnsupportedMediaType(AttndError):
    """None of the media types that the route takes."""


class InvalidRequest(AttndError):
    """A field breaks a rule; `value` is what was given, shortened."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        field, value = printable(field), shorten(value)
        super().__init__(f"{field} = {value}: {rule}", field=field, value=value, rule=rule)
        self.field, self.value, self.rule = field, value, rule


def invalid_fields(model: type[BaseModel], error: ValidationError) -> InvalidRequest:
    """The first rule of `model` that a request's fields break, or the field that it has not."""
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
    name: str, value: object, owner: str, what: str, known: Sequence[str]
) -> InvalidRequest:
    """A parameter, input or output that `owner`, a route or model, has not."""
    close = hint(name.rpartition(".")[2], known, f"{what}s")
    return InvalidRequest(name, value, f"{owner} has no such {what}{close}")


def unknown_tensor(name: str, known: Sequence[str]) -> InvalidRequest:
    """A tensor that the operation does not read; `known` are those that it does."""
    rule = f"this route reads no such tensor{hint(name, known, 'tensors')}"
    return InvalidRequest(f"tensors.{name}", "given", rule)


class Overloaded(AttndError):
    """The queue is full; `retry_after_s`."""


class HeadersTooLarge(AttndError):
    """More header lines or bytes than server.max_header_count and server.max_header_bytes."""


class Internal(AttndError):
    """A bug."""


class NotSupported(AttndError):
    """Something of a protocol that this service does not do, or has switched off."""


class NotReady(AttndError):
    """Starting, draining, or the device is lost."""


class SequenceMoving(AttndError):
    """On its way from one engine of a cluster to another; nothing was done. `handed` are those of
    the sequences that this engine has handed over, and waits to be told to delete."""

    def __init__(self, ids: Sequence[str], handed: Sequence[str] = ()) -> None:
        detail = f"on the way to another engine: {', '.join(ids)}: try again"
        extra = {"handed": list(handed)} if handed else {}
        super().__init__(detail, sequences=list(ids), **extra)


class Cancelled(AttndError):
    """The caller took the operation back; it left no trace."""


class DeadlineExceeded(AttndError):
    """The deadline passed before the operation was done; it left no trace."""


class OutOfPages(AttndError):
    """`available` are the pages that the caller could get now: `free` ones and those that would be
    evicted for it, within its quota. `held`: the namespace's own pages by state, and its leases."""

    def __init__(
        self, needed: int, free: int, total: int, held: Mapping[str, int], available: int = 0
    ) -> None:
        detail = (
            f"{needed} pages needed, {available} of {total} are available: "
            "free sequences or raise pool.num_pages"
        )
        super().__init__(
            detail, needed=needed, free=free, total=total, available=available, held=dict(held)
        )


class OutOfSequences(AttndError):
    """`total` is engine.max_sequences, or the namespace's share of it where that is used up: then
    `share_retry_s` says when to try again."""

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
    """The kind of an error's nearest class; anything unknown is `internal`."""
    for cls in type(error).__mro__:
        if cls in KINDS:
            return KINDS[cls]
    return KINDS[Internal]


def problem(error: BaseException) -> dict[str, Any]:
    """An RFC 9457 problem document, with the numbers that matter beside its detail."""
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
    """A value fit for an error document: numbers and short strings as they are, the rest cut.

    Costs little however large the value is: of lists and objects only the beginning is read.
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
    """Text of a caller's, cut, with what is no Unicode escaped: it can be logged and sent."""
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 3]}..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


BRIEF: Final = Repr()
BRIEF.maxlevel = 3
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 24
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = LONGEST_VALUE
