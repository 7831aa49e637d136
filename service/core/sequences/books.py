"""The books: every sequence's leaf, and its numbers in columns that numpy reads by batch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest, SequenceExists, UnknownSequence
from service.core.nodes import FOREVER, Leaf, Namespace
from service.core.page_table import Blocks, PageTable
from service.core.timers import Timers
from service.core.values import NewSpec, SequenceView

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Indices = NDArray[np.intp]

_FIRST_CAPACITY = 64
ENDED_AT_ONCE: Final = 1024
"""Maximum sequences examined for expiry per call."""
LEAST_UNSORTED: Final = 1024
"""Deleted ids are only removed from an unsorted list longer than this."""
NO_SERIAL: Final = -1
"""The serial of an unused column."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences of one call, looked up: `indices` are their columns, in the order of `ids`.

    `version` is the books' when they were looked up: once a sequence was added, renamed or removed
    since, a batch is looked up again.
    """

    ids: Sequence[str]
    indices: Indices
    is_distinct: bool
    version: int


Ids = Sequence[str] | Batch
"""Sequences by their ids; a batch spares their look-up."""


class Watch(NamedTuple):
    """Columns of sequences, and their serials at that time."""

    indices: Indices
    serials: Int64


class SequenceBooks:
    """One column per live sequence; freed columns are reused.

    `lengths` int32 [num_layers, capacity] is kv_len; `num_pages` int32 the size of the page table;
    `last_page` int32 the table's last page, so that a decode finds its slots without reading
    tables; `serials` int64 identifies the state of a sequence's written pages (see `renew`).
    `ttl_s` float64 is the idle time before deletion, `used` the time of the last use, `now` the
    time; `expiry` says when a sequence can have been idle for so long. Batches only
    update `used` while some sequence can expire or `is_watched` is set.
    `num_changes` increases whenever a sequence is added or removed or gets other pages; `version`
    whenever ids change.
    """

    def __init__(self, num_layers: int) -> None:
        self._index_of: dict[str, int] = {}
        self._leaves: list[Leaf] = []
        self._free: list[int] = []
        self._sorted: list[str] = []
        self._unsorted: list[str] = []
        self._is_sorted = True
        self._next_serial = 0
        self.expiry: Timers[Leaf] = Timers()
        self.blocks = Blocks()
        self.now = 0.0
        self.is_watched = False
        self.num_changes = self.version = 0
        self.lengths: Int32 = np.zeros((num_layers, _FIRST_CAPACITY), dtype=np.int32)
        self.num_pages: Int32 = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self.last_page: Int32 = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self.serials: Int64 = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.ttl_s: Float64 = np.zeros(_FIRST_CAPACITY, dtype=np.float64)
        self.used: Float64 = np.zeros(_FIRST_CAPACITY, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._index_of)

    def __contains__(self, name: str) -> bool:
        return name in self._index_of

    def __iter__(self) -> Iterator[Leaf]:
        return (self._leaves[index] for index in self._index_of.values())

    def add(self, spec: NewSpec, owner: Namespace, length: int, table: PageTable) -> Leaf:
        """Add a sequence with `length` tokens at every layer and the page table `table`, without
        spare entries.

        The leaf has no parent yet.
        """
        if not self._free:
            self._add_column()
        index = self._free.pop()
        leaf = Leaf(spec.id, index, spec.parent, owner, None, 0, table)
        self._leaves[index : index + 1] = [leaf]
        self._index_of[spec.id] = index
        owner.leaves.add(leaf)
        self.num_changes += 1
        self._ids_changed(spec.id)
        self.lengths[:, index] = length
        self.set_num_pages(leaf, table.base + table.own.size)
        self.renew(leaf)
        self.used[index] = self.now
        self.set_ttl(leaf, FOREVER if spec.ttl_s is None else spec.ttl_s)
        return leaf

    def set_ttl(self, leaf: Leaf, ttl_s: float) -> None:
        """Set the idle seconds before deletion, counted from now."""
        self.ttl_s[leaf.index] = ttl_s
        if ttl_s < FOREVER:
            self.used[leaf.index] = self.now
        self.expiry.set(leaf, self.now + ttl_s)

    def rename(self, leaf: Leaf, name: str) -> None:
        """Change a sequence's id to one that no other has."""
        self._index_of[name] = self._index_of.pop(leaf.id)
        leaf.id = name
        self._ids_changed(name)

    def remove(self, leaf: Leaf) -> None:
        """Remove a sequence, whose pages and links the caller has removed."""
        del self._index_of[leaf.id]
        leaf.owner.leaves.discard(leaf)
        self.num_changes += 1
        leaf.table = PageTable()  # the leaf stays in its column until the next one
        self._free.append(leaf.index)
        self._ids_changed()
        self.lengths[:, leaf.index] = 0
        self.num_pages[leaf.index] = 0
        self.serials[leaf.index] = NO_SERIAL
        self.expiry.cancel(leaf)

    def set_num_pages(self, leaf: Leaf, count: int) -> None:
        self.num_changes += 1
        self.num_pages[leaf.index] = count
        self.last_page[leaf.index] = leaf.table.page(count - 1) if count else 0

    def renew(self, leaf: Leaf) -> None:
        """Give a sequence a new serial, which invalidates the plans made for it."""
        self.serials[leaf.index] = self._next_serial
        self._next_serial += 1

    def look_up(self, ids: Ids) -> Batch:
        """The columns of `ids`, which count as used now.

        Raises `UnknownSequence` with every unknown id.
        """
        if isinstance(ids, Batch):
            batch = ids if ids.version == self.version else self._find(ids.ids)
        else:
            batch = self._find(ids)
        if self.is_watched or self.expiry.next_due < FOREVER:
            self.used[batch.indices] = self.now
        return batch

    def look_up_distinct(self, ids: Ids) -> Batch:
        """As `look_up`, for operations that change each sequence once.

        Raises `InvalidRequest` for a duplicate id.
        """
        batch = self.look_up(ids)
        if not batch.is_distinct:
            check_distinct(batch.ids)
        return batch

    def _find(self, ids: Sequence[str]) -> Batch:
        try:
            indices = np.fromiter(map(self._index_of.__getitem__, ids), np.intp, len(ids))
        except KeyError:
            raise UnknownSequence([name for name in ids if name not in self._index_of]) from None
        return Batch(ids, indices, len(set(ids)) == len(ids), self.version)

    def leaf(self, name: str) -> Leaf:
        """Raises `UnknownSequence`."""
        index = self._index_of.get(name)
        if index is None:
            raise UnknownSequence([name])
        self.used[index] = self.now
        return self._leaves[index]

    def holds(self, leaf: Leaf) -> bool:
        """Whether the leaf's sequence still exists."""
        return self._index_of.get(leaf.id) == leaf.index and self._leaves[leaf.index] is leaf

    def watch(self, names: Iterable[str]) -> Watch:
        """Record the state of those sequences that exist; see `changed`."""
        found = [self._index_of[name] for name in names if name in self._index_of]
        indices = np.array(found, np.intp)
        return Watch(indices, self.serials[indices])

    def changed(self, watch: Watch) -> str | None:
        """The id of a sequence that was deleted, cut or given other pages since, or None."""
        differ = np.flatnonzero(self.serials[watch.indices] != watch.serials)
        return self._leaves[watch.indices[differ[0]]].id if differ.size else None

    def leaves(self, indices: Indices) -> list[Leaf]:
        every = self._leaves
        return [every[index] for index in indices.tolist()]

    def length(self, leaf: Leaf) -> int:
        """The minimum kv_len over layers."""
        shortest: int = min(self.lengths[:, leaf.index].tolist())
        return shortest

    def view(self, leaf: Leaf, page_size: int) -> SequenceView:
        lengths = tuple(self.lengths[:, leaf.index].tolist())
        pages = int(self.num_pages[leaf.index])
        ttl_s = float(self.ttl_s[leaf.index])
        return SequenceView(
            leaf.id,
            min(lengths),
            lengths,
            pages,
            max(lengths) - max(pages - 1, 0) * page_size,
            leaf.origin,
            None if ttl_s == FOREVER else ttl_s,
            leaf.reserved_len,
        )

    def after(self, after: str | None, limit: int) -> list[Leaf]:
        """Up to `limit` leaves in order of id, those after `after`."""
        ids = self._sorted_ids()
        first = 0 if after is None else bisect_right(ids, after)
        return [self._leaves[self._index_of[name]] for name in ids[first : first + limit]]

    def with_prefix(self, prefix: str, limit: int) -> list[str]:
        """Up to `limit` ids that start with `prefix`, in order."""
        ids = self._sorted_ids()
        first = bisect_left(ids, prefix)
        return [name for name in ids[first : first + limit] if name.startswith(prefix)]

    def _ids_changed(self, added: str | None = None) -> None:
        """Invalidate the order of ids and earlier batches; an added id is sorted in on demand."""
        self._is_sorted = False
        if added is not None:
            self._unsorted.append(added)
            if len(self._unsorted) > LEAST_UNSORTED + 2 * len(self):
                self._unsorted = [name for name in set(self._unsorted) if name in self._index_of]
        self.version += 1

    def _sorted_ids(self) -> list[str]:
        """All ids in order; only ids added since the last call are sorted."""
        if not self._is_sorted:
            known = self._index_of
            ids = [name for name in self._sorted if name in known]
            ids += sorted(name for name in self._unsorted if name in known)
            ids.sort()  # merges two sorted runs
            self._sorted = ids if len(ids) == len(known) else list(dict.fromkeys(ids))
            self._unsorted.clear()
            self._is_sorted = True
        return self._sorted

    def expired(self, is_held: Callable[[str], bool], most: int = ENDED_AT_ONCE) -> list[str]:
        """Ids of sequences that were idle for their `ttl_s`, among the next `most` candidates.

        Sequences for which `is_held` is true count as used now.
        """
        ids: list[str] = []
        for leaf in self.expiry.take_due(self.now, most):
            least = self.now
            if is_held(leaf.id):
                self.used[leaf.index] = self.now
                least = math.nextafter(self.now, math.inf)  # a tiny `ttl_s` adds nothing to `now`
            ends = max(float(self.used[leaf.index] + self.ttl_s[leaf.index]), least)
            if ends <= self.now:
                ids.append(leaf.id)
            else:
                self.expiry.set(leaf, ends)
        return ids

    def _add_column(self) -> None:
        index = len(self._leaves)
        self._free.append(index)
        if index == self.num_pages.size:
            self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)), axis=1)
            self.num_pages = np.concatenate((self.num_pages, np.zeros_like(self.num_pages)))
            self.last_page = np.concatenate((self.last_page, np.zeros_like(self.last_page)))
            self.serials = np.concatenate((self.serials, np.zeros_like(self.serials)))
            self.ttl_s = np.concatenate((self.ttl_s, np.zeros_like(self.ttl_s)))
            self.used = np.concatenate((self.used, np.zeros_like(self.used)))


