"""The tiers below the pool: host memory and disk, as the engine's thread sees them.

They follow the tree: each committed page has an identity, by which its records are found. A copier
(`copier.py`) writes pages down, a loader (`loading.py`) brings them back.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import PageCopies
from service.core.pool.budget import Urgency
from service.core.pool.namespaces import Root
from service.core.prefix.keys import KEY_BYTES
from service.core.prefix.nodes import DEFAULT_PRIORITY, Int32, Name, Node, named
from service.core.tree import PrefixTree
from service.engine.tiers.copier import IN_POOL, Copier
from service.engine.tiers.misses import Misses
from service.engine.tiers.page_records import PagePaths
from service.engine.tiers.reports import Reports, TierName, Way
from service.metrics import Metrics
from service.tiers.record_store import RecordStore
from service.tiers.records import RecordLayout
from service.tiers.shelf import PINNED, Entry, Shelf
from service.tiers.worker import nothing

LOG: Final = logging.getLogger("attnd.tiers")
COPIED_AT_ONCE: Final = 16
"""Maximum pages that one task of a thread moves, ..."""
BYTES_AT_ONCE: Final = 2**25
"""... and their bytes."""
LEAST_LAST: Final = 6
"""Minimum pages of each of the last tasks."""
NEXT_S: Final = 3e-4
"""Time after an answer in which the next call is likely: it goes before work for tiers."""
SHARED_S: Final = 0.02
"""Time after an answer in which pieces of that work stay small: a call may come that waits."""
REPORTED_AT_ONCE: Final = 1024
"""Maximum pages gone from the disk whose events are made in a round."""


class Tiers:
    """Belongs to the engine's thread; the `watcher` and the `keeper` of its tree.

    `host_slots` records fit in host memory; without `keeps_host` they are there only on their way
    to the disk. `writes_commits`: pages are copied when they are committed.
    """

    def __init__(
        self,
        tree: PrefixTree,
        copies: PageCopies,
        layout: RecordLayout,
        host_slots: int,
        wake: Callable[[], None],
        metrics: Metrics,
        *,
        keeps_host: bool = True,
        writes_commits: bool = False,
    ) -> None:
        self._wake = wake
        self.tree = tree
        self.copies = copies
        self.layout = layout
        self.metrics = metrics
        self.keeps_host = keeps_host
        self.host = Shelf(host_slots, self._host_evicted)
        self.disk: RecordStore | None = None
        self._lost_disk: RecordStore | None = None
        """A disk that failed: its records are only erased."""
        self.disk_bytes: int | None = None
        """Size of the disk tier, also of one that is off; None: there is none."""
        self.misses = Misses()
        self.reports = Reports(layout, metrics)
        self.writes_commits = writes_commits
        self.idle_s: Callable[[], float] = lambda: math.inf
        """Seconds since others last waited for the device; 0 while they do."""
        self.at_once = max(1, min(COPIED_AT_ONCE, BYTES_AT_ONCE // layout.payload_bytes))
        """Pages that one task moves to or from the disk, or beside others' work."""
        self.records = self.blocks(host_slots)
        """The memory of the records in host memory, by their slot."""
        self._limits: dict[str, tuple[int | None, int | None]] = {}
        """Maximum bytes of namespaces in host memory and on disk."""
        self.paths = PagePaths(tree.allocator.num_pages)
        self._doomed: set[Entry] = set()
        """Held records of host memory that are removed once they are not held."""
        self._pins: Counter[bytes] = Counter()
        """Pins of each page that stays on disk, by its identity."""
        self._removed_from_disk: deque[Entry] = deque()
        self._discarded: list[bytes] | None = None
        """Identities of pages that are being evicted from all tiers; None: from the pool alone."""
        self.copier = Copier(self, wake)
        tree.cache.named.watcher = self
        tree.budget.keeper = self

    def is_awaited(self) -> bool:
        """Whether others wait for the device, or had its answers a moment ago."""
        return self.idle_s() < NEXT_S

    def is_shared(self) -> bool:
        """Whether others have work for the device from time to time."""
        return self.idle_s() < SHARED_S

    def batch(self, left: int, are_last: bool = True) -> int:
        """Of `left` pages, those that the next task moves between the pool and host memory. Of the
        last ones about half: nothing else is under way while the last task ends."""
        most = self.at_once if self.is_shared() else 2 * self.at_once
        half = left // 2 if are_last and left >= 2 * LEAST_LAST else left
        return min(half, most)

    def blocks(self, count: int) -> NDArray[np.uint8]:
        """Memory for records, `[count, block_bytes]`."""
        return self.copies.memory(count, self.layout.block_bytes)

    def use_disk(self, disk: RecordStore) -> None:
        """Write records to a store made with `evicted=tiers.disk_evicted`, and read from it; events
        report those that it has."""
        self.disk, self.disk_bytes = disk, disk.capacity_bytes
        for entry in disk.records():
            self.reports.stored(entry, entry.tag, "DISK")
        self.report()

    def disk_evicted(self, entry: Entry) -> None:
        """In the writer's thread."""
        self._removed_from_disk.append(entry)

    def lose_disk(self, error: OSError) -> None:
        """Continue without the disk."""
        if self.disk is not None:
            LOG.error("the disk tier is off until the next start: %s", error)
            self._removed_from_disk.extend(self.disk.records())
            self._lost_disk = None if self.disk.is_deleted() else self.disk
            self.disk = None
            self.report()

    def advance(self, most: int | None = None) -> bool:
        """Take the ends of tasks (up to `most`), and start copies that are due; whether there were
        any."""
        if (has_worked := self.copier.take_done(most)) and most is not None:
            return True
        for _ in range(min(len(self._removed_from_disk), REPORTED_AT_ONCE)):
            entry = self._removed_from_disk.popleft()
            self.reports.removed([entry], "DISK")
            if not self.host.has(entry.key):
                self.misses.removed(entry.key)
        if self._removed_from_disk:
            self._wake()
        return self.copier.start() or has_worked

    def close(self, writes_pool: bool) -> None:
        """Finish copies under way, with `writes_pool` also copy pages that only the pool has."""
        disk = self.disk or self._lost_disk
        if self.copier.close(writes_pool) and disk is not None:
            disk.close()

    # What happens in the tree.

    def named(self, node: Node, root: Root, keys: bytes) -> None:
        """`Watcher`: note the identities of committed pages, and queue them for copies."""
        names = self.tree.cache.named
        if node.parent is None:
            before = key = root.key
            ids = names.token_ids[node.pages.item(0)].tobytes()
            first = ids if named(node).with_ids else keys[:KEY_BYTES]
            self.misses.named(root.namespace.name, first, key)
        else:
            before, key = self.paths.id_of(node.parent.pages.item(-1)), names.last_key(node.parent)
        record_ids = self.paths.add(node.pages, before, key, keys)
        if self.writes_commits and self.disk is not None:
            both = zip(record_ids, node.pages.tolist(), strict=True)
            self.copier.request(root.namespace.name, both)

    def unnamed(self, pages: Int32, name: Name) -> None:
        """`Watcher`: records of pages that leave the pool are now the most recently used ones."""
        for page in pages.tolist():
            record_id = self.paths.id_of(page)
            if (copy := self.copier.copying.get(page)) is not None and copy.entry.key == record_id:
                copy.is_void = True
            if self._discarded is not None:
                self._discarded.append(record_id)
                continue
            in_host, on_disk = self.host.find(record_id), None
            if in_host is not None:
                self.host.use(in_host, name.keep.priority)
            if self.disk is not None and (on_disk := self.disk.find(record_id)) is not None:
                self.disk.use(on_disk, self.disk_rank(record_id, name.keep.priority))
            if in_host is None and on_disk is None:
                self.misses.removed(record_id)

    def num_ready(self, node: Node, size: int, urgency: Urgency) -> int:
        """`Keeper`: pages with copies can be evicted; others are copied first where that can wait.

        Pages that cannot be copied are lost, the last ones first.
        """
        pages, count = node.pages[-size:].tolist(), 0
        while count < size and self.has_copy(self.paths.id_of(pages[-1 - count])):
            count += 1
        if count or urgency == "now" or not (self.keeps_host or self.disk):
            return count or size
        self.copier.copy_next(named(node).root.namespace.order.upcoming())
        return 0 if urgency == "ahead" or self.copier.is_awaited(pages[-1]) else size

    def request_copies(
        self, namespace: str, record_ids: Sequence[bytes], pages: Sequence[int]
    ) -> bool:
        """Queue copies of committed pages that are not on disk; whether all are there."""
        both = zip(record_ids, pages, strict=True)
        missing = [(one, page) for one, page in both if not self.on_disk(one)]
        self.copier.request(namespace, [one for one in missing if not self.host.has(one[0])])
        return not missing

    @property
    def is_copying(self) -> bool:
        """Whether copies wait or are under way."""
        return self.copier.is_busy

    # Records.

    def has_copy(self, record_id: bytes) -> bool:
        """Whether a page can be evicted without a loss."""
        if self.host.find(record_id) is not None:
            return True
        return not self.keeps_host and self.on_disk(record_id)

    def on_disk(self, record_id: bytes) -> bool:
        return self.disk is not None and self.disk.find(record_id) is not None

    def has_on_disk(self, entry: Entry) -> bool:
        """Whether a record that was found on disk is still there. In any thread."""
        disk = self.disk
        return disk is not None and disk.has(entry)

    def disk_rank(self, record_id: bytes, priority: int) -> int:
        return PINNED if record_id in self._pins else priority

    def pin(self, record_ids: Sequence[bytes], by: int) -> None:
        """Add (`by` 1) or remove (-1) a pin of records on disk, now and when they are written."""
        for record_id in record_ids:
            self._pins[record_id] += by
            rank = PINNED if self._pins[record_id] else DEFAULT_PRIORITY
            if rank == DEFAULT_PRIORITY:
                del self._pins[record_id]
            if self.disk is not None and (entry := self.disk.find(record_id)) is not None:
                self.disk.use(entry, rank)

    def loaded(self, entry: Entry, is_in_pool: bool) -> None:
        """A load no longer holds a record of host memory, whose page may be in the pool now."""
        entry.holds -= 1
        if entry.is_ready and is_in_pool:
            self.host.use(entry, IN_POOL)
        self.release(entry)

    def release(self, entry: Entry) -> None:
        """Remove a record of host memory that is not held any more, if it was deleted or was there
        only on its way to the disk."""
        if not entry.holds and (entry in self._doomed or not self.keeps_host):
            self._doomed.discard(entry)
            self.host.remove(entry)

    def set_limits(self, namespace: str, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Limit a namespace's bytes in each tier; None: no limit."""
        self._limits[namespace] = host_bytes, disk_bytes
        size = self.layout.block_bytes
        self.host.set_limit(namespace, None if host_bytes is None else host_bytes // size)
        if self.disk is not None:
            self.disk.set_limit(namespace, disk_bytes)

    def limits_of(self, namespace: str) -> dict[str, int | None]:
        host, disk = self._limits.get(namespace, (None, None))
        return {"max_host_bytes": host, "max_disk_bytes": disk}

    def note(self, name: str, value: str | None) -> None:
        """Keep a text on the disk, if there is one, for the next start."""
        if self.disk is not None:
            self._run_on_disk(lambda disk: disk.note(name, value))

    # Erasing.

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Within it, pages that are evicted are dropped from all tiers."""
        self._discarded = []
        try:
            yield
        finally:
            dropped, self._discarded = self._discarded, None
            for record_id in dropped:
                if (entry := self.host.find(record_id)) is not None:
                    self.drop_from_host(entry)
            if self.disk is not None:
                found = [one for record_id in dropped if (one := self.disk.find(record_id))]
                if found:
                    self.drop_from_disk(found)

    def drop_from_disk(self, entries: Sequence[Entry]) -> None:
        """Delete records from the disk; their bytes stay until others overwrite them."""

        def removed() -> None:
            self.reports.removed(entries, "DISK")
            self.report()

        self._run_on_disk(lambda disk: disk.drop(entries), removed)

    def clear_host(self, namespace: str) -> Generator[None, None, None]:
        """Delete all records of a namespace from host memory, one a step."""
        self.misses.forget(namespace)
        for copy in self.copier.copying.values():
            copy.is_void |= copy.entry.namespace == namespace
        for entry in self.host.own(namespace):
            if self.host.find(entry.key) is entry:
                self._remove_from_host(entry)
            yield

    def clear_disk(self, namespace: str, done: Callable[[OSError | None], None]) -> None:
        """Delete all records of a namespace from the disk and overwrite them, also from one that
        failed; then `done` is called."""

        def cleared(error: OSError | None = None) -> None:
            self.report()
            done(error if self.disk or self._lost_disk else None)

        self.copier.write_down(waits=False)
        self._run_on_disk(lambda disk: disk.clear(namespace), cleared, cleared)

    def drop_from_host(self, entry: Entry) -> None:
        """Delete a record from host memory, as soon as it is not held."""
        self._remove_from_host(entry)
        self.reports.removed([entry], "CPU")
        self.report()

    def _remove_from_host(self, entry: Entry) -> None:
        entry.is_ready = False
        if entry.holds:
            self._doomed.add(entry)
        else:
            self.host.remove(entry)

    def _run_on_disk(
        self,
        work: Callable[[RecordStore], object],
        done: Callable[[], None] = nothing,
        failed: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        """Run `work` in the writer's thread, then one of the others in the engine's."""

        def fail(error: OSError) -> None:
            self.lose_disk(error)
            failed(error)

        def run() -> Callable[[], None]:
            try:
                if (disk := self.disk or self._lost_disk) is not None:
                    work(disk)
            except OSError as error:
                return partial(fail, error)
            return done

        self.copier.run_on_disk(run)

    # Reports.

    def describe(self) -> list[dict[str, Any]]:
        host = self.layout.block_bytes * self.host.num_slots if self.keeps_host else None
        disk = None if self.disk_bytes is None else self.disk_bytes * bool(self.disk)
        return self.reports.describe({"host": host, "disk": disk})

    def count(self, tier: TierName, way: Way, pages: int, began: float) -> None:
        """Count pages that moved, and update the gauges."""
        self.reports.count(tier, way, pages, began)
        if way == "in":
            self.report()

    def report(self) -> None:
        up = {"host": self.keeps_host, "disk": self.disk is not None}
        self.reports.set_gauges(self.num_records, up)

    @property
    def num_records(self) -> dict[str, int]:
        host = len(self.host) if self.keeps_host else 0
        return {"host": host, "disk": 0 if self.disk is None else self.disk.count()}

    def _host_evicted(self, entry: Entry) -> None:
        if self.keeps_host:
            self.reports.removed([entry], "CPU")
            if not self.on_disk(entry.key):
                self.misses.removed(entry.key)
