"""The disk tier: a record store that one thread writes to, and records on their way there."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from service.engine.store.ledger import Backlog, Kind, Ledger
from service.engine.tiers.reports import Misses, Reports, TierName, Way
from service.tiers.record_store import RecordStore
from service.tiers.records import NewRecord
from service.tiers.shelf import PINNED, Entry, Shelf
from service.tiers.worker import Worker

T = TypeVar("T")
Write = tuple[Entry, bytes]
"""A record of host memory, and its label."""
RECORDS: Final = Kind("records on their way to the disk", 2**62, "try again a moment later")
"""Host memory limits them."""
NOTES: Final = Kind("notes that wait for the disk", 2**14, "try again a moment later")

LOG: Final = logging.getLogger("attnd.tiers")
TASKS: Final = 4
"""Tasks that wait for one thread of a worker; ..."""
WRITES: Final = 2
"""... for the disk's: what waits for these has no turns any more."""
NOTES_AT_ONCE: Final = 256
"""Notes that one transaction writes: some milliseconds."""
MOST_UNSYNCED: Final = 2**16
"""Records that are written before some are synced in any case."""
LAST_S: Final = 2.0
"""Time for notes at the engine's end, beyond the time for pages."""
LOOK_S: Final = 1.0
"""Time between two looks at whether the directory is still there, where nothing is written."""
REPORTED_AT_ONCE: Final = 1024
"""Maximum records that gave way whose events are made in a round."""


@dataclass(slots=True, eq=False)
class Clear:
    """The erasure of a namespace: functions to call at its end, and its pieces once it began."""

    namespace: str
    done: list[Callable[[OSError | None], None]] = field(default_factory=list)
    pieces: Generator[None, None, int] | None = None


class TiersOfDisk(Protocol):
    """The disk's part in all tiers: host memory, from which records are written, and reports.
    `at_once` is the most places that one write takes."""

    ledger: Ledger
    host: Shelf
    misses: Misses
    reports: Reports
    at_once: int

    def new_record(self, entry: Entry, rank: int) -> NewRecord: ...
    def priority_of(self, label: bytes) -> int: ...
    def release(self, entry: Entry) -> None: ...
    def report(self) -> None: ...
    def count(self, tier: TierName, way: Way, pages: int, began: float) -> None: ...


