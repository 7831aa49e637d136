"""The disk tier: a record store that one thread writes to, and records on their way there."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from service.core.prefix.nodes import DEFAULT_PRIORITY
from service.engine.tiers.page_records import PageTag
from service.tiers.record_store import RecordStore
from service.tiers.records import NewRecord
from service.tiers.shelf import PINNED, Entry
from service.tiers.worker import Worker

if TYPE_CHECKING:
    from service.engine.tiers.tiers import Tiers

T = TypeVar("T")
Write = tuple[Entry, bytes]
"""A record of host memory, and its label."""

LOG: Final = logging.getLogger("attnd.tiers")
TASKS: Final = 4
"""Tasks that wait for one thread of a worker."""
CLOSE_S: Final = 10.0
"""Longest wait for a worker at the engine's end."""
LOOK_S: Final = 1.0
"""Time between two looks at whether the directory is still there, where nothing is written."""
REPORTED_AT_ONCE: Final = 1024
"""Maximum records that gave way whose events are made in a round."""


class Disk:
    """Belongs to the engine's thread. Without a store, and after a failure, it finds nothing."""

    def __init__(self, tiers: Tiers, wake: Callable[[], None]) -> None:
        self._tiers, self._wake = tiers, wake
        self.store: RecordStore | None = None
        self._failed: RecordStore | None = None
        """Its records are only erased."""
        self.total_bytes: int | None = None
        """Size of the tier, also of one that failed; None: there is none."""
        self._to_write: deque[Write] = deque()
        self._gone: deque[Entry] = deque()
        """Records that gave way, or were on a disk that failed: events take them back."""
        self._pins: Counter[bytes] = Counter()
        """Pins of each page that stays on disk, by its identity."""
        self._writer = Worker("tiers-writer", TASKS, wake)
        self._next_look = 0.0

    def open(self, store: RecordStore) -> None:
        """Use a store made with `evicted=disk.evicted`; events report the records that it has."""
        self.store, self.total_bytes = store, store.capacity_bytes
        self._tiers.reports.found(store.records())
        self._tiers.report()

    def evicted(self, entry: Entry) -> None:
        """In the writer's thread."""
        self._gone.append(entry)

    def find(self, record_id: bytes) -> Entry | None:
        """In any thread."""
        store = self.store
        return None if store is None else store.find(record_id)

    def use(self, record_id: bytes, priority: int) -> bool:
        """Make a record the most recently used one; whether it is there."""
        if self.store is None or (entry := self.store.find(record_id)) is None:
            return False
        self.store.use(entry, self._rank(record_id, priority))
        return True

    def pin(self, record_ids: Sequence[bytes], by: int) -> None:
        """Add (`by` 1) or remove (-1) a pin of records, now and when they are written."""
        for record_id in record_ids:
            self._pins[record_id] += by
            if not self._pins[record_id]:
                del self._pins[record_id]
            self.use(record_id, DEFAULT_PRIORITY)

    def set_limit(self, namespace: str, limit_bytes: int | None) -> None:
        if self.store is not None:
            self.store.set_limit(namespace, limit_bytes)

    def note(self, name: str, value: str | None) -> None:
        """Keep a text for the next start."""
        if self.store is not None:
            self._run(lambda store: store.note(name, value))

    def drop(self, entries: Sequence[Entry]) -> None:
        """Delete records; their bytes stay until others overwrite them."""

        def dropped(*_: object) -> None:
            self._tiers.reports.removed(entries, "DISK")
            self._tiers.report()

        if entries:
            self._run(lambda store: store.drop(entries), dropped)

    def clear(self, namespace: str, done: Callable[[OSError | None], None]) -> None:
        """Delete all records of a namespace and overwrite them, also after a failure; then `done`
        is called."""

        def cleared(_: object, error: OSError | None) -> None:
            self._tiers.report()
            done(error if self.store or self._failed else None)

        self.write_down(waits=False)
        self._run(lambda store: store.clear(namespace), cleared)

    def close(self) -> None:
        """Finish what is under way, unless the writer hangs."""
        self.write_down(waits=False)
        is_idle = self._writer.close(CLOSE_S)
        self._writer.take_done()
        if is_idle and (store := self.store or self._failed) is not None:
            store.close()

    # The engine's round.

    @property
    def is_writing(self) -> bool:
        return self._writer.count > 0

    @property
    def is_busy(self) -> bool:
        """Whether records wait, or the writer works."""
        return bool(self._to_write) or self.is_writing

    def take_done(self, most: int | None = None) -> bool:
        """Take the ends of tasks, up to `most`; whether there were any."""
        return self._writer.take_done(most)

    def report_gone(self) -> None:
        """Report some of the records that are gone."""
        for _ in range(min(len(self._gone), REPORTED_AT_ONCE)):
            entry = self._gone.popleft()
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
            self._to_write.append((entry, label))

    def write_down(self, waits: bool = True) -> None:
        """Start a write, of what came together while the last one ran."""
        while self._to_write:
            is_small = len(self._to_write) < self._tiers.at_once and self.is_writing
            if waits and (is_small or self._writer.is_full):
                return
            count = min(self._tiers.at_once, len(self._to_write))
            writes = [self._to_write.popleft() for _ in range(count)]
            write = partial(self._write, writes)
            self._run(write, partial(self._written, writes, time.monotonic()))

    def _write(self, writes: Sequence[Write], store: RecordStore) -> list[bool]:
        """In the writer's thread; which records are on disk now."""
        if store is not self.store:
            return [False] * len(writes)
        records = [
            NewRecord(
                entry.key,
                entry.namespace,
                self._rank(entry.key, PageTag.read(label).priority),
                entry.tag,
                self._tiers.records[entry.slot].data,
            )
            for entry, label in writes
        ]
        return store.put(records)

    def _written(
        self, writes: Sequence[Write], began: float, kept: list[bool] | None, _: OSError | None
    ) -> None:
        tiers = self._tiers
        if kept is not None:
            tiers.count("disk", "in", sum(kept), began)
        for at, (entry, label) in enumerate(writes):
            written = self.find(entry.key)
            if written is not None and entry.is_dropped:
                self.drop([written])
            elif written is not None and kept is not None and kept[at]:
                tiers.reports.stored(entry, label, "DISK")
            tiers.host.release(entry)

    def _rank(self, record_id: bytes, priority: int) -> int:
        return PINNED if record_id in self._pins else priority

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
