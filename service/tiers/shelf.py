"""The records of one tier: where each one is, and the order in which they give way to others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

PINNED: Final = 1000
"""Records of this rank or above are not evicted."""


@dataclass(slots=True, eq=False)
class Entry:
    """One record, in the places `slot` and `more`. Low ranks give way first; then the least
    recently used.

    While `holds` is above 0 a thread reads or writes the place. `is_ready`: the record can be read.
    `is_dropped`: it gives its place free as soon as it is not held. `tag` is the caller's.
    """

    key: bytes
    namespace: str
    slot: int
    rank: int
    tag: bytes = b""
    holds: int = 0
    is_ready: bool = False
    is_dropped: bool = False
    more: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot, *self.more)


@dataclass(slots=True, eq=False)
class Owner:
    """One namespace's records by rank, least recently used first; the places that they have, and
    their maximum."""

    limit: int | None = None
    count: int = 0
    ranks: dict[int, OrderedDict[bytes, Entry]] = field(default_factory=dict)

    def first(self) -> Entry | None:
        for rank in sorted(self.ranks):
            if rank >= PINNED:
                return None
            queue = self.ranks[rank]
            for _ in range(len(queue)):
                entry = next(iter(queue.values()))
                if not entry.holds:
                    return entry
                queue.move_to_end(entry.key)  # in use: of the latest ones
        return None

    def put(self, entry: Entry) -> None:
        """Add a record as the most recently used one of its rank."""
        queue = self.ranks.get(entry.rank)
        if queue is None:
            queue = self.ranks[entry.rank] = OrderedDict()
        queue[entry.key] = entry

    def take_out(self, entry: Entry) -> None:
        queue = self.ranks[entry.rank]
        del queue[entry.key]
        if not queue:
            del self.ranks[entry.rank]


class Shelf:
    """Records of all namespaces in `num_slots` places, each namespace within its limit of places.

    A namespace that has more than an equal share gives way to others first. `evicted` gets every
    record that gives way. Without `keeps`, records are there only while they are held. Not
    thread-safe.
    """

    def __init__(
        self, num_slots: int, evicted: Callable[[Entry], None], *, keeps: bool = True
    ) -> None:
        self.num_slots = num_slots
        self.keeps = keeps
        self._evicted = evicted
        self._entries: dict[bytes, Entry] = {}
        self._owners: dict[str, Owner] = {}
        self._free: list[int] = []
        self._end = 0
        """Places from here on were never used."""
        self.is_jammed = False
        """The latest record found no place because all are held."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: bytes) -> Entry | None:
        """The record of `key`, which can be read."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.is_ready else None

    def has(self, key: bytes) -> bool:
        """Whether `key` has a place, if only to be written to."""
        return key in self._entries

    def is_held(self, key: bytes) -> bool:
        """Whether a thread reads or writes the record of `key`."""
        entry = self._entries.get(key)
        return entry is not None and entry.holds > 0

    @property
    def namespaces(self) -> list[str]:
        """Namespaces with records."""
        return [name for name, owner in self._owners.items() if owner.count]

    def count(self, namespace: str) -> int:
        """Number of a namespace's records."""
        owner = self._owners.get(namespace)
        return 0 if owner is None else sum(map(len, owner.ranks.values()))

    def own(self, namespace: str) -> Iterator[Entry]:
        """The records of a namespace, first to be evicted first."""
        if (owner := self._owners.get(namespace)) is not None:
            for rank in sorted(owner.ranks):
                yield from owner.ranks[rank].values()

    def pinned(self) -> list[Entry]:
        """The records that are not evicted."""
        queues = (queue for owner in self._owners.values() for queue in owner.ranks.items())
        return [one for rank, queue in queues if rank >= PINNED for one in queue.values()]

    def set_limit(self, namespace: str, limit: int | None) -> None:
        """Limit a namespace's places; records above a new limit give way as others are added."""
        self._owner(namespace).limit = limit

    def restore(self, entries: Iterable[Entry], end: int) -> list[int]:
        """Add records that have their places, least recently used first, to an empty shelf.

        Places from `end` on were never used. Returns the free ones below.
        """
        for entry in entries:
            self._add(entry)
        self._end = end
        used = {slot for entry in self for slot in entry.slots}
        self._free = [slot for slot in range(end - 1, -1, -1) if slot not in used]
        return self._free.copy()

    def place(
        self, key: bytes, namespace: str, rank: int, tag: bytes = b"", size: int = 1
    ) -> Entry | None:
        """`size` places for a record, evicting others as needed; held, and not ready yet.

        None where the namespace's limit or held records prevent it.
        """
        slots = self._take(self._owner(namespace), size)
        if slots is None:
            return None
        entry = Entry(key, namespace, slots[0], rank, tag, holds=1, more=tuple(slots[1:]))
        self._add(entry)
        return entry

    def use(self, entry: Entry, rank: int | None = None) -> None:
        """Make a record the most recently used one of `rank` (None: of its own)."""
        owner = self._owners[entry.namespace]
        owner.take_out(entry)
        entry.rank = entry.rank if rank is None else rank
        owner.put(entry)

    def release(self, entry: Entry) -> None:
        """End a hold of a record."""
        entry.holds -= 1
        if not entry.holds and (entry.is_dropped or not self.keeps):
            self.remove(entry)

    def drop(self, entry: Entry) -> None:
        """Delete a record, if it is still there, as soon as it is not held."""
        if self._entries.get(entry.key) is entry:
            entry.is_ready, entry.is_dropped = False, True
            if not entry.holds:
                self.remove(entry)

    @property
    def num_free(self) -> int:
        """Free places."""
        return self.num_slots - self._end + len(self._free)

    def remove(self, entry: Entry) -> None:
        """Remove a record; its places are free for others, so it must not be held."""
        self.take_out(entry)
        self.free(entry.slots)

    def free(self, slots: Iterable[int]) -> None:
        """Give the places of a record that was taken out to others."""
        self._free += slots

    def take_out(self, entry: Entry) -> None:
        """Remove a record; its places are not free yet."""
        owner = self._owners[entry.namespace]
        owner.take_out(entry)
        owner.count -= 1 + len(entry.more)
        if not owner.count and owner.limit is None:
            del self._owners[entry.namespace]
        del self._entries[entry.key]

    def _owner(self, namespace: str) -> Owner:
        owner = self._owners.get(namespace)
        return self._owners.setdefault(namespace, Owner()) if owner is None else owner

    def _add(self, entry: Entry) -> None:
        owner = self._owner(entry.namespace)
        owner.put(entry)
        owner.count += 1 + len(entry.more)
        self._entries[entry.key] = entry

    def _take(self, owner: Owner, size: int) -> list[int] | None:
        self.is_jammed = False
        while owner.limit is not None and owner.count + size > owner.limit:
            if size > owner.limit or not self._evict(owner.first()):
                return None
        while self.num_free < size:
            if size > self.num_slots:
                return None
            if not self._evict(self._victim(owner)):
                self.is_jammed = True
                return None
        used = max(0, len(self._free) - size)
        slots = self._free[used:]
        del self._free[used:]
        fresh = size - len(slots)
        slots += range(self._end, self._end + fresh)
        self._end += fresh
        slots.sort()
        return slots

    def _evict(self, victim: Entry | None) -> bool:
        if victim is None:
            return False
        self.remove(victim)
        self._evicted(victim)
        return True

    def _victim(self, taker: Owner) -> Entry | None:
        """The first record of `taker` if that has more than its share, else of the largest."""
        if not self._owners:
            return None
        share = self.num_slots // len(self._owners)
        if taker.count > share and (own := taker.first()) is not None:
            return own
        largest = max(self._owners.values(), key=lambda one: one.count)
        if (entry := largest.first()) is not None:
            return entry
        every = sorted(self._owners.values(), key=lambda one: -one.count)
        return next((entry for owner in every if (entry := owner.first()) is not None), None)


def stretches_of(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Places as stretches of adjacent ones: the first of each, and their number."""
    first = count = 0
    for slot in slots:
        if count and slot == first + count:
            count += 1
        else:
            if count:
                yield first, count
            first, count = slot, 1
    if count:
        yield first, count
