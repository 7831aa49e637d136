"""The books: every sequence's leaf, and its numbers in columns that numpy reads batch-wise."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest, UnknownSequence
from service.core.pool.namespaces import Namespace
from service.core.prefix.nodes import FOREVER, Leaf
from service.core.timers import Timers
from service.core.values import NewSpec

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Indices = NDArray[np.intp]

_FIRST_CAPACITY = 64
ENDED_AT_ONCE: Final = 1024
"""Sequences that are looked at in one round of those whose time may be over."""
LEAST_UNSORTED: Final = 1024
"""Names to be sorted in are not cleaned up among fewer."""
GONE: Final = -1
"""The serial of a column without a sequence."""


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
    """Columns of sequences, and the serials that they had."""

    indices: Indices
    serials: Int64


class SequenceBooks:
    """One column per live sequence; a freed column is used again.

    `lengths` int32 [num_layers, capacity] is kv_len; `num_pages` int32 the size of the page table;
    `last_page` int32 the table's last page, so that a decode step finds where to write without
    touching tables; `serials` int64 names the state of a sequence's written pages (see `renew`).
    `ttl_s` float64 is how long a sequence lives unused, `used` when it was used last, and `now` the
    time. Batches are used only while some sequence has an end, or somebody watches (`is_watched`).
    `num_changes` grows whenever a sequence comes, goes, or gets other pages.
    """

    __slots__ = (
        "_free",
        "_index_of",
        "_is_sorted",
        "_leaves",
        "_mortal",
        "_next_serial",
        "_sorted",
        "_unsorted",
        "is_watched",
        "last_page",
        "lengths",
        "now",
        "num_changes",
        "num_pages",
        "serials",
        "ttl_s",
        "used",
        "version",
    )

    def __init__(self, num_layers: int) -> None:
        self._index_of: dict[str, int] = {}
        self._leaves: list[Leaf] = []
        self._free: list[int] = []
        self._sorted: list[str] = []
        self._unsorted: list[str] = []
        self._is_sorted = True
        self._next_serial = 0
        self._mortal: Timers[Leaf] = Timers()
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

    def add(self, spec: NewSpec, owner: Namespace, length: int, table: Int32) -> Leaf:
        """A new sequence, `length` tokens at every layer, with all of `table` as its page table.

        Its leaf hangs nowhere yet.
        """
        if not self._free:
            self._add_column()
        index = self._free.pop()
        leaf = Leaf(spec.id, index, spec.parent, owner, None, 0, table, spec.shard)
        self._leaves[index : index + 1] = [leaf]
        self._index_of[spec.id] = index
        owner.leaves.add(leaf)
        self.num_changes += 1
        self._names_changed(spec.id)
        self.lengths[:, index] = length
        self.set_num_pages(leaf, table.size)
        self.renew(leaf)
        self.used[index] = self.now
        self.set_ttl(leaf, FOREVER if spec.ttl_s is None else spec.ttl_s)
        return leaf

    def set_ttl(self, leaf: Leaf, ttl_s: float) -> None:
        """How long a sequence lives unused, from now on."""
        self.ttl_s[leaf.index] = ttl_s
        if ttl_s < FOREVER:
            self.used[leaf.index] = self.now
        self._mortal.set(leaf, self.now + ttl_s)

    def rename(self, leaf: Leaf, name: str) -> None:
        """Call a sequence by a name that no other has."""
        self._index_of[name] = self._index_of.pop(leaf.id)
        leaf.id = name
        self._names_changed(name)

    def remove(self, leaf: Leaf) -> None:
        """Forget a sequence; its pages and links are the caller's."""
        del self._index_of[leaf.id]
        leaf.owner.leaves.discard(leaf)
        self.num_changes += 1
        leaf.table = leaf.table[:0].copy()  # the leaf stays in its column until another comes
        self._free.append(leaf.index)
        self._names_changed()
        self.lengths[:, leaf.index] = 0
        self.num_pages[leaf.index] = 0
        self.serials[leaf.index] = GONE
        self._mortal.cancel(leaf)

    def set_num_pages(self, leaf: Leaf, count: int) -> None:
        self.num_changes += 1
        self.num_pages[leaf.index] = count
        self.last_page[leaf.index] = leaf.table[count - 1] if count else 0

    def renew(self, leaf: Leaf) -> None:
        """A serial never used before: what was planned for the sequence holds no more."""
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
        if self.is_watched or self._mortal.next_due < FOREVER:
            self.used[batch.indices] = self.now
        return batch

    def look_up_distinct(self, ids: Ids) -> Batch:
        """As `look_up`, for operations that change each sequence once.

        Raises `InvalidRequest` for a duplicate id.
        """
        batch = self.look_up(ids)
        if not batch.is_distinct:
            refuse_twice(batch.ids)
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
            raise UnknownSequence((name,))
        self.used[index] = self.now
        return self._leaves[index]

    def holds(self, leaf: Leaf) -> bool:
        """Whether the leaf's sequence is still the one that was made with it."""
        return self._index_of.get(leaf.id) == leaf.index and self._leaves[leaf.index] is leaf

    def watch(self, names: Iterable[str]) -> Watch:
        """What those of the sequences that there are look like now; see `changed`."""
        found = [self._index_of[name] for name in names if name in self._index_of]
        indices = np.array(found, np.intp)
        return Watch(indices, self.serials[indices])

    def changed(self, watch: Watch) -> str | None:
        """The id of a sequence that was deleted, cut, or given other pages since, if one was."""
        differ = np.flatnonzero(self.serials[watch.indices] != watch.serials)
        return self._leaves[watch.indices[differ[0]]].id if differ.size else None

    def leaves(self, indices: Indices) -> list[Leaf]:
        """The leaf of each column."""
        every = self._leaves
        return [every[index] for index in indices.tolist()]

    def length(self, leaf: Leaf) -> int:
        """The least kv_len over layers."""
        least: int = min(self.lengths[:, leaf.index].tolist())
        return least

    def after(self, after: str | None, limit: int) -> list[Leaf]:
        """Up to `limit` leaves in order of id, those after `after`."""
        names = self._names()
        first = 0 if after is None else bisect_right(names, after)
        return [self._leaves[self._index_of[name]] for name in names[first : first + limit]]

    def beginning_with(self, prefix: str, limit: int) -> list[str]:
        """Up to `limit` ids that begin with `prefix`, in order."""
        names = self._names()
        first = bisect_left(names, prefix)
        found = names[first : first + limit]
        return [name for name in found if name.startswith(prefix)]

    def _names_changed(self, come: str | None = None) -> None:
        """What was worked out from the names holds no more; a name that has `come` is sorted in
        when somebody asks."""
        self._is_sorted = False
        if come is not None:
            self._unsorted.append(come)
            if len(self._unsorted) > LEAST_UNSORTED + 2 * len(self):
                self._unsorted = [name for name in set(self._unsorted) if name in self._index_of]
        self.version += 1

    def _names(self) -> list[str]:
        """All names in order. What is in order already is not sorted again."""
        if not self._is_sorted:
            known = self._index_of
            names = [name for name in self._sorted if name in known]
            names += sorted(name for name in self._unsorted if name in known)
            names.sort()  # two runs that are merged
            self._sorted = names if len(names) == len(known) else list(dict.fromkeys(names))
            self._unsorted.clear()
            self._is_sorted = True
        return self._sorted

    def outlived(self, is_held: Callable[[str], bool], most: int = ENDED_AT_ONCE) -> list[str]:
        """Ids of sequences that nobody has used for as long as they may live unused, some of them.

        Those that `is_held` says are in use have been used just now.
        """
        over: list[str] = []
        for leaf in self._mortal.take_due(self.now, most):
            if is_held(leaf.id):
                self.used[leaf.index] = self.now
            ends = float(self.used[leaf.index] + self.ttl_s[leaf.index])
            if ends <= self.now:
                over.append(leaf.id)
            else:
                self._mortal.set(leaf, ends)
        return over

    @property
    def next_end(self) -> float:
        """When to ask next who has outlived its time."""
        return self._mortal.next_due

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


def refuse_twice(ids: Sequence[str]) -> None:
    """Raises `InvalidRequest` for the first id that comes twice, if one does."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise InvalidRequest("sequences", name, "an id may come once in a request")
        seen.add(name)
