"""The parts of a load: limits, records that were found, and the names of loaded pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np

from kernels.backend import Done
from service.core.keys import Prefix, as_keys
from service.core.nodes import DEFAULT_PRIORITY, Retention
from service.core.prefix.commits import DEFAULT
from service.core.values import Int32
from service.engine.tiers.page_records import TAG, names_in
from service.engine.work.work import NO_COST, WAIT, Slice
from service.operations.schema.page_names import Tier
from service.tiers.shelf import PINNED, Entry

ALL_TIERS: Final[frozenset[Tier]] = frozenset(("pool", "host", "disk"))
Origin = Counter[Tier]
"""Pages of a prefix by the tier that has them, or had them before they were loaded."""
Steps = Generator[Slice, Any, Origin]
Miss = Literal["corrupt", "evicted", "unreadable"]


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The tiers that may be used, the most pages to load, and when to stop (monotonic)."""

    tiers: frozenset[Tier]
    max_pages: int | None
    ends: float


UNLIMITED: Final = LoadLimits(ALL_TIERS, None, math.inf)


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a page
class Record:
    """A page that a lower tier has."""

    id: bytes
    key: bytes
    entry: Entry
    tier: Literal["host", "disk"]

    @property
    def keep(self) -> tuple[int, bool]:
        """Its priority, as it was when the page left the pool, and whether it has token ids."""
        *_, priority, with_ids = TAG.unpack_from(self.entry.tag)
        is_known = self.tier == "disk" and 0 < self.entry.rank < PINNED
        return (self.entry.rank if is_known else priority), with_ids


@dataclass(slots=True, eq=False)
class Found:
    """Pages of a prefix: `num_cached` in the pool, and `records` of the next ones.

    `loading`: the identity of the page after them, if it is being loaded for another operation.
    `missing`: that of a page that no tier has.
    """

    num_cached: int = 0
    records: list[Record] = field(default_factory=list)
    loading: bytes | None = None
    missing: bytes | None = None


@dataclass(slots=True, eq=False)
class Load:
    """The load of one run of records to `pages` of the hidden sequence `name`, which follow the
    `num_cached` that the pool had."""

    name: str
    namespace: str
    cache_salt: str
    num_cached: int
    records: list[Record] = field(default_factory=list)
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """Of the first records; the others have none yet."""
    after: object = None
    """A mark: the pages can be written to when all before it is done."""
    asked: int = 0
    """Records handed to the loader, ..."""
    in_flight: int = 0
    """... in batches that are not back."""
    labels: list[bytes] = field(default_factory=list)
    """Labels of the pages that are loaded, in order, ..."""
    committed: int = 0
    """... and the number of those that are committed."""
    is_over: bool = False
    """Records that are not loaded yet are passed over: one is invalid, or no operation waits."""
    is_abandoned: bool = False
    """It ends with its last batch, which is under way."""


def runs_of(load: Load, stop: int, page_size: int) -> Iterator[tuple[Prefix, Retention]]:
    """The names of its first `stop` pages that are not committed, as commits of equal priority."""
    loaded = slice(load.committed, stop)
    many = zip(load.records[loaded], load.labels[loaded], strict=True)
    first = load.num_cached + load.committed
    for (priority, with_ids), run in groupby(many, key=lambda one: one[0].keep):
        pages = list(run)
        keys = b"".join([record.key for record, _ in pages])
        if with_ids:
            every = [names_in(label, page_size) for _, label in pages]
            ids = np.frombuffer(b"".join([ids for ids, _ in every]), np.uint32)
            extra = {at: one for at, (_, one) in enumerate(every, first) if one} or None
            names = Prefix(ids, None, load.cache_salt, first, keys, first, extra)
        else:
            names = Prefix(None, as_keys(keys), load.cache_salt, first)
        first += len(pages)
        yield names, DEFAULT if priority == DEFAULT_PRIORITY else Retention(priority)


def waiting() -> Slice:
    """A slice without work, while other threads work."""
    return Slice(lambda: Done(None), WAIT, NO_COST)