class Disk:
    """Belongs to the engine's thread. Without a store, and after a failure, it finds nothing."""

    def __init__(self, tiers: TiersOfDisk, wake: Callable[[], None]) -> None:
        self._tiers, self._wake = tiers, wake
        self.syncs = True
        """Whether every write is synced; else those of `sync`, and now and then."""
        self._to_sync: set[bytes] = set()
        """Records that are waited for, ..."""
        self._unsynced: set[bytes] = set()
        """... those that are being written, or were and are not synced, ..."""
        self._syncing: list[set[bytes]] = []
        """... and those that each write under way syncs."""
        self.store: RecordStore | None = None
        self._failed: RecordStore | None = None
        """Its records are only erased."""
        self.total_bytes: int | None = None
        """Size of the tier, also of one that failed; None: there is none."""
        self._records: Backlog[Write] = Backlog(tiers.ledger, RECORDS)
        self._notes: Backlog[str | None] = Backlog(tiers.ledger, NOTES)
        self._clears: deque[Clear] = deque()
        """A piece of the first one is next, between two writes."""
        self._gone: deque[Entry] = deque()
        """Records that gave way, or were on a disk that failed: events take them back."""
        self.pinned: set[bytes] = set()
        """Identities of pages that stay on disk, ..."""
        self.is_restoring = False
        """... and whether pins of an earlier start are among them, of pages that are not loaded."""
        self._writer = Worker("tiers-writer", WRITES, wake)
        self._is_clears_turn = False
        self._next_look = 0.0

    def open(self, store: RecordStore) -> None:
        """Use a store made with `evicted=disk.evicted`."""
        self.store, self.total_bytes = store, store.capacity_bytes
        self._tiers.report()

    def evicted(self, entry: Entry) -> None:
        """In the writer's thread."""
        self._gone.append(entry)

    def find(self, record_id: bytes) -> Entry | None:
        """In any thread."""
        store = self.store
        return None if store is None else store.find(record_id)

    def is_durable(self, record_id: bytes) -> bool:
        """Whether the disk has a record that survives a loss of power."""
        if any(record_id in some for some in (self._unsynced, *self._syncing)):
            return False
        return self.find(record_id) is not None

    def sync(self, record_ids: Iterable[bytes]) -> None:
        """Make records durable that are queued, or were written."""
        self._to_sync.update(record_ids)
        self._wake()

    @property
    def _must_sync(self) -> bool:
        too_many = len(self._unsynced) >= MOST_UNSYNCED
        return too_many or not self._to_sync.isdisjoint(self._unsynced)

    def use(self, record_id: bytes, priority: int) -> bool:
        """Make a record the most recently used one; whether it is there."""
        if self.store is None or (entry := self.store.find(record_id)) is None:
            return False
        self.store.use(entry, self._rank(record_id, priority))
        return True

    def unpinned(self, record_id: bytes) -> None:
        """A page left the pool: no pin holds it."""
        if not self.is_restoring:
            self.pinned.discard(record_id)

    def set_limit(self, namespace: str, limit_bytes: int | None) -> None:
        if self.store is not None:
            self.store.set_limit(namespace, limit_bytes)

    def refuse_note(self, namespace: str, name: str) -> None:
        """Raises Overloaded where a namespace's notes wait that the disk has not written yet."""
        if self.store is not None:
            self._notes.refuse(namespace, name)

    def note(self, namespace: str, name: str, value: str | None) -> None:
        """Keep a text for the next start, later; it counts for a namespace until it is written."""
        if self.store is not None:
            self._notes.put(namespace, name, value)
            self._wake()

    def drop(self, entries: Sequence[Entry]) -> None:
        """Delete records; their bytes stay until others overwrite them."""
        if entries and self.store is not None:
            self.store.drop(entries)
            self._tiers.reports.removed(entries, "DISK")
            self._tiers.report()
            self._wake()

    def clear(self, namespace: str, done: Callable[[OSError | None], None]) -> None:
        """Delete all records of a namespace and overwrite them, also after a failure; then `done`
        is called. One that has not begun serves all callers."""
        waiting = [one for one in self._clears if one.namespace == namespace and not one.pieces]
        if not waiting:
            waiting = [Clear(namespace)]
            self._clears += waiting
        waiting[0].done.append(done)
        self._wake()

    def close(self, ends: float) -> None:
        """Finish what is under way, records first, until `LAST_S` after `ends`."""
        while self._records:
            self._write_batch(0)
        while self._notes:
            self._write_batch()
        if not self.syncs:
            self._write_batch(must_sync=True)
        is_idle = self._writer.close(ends + LAST_S)
        self._writer.take_done()
        if is_idle and (store := self.store or self._failed) is not None:
            store.close()
        elif not is_idle:
            LOG.error("the disk did not take all that was to be written in time")

    # The engine's round.

    @property
    def is_writing(self) -> bool:
        return self._writer.count > 0

    @property
    def is_busy(self) -> bool:
        """Whether anything waits for the writer, or it works."""
        return self._has_work or bool(self._clears) or self.is_writing

    @property
    def _has_work(self) -> bool:
        has_deleted = self.store is not None and self.store.has_deleted
        return bool(self._records or self._notes or has_deleted or self._must_sync)

    def take_done(self, most: int | None = None) -> bool:
        """Take the ends of tasks, up to `most`; whether there were any."""
        return self._writer.take_done(most)

    def report_gone(self) -> None:
        """Report some of the records that are gone."""
        for _ in range(min(len(self._gone), REPORTED_AT_ONCE)):
            entry = self._gone.popleft()
            if self.find(entry.key) is not None:  # it has been written again since
                continue
            self._tiers.reports.removed([entry], "DISK")
            if not self._tiers.host.has(entry.key):
                self._tiers.misses.removed(entry.key)
        if self._gone:
            self._wake()

    def look(self) -> None:
        """Notice from time to time that the directory was removed."""
        now = time.monotonic()
        if self.store is not None and not self.is_writing and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._run(RecordStore.check_place)

    # Host memory to disk.

    def add(self, entry: Entry, label: bytes) -> None:
        """Queue a record of host memory, unless the disk has it, or there is none."""
        if self.store is not None and self.find(entry.key) is None:
            entry.holds += 1
            self._records.put(entry.namespace, (entry.namespace, entry.key), (entry, label))

    def write_down(self) -> None:
        """Start a write, of what came together while the last one ran, or a piece of a clear."""
        while self._has_work or self._clears:
            is_small = len(self._records) < self._tiers.at_once and self.is_writing
            if is_small or self._writer.is_full:
                return
            if self._clears and (self._is_clears_turn or not self._has_work):
                clear = self._clears.popleft()
                self._run(partial(self._erase, clear), partial(self._erased, clear))
            else:
                self._write_batch()
            self._is_clears_turn = not self._is_clears_turn

    def _write_batch(self, num_notes: int = NOTES_AT_ONCE, must_sync: bool = False) -> None:
        taken = self._records.take(self._tiers.at_once, lambda write: len(write[0].slots))
        writes = [write for _, _, write in taken]
        notes = {str(name): value for _, name, value in self._notes.take(num_notes)}
        synced: set[bytes] | None = None
        if not self.syncs:
            self._unsynced.update(entry.key for entry, _ in writes)
            if must_sync or self._must_sync:
                synced, self._unsynced = self._unsynced, set()
                self._syncing.append(synced)
        work = partial(self._write, writes, notes, self.syncs or synced is not None)
        self._run(work, partial(self._written, writes, synced, time.monotonic()))

    def _write(
        self,
        writes: Sequence[Write],
        notes: dict[str, str | None],
        syncs: bool,
        store: RecordStore,
    ) -> list[bool]:
        """In the writer's thread; which records are on disk now."""
        if store is not self.store:
            return [False] * len(writes)
        wanted = [not entry.is_dropped for entry, _ in writes]
        records = [
            self._tiers.new_record(entry, self._rank(entry.key, self._tiers.priority_of(label)))
            for (entry, label), is_wanted in zip(writes, wanted, strict=True)
            if is_wanted
        ]
        kept = iter(store.put(records, notes, syncs=syncs))
        return [is_wanted and next(kept) for is_wanted in wanted]

    def _erase(self, clear: Clear, store: RecordStore) -> bool:
        """In the writer's thread: a piece of a clear; whether there are more."""
        if clear.pieces is None:
            clear.pieces = store.clear(clear.namespace)
        for _ in clear.pieces:
            return True
        return False

    def _erased(self, clear: Clear, is_left: bool | None, error: OSError | None) -> None:
        if is_left:
            self._clears.append(clear)
            return
        self._tiers.report()
        for done in clear.done:
            done(error if self.store or self._failed else None)

    def _written(
        self,
        writes: Sequence[Write],
        synced: set[bytes] | None,
        began: float,
        kept: list[bool] | None,
        _: OSError | None,
    ) -> None:
        tiers = self._tiers
        if kept is not None:
            tiers.count("disk", "in", sum(kept), began)
        if synced is not None:
            self._syncing.remove(synced)
            self._to_sync -= synced
        for at, (entry, label) in enumerate(writes):
            written = self.find(entry.key)
            if written is not None and (written.rank >= PINNED) != (entry.key in self.pinned):
                self.use(entry.key, tiers.priority_of(label))  # pins changed meanwhile
            if written is not None and entry.is_dropped:
                self.drop([written])
            elif written is not None and kept is not None and kept[at]:
                tiers.reports.stored(entry, label, "DISK")
            tiers.release(entry)

    def _rank(self, record_id: bytes, priority: int) -> int:
        return PINNED if record_id in self.pinned else priority

    def _fail(self, error: OSError) -> None:
        """Continue without the disk."""
        if self.store is not None:
            LOG.error("the disk tier is off until the next start: %s", error)
            self._gone.extend(self.store.records())
            self._failed, self.store = self.store, None
            self._tiers.report()
        if self._failed is not None and self._failed.is_deleted():
            self._failed = None

    def _run(
        self,
        work: Callable[[RecordStore], T],
        done: Callable[[T | None, OSError | None], None] = lambda *_: None,
    ) -> None:
        """Run `work` in the writer's thread, then `done` in the engine's with what came of it."""

        def run() -> Callable[[], None]:
            result, error = None, None
            try:
                if (store := self.store or self._failed) is not None:
                    result = work(store)
            except OSError as failure:
                error = failure
            return partial(end, result, error)

        def end(result: T | None, error: OSError | None) -> None:
            if error is not None:
                self._fail(error)
            done(result, error)

        self._writer.add(run)
