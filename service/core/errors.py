"""Errors of the core, with the numbers a caller needs. An operation that raises changes nothing.

CoreError
├── UnknownSequence     ids
├── SequenceExists      ids
├── LengthMismatch      sequence id -> true kv_len
├── SequenceTaken       sequence id -> its epoch
├── OutOfPages          needed, free, total, available, held
├── UnknownLease        lease
├── UnknownPage         key
├── KeyMismatch         page, rule
└── InvalidRequest      field, value, rule

IntegrityError is no refusal but a bug: the core's own books disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CoreError(Exception):
    """Base of every error that a caller causes."""


class UnknownSequence(CoreError):
    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"unknown sequence: {', '.join(ids)}")
        self.ids = tuple(ids)


class SequenceExists(CoreError):
    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"sequence exists already: {', '.join(ids)}")
        self.ids = tuple(ids)


class LengthMismatch(CoreError):
    """The caller's `offsets` differ from the lengths stored."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        stored = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        super().__init__(f"offsets differ from the stored lengths: {stored}")
        self.lengths = dict(lengths)


class SequenceTaken(CoreError):
    """Shards are in another epoch than the caller's: `epochs` has the present one of each."""

    def __init__(self, epochs: Mapping[str, int]) -> None:
        super().__init__(f"another writer has taken over: {', '.join(epochs)}")
        self.epochs = dict(epochs)


class OutOfPages(CoreError):
    """Too few pages are free or evictable; `available` counts both.

    `held` has the namespace's own pages by state (`referenced` by sequences and leases, `pinned`
    by hard pins, `cached` and so evictable), and its number of `leases`.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        total: int,
        available: int = 0,
        held: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            f"{needed} pages needed, {available} of {total} are available: "
            "delete sequences or raise pool.num_pages"
        )
        self.needed, self.free, self.total = needed, free, total
        self.available, self.held = available, dict(held or {})


class UnknownLease(CoreError):
    def __init__(self, lease: str) -> None:
        super().__init__(f"unknown lease: {lease}")
        self.lease = lease


class UnknownPage(CoreError):
    """No cached or pinned page of the caller's namespace has that key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no such page: {key}")
        self.key = key


class KeyMismatch(CoreError):
    """The name given for a page contradicts an existing name of that page or of another."""

    def __init__(self, page: int, rule: str, sequence: str | None = None) -> None:
        """`sequence`: in a batch, the id of the sequence that has the page."""
        super().__init__(f"page {page}: {rule}")
        self.page, self.rule, self.sequence = page, rule, sequence


class InvalidRequest(CoreError):
    """`field` had `value`, which breaks `rule`. The value is printed shortened."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value}: {rule}")
        self.field, self.value, self.rule = field, value, rule


class IntegrityError(RuntimeError):
    """An invariant of the core is broken; the message has the numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: this is a bug")