def check_distinct(ids: Sequence[str]) -> None:
    """Raises `InvalidRequest` for the first duplicate id."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise InvalidRequest("sequences", name, "duplicate id")
        seen.add(name)


def first_lengths(books: SequenceBooks, new: Sequence[NewSpec]) -> list[int]:
    """The first length of each of `new`; a parent can be an earlier one of `new`.

    Raises `InvalidRequest`, `SequenceExists` (all such ids), `UnknownSequence` (all such parents).
    """
    check_distinct([spec.id for spec in new])
    if existing := [spec.id for spec in new if spec.id in books]:
        raise SequenceExists(existing)
    made: dict[str, int] = {}
    from_prefix: set[str] = set()
    unknown: list[str] = []
    for spec in new:
        made[spec.id] = 0
        if spec.prefix is not None and (spec.parent is not None or spec.length is not None):
            raise InvalidRequest("prefix", "given", "cannot be combined with parent or length")
        if spec.prefix is not None:
            from_prefix.add(spec.id)
        elif spec.parent in from_prefix:
            rule = "its length is not known before it is created: fork it in a later call"
            raise InvalidRequest("parent", spec.parent, rule)
        elif spec.parent is None:
            if spec.length:
                raise InvalidRequest("length", spec.length, "must be 0 without a parent")
        elif spec.parent in books or (spec.parent in made and spec.parent != spec.id):
            known = made.get(spec.parent)
            longest = books.length(books.leaf(spec.parent)) if known is None else known
            made[spec.id] = longest if spec.length is None else spec.length
            if not 0 <= made[spec.id] <= longest:
                raise InvalidRequest("length", spec.length, f"0 to {longest}, the parent's length")
        else:
            unknown.append(spec.parent)
    if unknown:
        raise UnknownSequence(unknown)
    return list(made.values())
