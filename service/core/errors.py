"""Errors of the core, with the numbers a caller needs. An operation that raises changes nothing.

Each `CoreError` has the name and the members of the error in `service/errors.py` that its caller
gets. IntegrityError is no refusal but a bug: the core's own books disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class CoreError(Exception):
    """Base of every error that a caller causes."""

    def __str__(self) -> str:
        values = [", ".join(one) if isinstance(one, list) else one for one in vars(self).values()]
        return f"{type(self).__name__}: {': '.join(map(str, values))}"


@dataclass(eq=False)
class UnknownSequence(CoreError):
    ids: list[str]


@dataclass(eq=False)
class SequenceExists(CoreError):
    ids: list[str]


@dataclass(eq=False)
class LengthMismatch(CoreError):
    """The caller's `offsets` differ from the lengths stored: kv_len by sequence id."""

    lengths: Mapping[str, int]


@dataclass(eq=False)
class SequenceTaken(CoreError):
    """Shards are in another epoch than the caller's: `epochs` has the present one of each."""

    epochs: Mapping[str, int]


@dataclass(eq=False)
class OutOfPages(CoreError):
    """Too few pages are free or evictable; `available` counts both.

    `held` has the namespace's own pages by state (`referenced` by sequences and leases, `pinned`
    by hard pins, `cached` and so evictable), and its number of `leases`.
    """

    needed: int
    free: int
    total: int
    available: int = 0
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class UnknownLease(CoreError):
    lease: str


@dataclass(eq=False)
class UnknownPage(CoreError):
    """No cached or pinned page of the caller's namespace has that key."""

    page_key: str


@dataclass(eq=False)
class KeyMismatch(CoreError):
    """The name given for a page contradicts an existing name of that page or of another.

    `sequence`: in a batch, the id of the sequence that has the page.
    """

    page: int
    rule: str
    sequence: str | None = None


@dataclass(eq=False)
class InvalidRequest(CoreError):
    """`field` had `value`, which breaks `rule`. The value is printed shortened."""

    field: str
    value: object
    rule: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.rule}"


class IntegrityError(RuntimeError):
    """An invariant of the core is broken; the message has the numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: this is a bug")
