"""The pool of records, as the engine's thread sees it: what is where, and what gives way.

A record's id is its namespace, stamp and key; its tag in the index has its size and digest. Records
get to the disk through host memory. Threads move their bytes (`moves.py`), one writes files.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, Literal

import numpy as np

from service.engine.records.leases import RecordLeases
from service.engine.records.moves import (
    EXTENT,
    Bytes,
    Move,
    MoveBatch,
    Mover,
    blank,
    load,
    of_disk,
    of_host,
    store,
)
from service.engine.store.ledger import Ledger
from service.engine.tiers.disk import Disk
from service.engine.tiers.reports import Misses, Reports, TierName, Way
from service.metrics import Metrics
from service.tiers.records import HEADER, MAX_NAMESPACE, STAMP_BYTES, NewRecord, RecordLayout
from service.tiers.shelf import PINNED, Entry, Shelf, stretches_of

RANK: Final = 1
"""Of all records that no job holds: the least recently used ones give way."""
TAG: Final = struct.Struct("<Q16s")
"""Size and digest."""
HEAD_BYTES: Final = -(-(HEADER.size + MAX_NAMESPACE) // 64) * 64
LAYOUT: Final = RecordLayout(0, EXTENT - HEAD_BYTES, b"attnd records 01", spans=True)
WRITTEN_AT_ONCE: Final = 256
"""Places that one write to the disk takes."""
COPIERS: Final = 2
READERS: Final = 4
Reason = Literal["never_stored", "evicted", "other_stamp"]


def record_id(namespace: str, stamp: bytes, key: bytes) -> bytes:
    """Names cannot have the zero byte."""
    return b"%b\0%b%b" % (namespace.encode(), stamp, key)


def key_of(one: bytes) -> tuple[bytes, bytes]:
    """Key and stamp of a record's id."""
    at = one.index(0) + 1
    return one[at + STAMP_BYTES :], one[at : at + STAMP_BYTES]


def stamp_digest(stamp: str) -> bytes:
    return blake2b(stamp.encode(), digest_size=STAMP_BYTES).digest()


@dataclass(slots=True)
class Placed:
    """A record that has its place in host memory now, `is_new`, or is there already."""

    entry: Entry
    is_new: bool


