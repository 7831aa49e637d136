"""Errors of callers that the core knows, and the base of all others. An operation that raises
changes nothing.

`service/errors.py` has the others. `IntegrityError` is no refusal but a bug: the core's own books
disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from reprlib import Repr
from typing import Any, Final

LONGEST_VALUE: Final = 200
"""Maximum characters of a value in an error."""
MOST_SHOWN: Final = 16
"""Maximum ids in the text of an error."""
MOST_IDS: Final = 4096
"""Maximum ids in the members of an error."""
BRIEF: Final = Repr()
BRIEF.maxlevel = 3
BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxdict = 24
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = LONGEST_VALUE


class AttndError(Exception):
    """Base of all errors; `extra` are the members of its document besides the detail."""

    def __init__(self, detail: str, **extra: Any) -> None:
        self.detail, self.extra = detail, extra  # `args` keeps the arguments of the subclass

    def __str__(self) -> str:
        return self.detail


class CoreError(AttndError):
    """Base of errors whose arguments, all by position, name sequences as the tree does. They are
    made again for their callers, with the callers' own names."""


def some(names: Sequence[str], count: int | None = None) -> str:
    """The first of `names`, and how many more of `count` (None: of `names`) there are."""
    more = (len(names) if count is None else count) - MOST_SHOWN
    shown = ", ".join(names[:MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


class UnknownSequence(CoreError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = (
            f"unknown sequence: {some(ids)}: it was not created, or was deleted, or expired: "
            "create it, or check its id"
        )
        super().__init__(detail, sequences=list(ids[:MOST_IDS]))


class SequenceExists(CoreError):
    def __init__(self, ids: Sequence[str]) -> None:
        detail = (
            f"sequence exists already: {some(ids)}: delete it first, or create under another id"
        )
        super().__init__(detail, sequences=list(ids[:MOST_IDS]))


class LengthMismatch(CoreError):
    """The request's `offsets` differ from the stored lengths: sequence id -> stored kv_len."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        first = islice(lengths.items(), MOST_SHOWN)
        true = some([f"{name} has {length}" for name, length in first], len(lengths))
        detail = f"offsets differ from the stored lengths: {true}"
        super().__init__(
            f"{detail}: append from these lengths on, or truncate the sequences first",
            lengths=dict(lengths),
        )


class OutOfPages(CoreError):
    """Too few pages are free or evictable within the caller's quota; `available` counts both.

    `held`: the namespace's own pages by state, and its leases.
    """

    def __init__(
        self, needed: int, free: int, total: int, held: Mapping[str, int], available: int = 0
    ) -> None:
        remedy = "delete sequences or raise pool.num_pages"
        if needed > total:
            remedy = "more than there are: raise pool.num_pages, or the namespace's max_pages"
        detail = f"{needed} pages needed, {available} of {total} are available: {remedy}"
        super().__init__(
            detail, needed=needed, free=free, total=total, available=available, held=dict(held)
        )


class UnknownLease(CoreError):
    def __init__(self, lease: str) -> None:
        detail = f"unknown lease: {lease}: it was released or ended: match the prefix for a new one"
        super().__init__(detail, lease=lease)


class UnknownPage(CoreError):
    """The page is not cached or, to remove a pin, not pinned."""

    def __init__(self, page_key: str) -> None:
        detail = (
            f"no such page: {page_key}: it is not cached, or has no pin to remove: commit the "
            "tokens again, or match the prefix to see its cached pages"
        )
        super().__init__(detail, page_key=page_key)


class KeyMismatch(CoreError):
    """A page has another name already, or another page has the name."""

    def __init__(self, page: int, rule: str, sequence: str | None = None) -> None:
        """`sequence`: in a batch, the id of the sequence that has the page."""
        place = f"page {page}" if sequence is None else f"page {page} of {sequence}"
        detail = f"{place}: {rule}: use its present name, or commit under another cache_salt"
        extra = {} if sequence is None else {"sequences": [sequence]}
        super().__init__(detail, page=page, **extra)


class WindowReturned(CoreError):
    """Pages of a layer group with a window were returned, since no later row could see them: those
    of the token `first` are needed, and those from `kept` on are left."""

    def __init__(self, sequence: str, group: int, window: int, first: int, kept: int) -> None:
        detail = (
            f"{sequence}: layer group {group} has returned its pages before token {kept}, which "
            f"its window of {window} had passed, and token {first} is needed: truncate or fork "
            f"at {kept + window - 1} tokens or more, or raise pool.window_slack"
        )
        numbers = {"group": group, "window": window, "first": first, "kept": kept}
        super().__init__(detail, sequences=[sequence], **numbers)


class InvalidRequest(CoreError):
    """`field` had `value` (shortened), which breaks `rule`."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        field, value = printable(field), shorten(value)
        super().__init__(f"{field} = {value}: {rule}", field=field, value=value, rule=rule)
        self.field, self.value, self.rule = field, value, rule


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


class IntegrityError(RuntimeError):
    """An invariant of the core is broken; the message has the numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: this is a bug")
