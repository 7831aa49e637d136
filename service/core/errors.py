"""What the core refuses, with the numbers a caller needs; a refusal changes nothing.

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
    """Base of every refusal."""


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
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        super().__init__(f"offsets differ from the stored lengths: {told}")
        self.lengths = dict(lengths)


class SequenceTaken(CoreError):
    """A shard is in another epoch than the caller's: `epochs` by sequence id."""

    def __init__(self, epochs: Mapping[str, int]) -> None:
        super().__init__(f"another writer has taken over: {', '.join(epochs)}")
        self.epochs = dict(epochs)


class OutOfPages(CoreError):
    """Too few pages are free, and too few can be evicted: `available` are both together.

    `held` has the namespace's own pages by state (`referenced` ones are held by sequences and
    leases, `pinned` ones by hard pins, `cached` ones can be evicted), and its `leases`.
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
            "free sequences or raise pool.num_pages"
        )
        self.needed, self.free, self.total = needed, free, total
        self.available, self.held = available, dict(held or {})


class UnknownLease(CoreError):
    def __init__(self, lease: str) -> None:
        super().__init__(f"unknown lease: {lease}")
        self.lease = lease


class UnknownPage(CoreError):
    """No page of that key is cached, or pinned, where the caller can see it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no such page: {key}")
        self.key = key


class KeyMismatch(CoreError):
    """The name given for a page contradicts the one that it, or another page, has already."""

    def __init__(self, page: int, rule: str, sequence: str | None = None) -> None:
        """`sequence` is the one of a batch that the page is of."""
        super().__init__(f"page {page}: {rule}")
        self.page, self.rule, self.sequence = page, rule, sequence


class InvalidRequest(CoreError):
    """A field breaks a rule; `value` is what was given (shortened by whoever prints it)."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value}: {rule}")
        self.field, self.value, self.rule = field, value, rule


class IntegrityError(RuntimeError):
    """An invariant of the core is broken; the message has the numbers."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: this is a bug")