class RecordPool:
    """Belongs to the engine's thread. `host_bytes` of memory; without `keeps_host` records are
    there only on their way to the disk."""

    def __init__(
        self,
        host_bytes: int,
        wake: Callable[[], None],
        metrics: Metrics,
        ledger: Ledger,
        *,
        share: float = 1.0,
        keeps_host: bool = True,
    ) -> None:
        self.share = share
        """Of a namespace's limits; pages have the rest."""
        self.ledger = ledger
        self._metrics = metrics
        self.host = Shelf(host_bytes // EXTENT, self._host_evicted, keeps=keeps_host)
        self.memory: Bytes = np.empty(self.host.num_slots * EXTENT, np.uint8)
        """Host memory: place i is its bytes from `i * EXTENT` on."""
        self.misses = Misses()
        self.reports = Reports(LAYOUT, metrics)
        self.at_once = WRITTEN_AT_ONCE
        self.disk = Disk(self, wake)
        self.disk.syncs = False
        self.leases = RecordLeases(self)
        self.copies = Mover("records-copier", wake, COPIERS)
        self.reads = Mover("records-reader", wake, READERS)
        self._pending: Counter[str] = Counter()
        """Places in host memory of each namespace's records that are not copied or written yet."""
        self._limits: dict[str, tuple[int | None, int | None]] = {}

    # What there is.

    def find(self, one: bytes) -> tuple[Entry, TierName] | None:
        """A record that can be read, and its tier."""
        if (entry := self.host.find(one)) is not None:
            return entry, "host"
        return None if (entry := self.disk.find(one)) is None else (entry, "disk")

    def find_in(self, tier: TierName, one: bytes) -> Entry | None:
        return self.host.find(one) if tier == "host" else self.disk.find(one)

    def reason(self, one: bytes, namespace: str, stamp: bytes, key: bytes) -> Reason:
        """Why a record is not there."""
        found = self.misses.reason(one, False, namespace, key, stamp)
        return "other_stamp" if found == "other_salt" else found  # type: ignore[return-value]

    def use(self, one: bytes) -> None:
        """Make a record the most recently used one, in each tier that has it. Of one that a job
        holds, the copy on disk stays, and one in host memory where that has the only copy."""
        rank = PINNED if one in self.disk.pinned else RANK
        store = self.disk.store
        if store is not None and (written := store.find(one)) is not None:
            store.use(written, rank)
            rank = RANK
        if (entry := self.host.find(one)) is not None:
            self.host.use(entry, rank if store is None or not entry.holds else RANK)

    # Store.

    def place(self, namespace: str, one: bytes, size: int) -> Placed | None:
        """A place in host memory, or the record where any tier has it; None: there is none now."""
        if (found := self.find(one)) is not None:
            return Placed(found[0], False)
        places = -(-size // EXTENT)
        if not (self.host.keeps or self.disk.store):
            return None
        own = self._pending[namespace]
        if self.host.has(one) or (own and own + places > self._most_pending(namespace)):
            return None
        entry = self.host.place(one, namespace, RANK, b"", places)
        if entry is None:
            return None
        self._pending[namespace] += places
        return Placed(entry, True)

    def may_find_place(self, namespace: str, size: int) -> bool:
        """Whether a record that has no place now can have one later."""
        limit = self.limits_of(namespace)["max_host_bytes"]
        most = self.host.num_slots
        if limit is not None:
            most = min(most, int(self.share * limit) // EXTENT)
        return -(-size // EXTENT) <= most and bool(self._pending)

    def _most_pending(self, namespace: str) -> int:
        """One of several namespaces cannot fill host memory with what waits for the disk."""
        others = len(self._pending) - (namespace in self._pending)
        return self.host.num_slots // (others + 2)

    def store(self, namespace: str, moves: list[Move]) -> MoveBatch:
        """Copy records to their places, in a thread."""
        batch = MoveBatch(namespace, moves, partial(store, host=self.memory), self._stored)
        self.copies.add(batch)
        return batch

    def _stored(self, batch: MoveBatch) -> None:
        for move in batch.moves:
            entry = move.entry
            if move.outcome != "stored" or batch.is_abandoned or entry.is_dropped:
                self.host.drop(entry)
                self.release(entry)
                continue
            entry.tag, entry.is_ready = TAG.pack(move.size, move.digest), True
            self._moved("host", "in", move.size)
            self.disk.add(entry, b"")
            if entry.holds == 1:
                self.release(entry)
            else:
                entry.holds -= 1  # the disk holds it now
        self.report()

    def release(self, entry: Entry) -> None:
        """The bytes of a new record are where they will stay."""
        self._forget_pending(entry)
        self.host.release(entry)

    def _forget_pending(self, entry: Entry) -> None:
        self._pending[entry.namespace] -= len(entry.slots)
        if not self._pending[entry.namespace]:
            del self._pending[entry.namespace]

    def request_sync(self, ids: Sequence[bytes]) -> None:
        """Have records of host memory written to the disk, and synced."""
        for one in ids:
            entry = self.host.find(one)
            if entry is not None and not entry.holds and self.disk.find(one) is None:
                self._pending[entry.namespace] += len(entry.slots)
                self.disk.add(entry, b"")
                if not entry.holds:
                    self._forget_pending(entry)
        self.disk.sync(ids)

    def is_on_its_way(self, one: bytes) -> bool:
        """Whether a record may yet become durable."""
        if self.disk.store is None:
            return False
        is_written = self.disk.find(one) is not None
        return not self.disk.is_durable(one) if is_written else self.host.is_held(one)

    # Load.

    def load(self, namespace: str, tier: TierName, moves: list[Move]) -> MoveBatch:
        """Copy records to the caller's memory, in a thread. Those of host memory are held."""
        disk = self.disk.store
        if tier == "host" or disk is None:
            for move in moves:
                move.entry.holds += 1
            run = partial(load, source=of_host(self.memory), has=lambda _: True)
            batch = MoveBatch(namespace, moves, run, self._loaded_from_host)
            self.copies.add(batch)
            return batch
        run = partial(load, source=of_disk(disk), has=disk.has)
        batch = MoveBatch(namespace, moves, run, self._loaded_from_disk)
        self.reads.add(batch)
        return batch

    def blank(self, namespace: str, moves: list[Move]) -> MoveBatch:
        """Overwrite the caller's memory, in a thread."""
        batch = MoveBatch(namespace, moves, blank, lambda _: None)
        self.copies.add(batch)
        return batch

    def _loaded_from_host(self, batch: MoveBatch) -> None:
        for move in batch.moves:
            if move.outcome == "corrupt":
                self.host.drop(move.entry)
            self.host.release(move.entry)
            self._loaded(move, "host")

    def _loaded_from_disk(self, batch: MoveBatch) -> None:
        gone = [move.entry for move in batch.moves if move.outcome == "corrupt"]
        self.disk.drop(gone)
        for move in batch.moves:
            self._loaded(move, "disk")

    def _loaded(self, move: Move, tier: TierName) -> None:
        if move.outcome == "found":
            self._moved(tier, "out", move.size)
            self.use(move.entry.key)

    # The disk's part.

    def new_record(self, entry: Entry, rank: int) -> NewRecord:
        size, _ = TAG.unpack(entry.tag)
        parts, left = [], size
        for first, count in stretches_of(entry.slots):
            begin, num = first * EXTENT, min(left, count * EXTENT)
            parts.append(self.memory[begin : begin + num].data)
            left -= num
        places = len(entry.slots)
        return NewRecord(entry.key, entry.namespace, rank, entry.tag, parts, places)

    def priority_of(self, label: bytes) -> int:
        return RANK

    def count(self, tier: TierName, way: Way, number: int, began: float) -> None:
        self.report()

    # Delete.

    def delete(self, ids: Sequence[bytes]) -> None:
        for entry in filter(None, map(self.host.find, ids)):
            self.host.drop(entry)
        self.disk.drop(list(filter(None, map(self.disk.find, ids))))
        self.report()

    def clear_host(self, namespace: str) -> Generator[None, None, int]:
        """Delete all records of a namespace from host memory, one a step; the number of those that
        it has in any tier."""
        self.misses.forget(namespace)
        self.leases.clear(namespace)
        number = 0 if self.disk.store is None else self.disk.store.count(namespace)
        for entry in list(self.host.own(namespace)):
            number += self.disk.find(entry.key) is None
            self.host.drop(entry)
            yield
        return number

    # Limits.

    def set_limits(self, namespace: str, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Limit a namespace's bytes in each tier; None: no limit."""
        self._limits[namespace] = host_bytes, disk_bytes
        host = None if host_bytes is None else int(self.share * host_bytes) // EXTENT
        self.host.set_limit(namespace, host)
        self.disk.set_limit(namespace, None if disk_bytes is None else int(self.share * disk_bytes))

    def limits_of(self, namespace: str) -> dict[str, int | None]:
        host, disk = self._limits.get(namespace, (None, None))
        return {"max_host_bytes": host, "max_disk_bytes": disk}

    @property
    def namespaces(self) -> set[str]:
        """Those with records."""
        disk = self.disk.store
        return {*self.host.namespaces, *(() if disk is None else disk.namespaces)}

    # The engine's round.

    @property
    def is_busy(self) -> bool:
        """Whether threads work, or have work."""
        return self.copies.is_busy or self.reads.is_busy or self.disk.is_busy

    def advance(self) -> None:
        """Take the ends of tasks, start the next ones, and end leases whose time is over."""
        self.copies.advance()
        self.reads.advance()
        self.disk.take_done()
        self.disk.report_gone()
        self.disk.write_down()
        self.disk.look()
        self.leases.expire()

    def close(self, ends: float) -> None:
        """Finish what is under way, until a time by `time.monotonic()`."""
        self.reads.close(ends)
        self.copies.close(ends)
        self.disk.close(ends)

    # Reports.

    def describe(self) -> dict[str, int]:
        host = self.host.num_slots * EXTENT if self.host.keeps else 0
        disk = self.disk.total_bytes or 0
        return {"host_bytes": host, "disk_bytes": disk if self.disk.store is not None else 0}

    def report(self) -> None:
        """Update the gauges."""
        for tier, number in self.num_records.items():
            self._metrics.set(number, "records", tier)
        self._metrics.set(float(self.host.keeps), "tier_up", "host")
        self._metrics.set(float(self.disk.store is not None), "tier_up", "disk")

    @property
    def num_records(self) -> dict[str, int]:
        disk = self.disk.store
        host = len(self.host) if self.host.keeps else 0
        return {"host": host, "disk": 0 if disk is None else disk.count()}

    def looked_up(self, outcome: str, number: int) -> None:
        self._metrics.add(number, "record_lookups", outcome)

    def _moved(self, tier: TierName, way: Way, num_bytes: int) -> None:
        self._metrics.add(num_bytes, "record_bytes_moved", tier, way)

    def _host_evicted(self, entry: Entry) -> None:
        if self.host.keeps and self.disk.find(entry.key) is None:
            self.misses.removed(entry.key)
