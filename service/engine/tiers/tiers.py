"""The tiers below the pool: host memory and disk, as the engine's thread sees them.

They follow the tree: each committed page has an identity, by which its records are found. A copier
(`copier.py`) writes pages down, a loader (`loading.py`) brings them back.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import PageCopies
from service.core.keys import KEY_BYTES
from service.core.nodes import Int32, Name, Node, Root, named
from service.core.pool.budget import Urgency
from service.core.pool.named_pages import Stored
from service.core.tree import PrefixTree
from service.engine.store.ledger import Ledger
from service.engine.tiers.copier import Copier
from service.engine.tiers.disk import Disk
from service.engine.tiers.page_records import PagePaths, PageTag
from service.engine.tiers.reports import Medium, Misses, Reports, TierName, Way, stored_event
from service.metrics import Metrics
from service.tiers.records import NewRecord, RecordLayout
from service.tiers.shelf import Entry, Shelf

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


class Tiers:
    """Belongs to the engine's thread; the `watcher` and the `keeper` of its tree.

    `host_slots` records fit in host memory; without `keeps_host` they are there only on their way
    to the disk. `writes_commits`: pages are copied when they are committed. `ledger` counts what
    waits for the disk.
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
        ledger: Ledger | None = None,
    ) -> None:
        self.tree = tree
        self.ledger = ledger or Ledger()
        self.copies = copies
        self.layout = layout
        self.metrics = metrics
        self.host = Shelf(host_slots, self._host_evicted, keeps=keeps_host)
        self.disk = Disk(self, wake)
        self.misses = Misses()
        self.reports = Reports(layout, metrics)
        self.writes_commits = False
        self.share = 1.0
        """Of a namespace's limits; records have the rest."""
        self.idle_s: Callable[[], float] = lambda: math.inf
        """Seconds since others last waited for the device; 0 while they do."""
        self.at_once = max(1, min(COPIED_AT_ONCE, BYTES_AT_ONCE // layout.payload_bytes))
        """Pages that one task moves to or from the disk, or beside others' work."""
        self.records = self.blocks(host_slots)
        """The memory of the records in host memory, by their slot."""
        self._limits: dict[str, tuple[int | None, int | None]] = {}
        """Maximum bytes of namespaces in host memory and on disk."""
        self.note_bytes: Counter[str] = Counter()
        """Bytes of notes that count in a namespace's maximum on disk."""
        self.paths = PagePaths(tree.allocator.num_pages)
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

    def new_record(self, entry: Entry, rank: int) -> NewRecord:
        """A record of host memory for the disk."""
        parts = (self.records[entry.slot].data,)
        return NewRecord(entry.key, entry.namespace, rank, entry.tag, parts)

    def release(self, entry: Entry) -> None:
        self.host.release(entry)

    def priority_of(self, label: bytes) -> int:
        return PageTag.read(label).priority

    def blocks(self, count: int) -> NDArray[np.uint8]:
        """Memory for records, `[count, block_bytes]`."""
        return self.copies.memory(count, self.layout.block_bytes)

    def advance(self, most: int | None = None) -> bool:
        """Take the ends of tasks (up to `most`), and start copies that are due; whether there were
        any."""
        has_worked = self.copier.take_done(most)
        has_worked |= self.disk.take_done(most)
        if has_worked and most is not None:
            return True
        self.disk.report_gone()
        self.disk.write_down()
        self.disk.look()
        return self.copier.start() or has_worked

    def close(self, writes_pool: bool, ends: float) -> None:
        """Finish copies under way, with `writes_pool` also copy pages that only the pool has, until
        `ends`, by `time.monotonic()`."""
        self.copier.close(writes_pool, ends)
        self.disk.close(ends)

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
        if self.writes_commits and self.disk.store is not None:
            both = zip(record_ids, node.pages.tolist(), strict=True)
            self.copier.request(root.namespace.name, both)

    def unnamed(self, pages: Int32, name: Name) -> None:
        """`Watcher`: records of pages that leave the pool are now the most recently used ones."""
        for page in pages.tolist():
            record_id = self.paths.id_of(page)
            if (copy := self.copier.copying.get(page)) is not None and copy.entry.key == record_id:
                self.host.drop(copy.entry)
            self.disk.unpinned(record_id)
            if self._discarded is not None:
                self._discarded.append(record_id)
                continue
            is_on_disk = self.disk.use(record_id, name.keep.priority)
            if (entry := self.host.find(record_id)) is not None:
                self.host.use(entry, name.keep.priority)
            elif not is_on_disk:
                self.misses.removed(record_id)

    def num_ready(self, node: Node, size: int, urgency: Urgency) -> int:
        """`Keeper`: pages with copies can be evicted; others are copied first where that can wait.

        Pages that cannot be copied are lost, the last ones first.
        """
        pages, count = node.pages[-size:].tolist(), 0
        while count < size and self.has_copy(self.paths.id_of(pages[-1 - count])):
            count += 1
        if count or urgency == "now" or not (self.host.keeps or self.disk.store):
            return count or size
        self.copier.copy_next(named(node).root.namespace.order.upcoming())
        return 0 if urgency == "ahead" or self.copier.is_awaited(pages[-1]) else size

    def request_copies(
        self, namespace: str, record_ids: Sequence[bytes], pages: Sequence[int]
    ) -> bool:
        """Queue copies of committed pages that are not on disk; whether all are there."""
        both = zip(record_ids, pages, strict=True)
        missing = [(one, page) for one, page in both if self.disk.find(one) is None]
        self.copier.request(namespace, [one for one in missing if not self.host.has(one[0])])
        return not missing

    @property
    def is_copying(self) -> bool:
        """Whether copies wait or are under way."""
        return self.copier.is_busy or self.disk.is_busy

    # Records.

    def has_copy(self, record_id: bytes) -> bool:
        """Whether a page can be evicted without a loss."""
        if self.host.find(record_id) is not None:
            return True
        return not self.host.keeps and self.disk.find(record_id) is not None

    def set_limits(self, namespace: str, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Limit a namespace's bytes in each tier; None: no limit."""
        self._limits[namespace] = host_bytes, disk_bytes
        size = self.layout.block_bytes
        limit = None if host_bytes is None else int(self.share * host_bytes) // size
        self.host.set_limit(namespace, limit)
        self.count_notes(namespace, 0)

    def count_notes(self, namespace: str, num_bytes: int) -> None:
        """Count more bytes (negative: fewer) of a namespace's notes: its records have less."""
        self.note_bytes[namespace] += num_bytes
        limit = self.limits_of(namespace)["max_disk_bytes"]
        if limit is not None:
            limit = max(0, int(self.share * limit) - self.note_bytes[namespace])
        self.disk.set_limit(namespace, limit)

    def limits_of(self, namespace: str) -> dict[str, int | None]:
        host, disk = self._limits.get(namespace, (None, None))
        return {"max_host_bytes": host, "max_disk_bytes": disk}

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
            self.disk.drop([one for record_id in dropped if (one := self.disk.find(record_id))])

    def clear_host(self, namespace: str) -> Generator[None, None, None]:
        """Delete all records of a namespace from host memory, one a step."""
        self.misses.forget(namespace)
        for entry in list(self.host.own(namespace)):
            self.host.drop(entry)
            yield

    def drop_from_host(self, entry: Entry) -> None:
        """Delete a record from host memory, as soon as it is not held."""
        self.host.drop(entry)
        self.reports.removed([entry], "CPU")
        self.report()

    # Reports.

    def describe(self) -> list[dict[str, Any]]:
        host = self.layout.block_bytes * self.host.num_slots if self.host.keeps else None
        disk = self.disk.total_bytes
        disk = None if disk is None else disk * bool(self.disk.store)
        return self.reports.describe({"host": host, "disk": disk})

    def inventory(self, namespace: str) -> Iterator[Stored | None]:
        """The records of a namespace, while others come and go; None is a pause."""
        store, host = self.disk.store, list(self.host.own(namespace)) if self.host.keeps else []
        disk = [] if store is None else store.records(namespace)
        media: tuple[tuple[Medium, list[Entry], Callable[[bytes], Entry | None]], ...] = (
            ("CPU", host, self.host.find),
            ("DISK", disk, self.disk.find),
        )
        for medium, entries, find in media:
            for entry in entries:
                is_there = find(entry.key) is entry
                yield stored_event(entry, entry.tag, medium, 0) if is_there else None

    def count(self, tier: TierName, way: Way, pages: int, began: float) -> None:
        """Count pages that moved, and update the gauges."""
        self.reports.count(tier, way, pages, began)
        if way == "in":
            self.report()

    def report(self) -> None:
        up = {"host": self.host.keeps, "disk": self.disk.store is not None}
        self.reports.set_gauges(self.num_records, up)

    @property
    def num_records(self) -> dict[str, int]:
        store = self.disk.store
        host = len(self.host) if self.host.keeps else 0
        return {"host": host, "disk": 0 if store is None else store.count()}

    def _host_evicted(self, entry: Entry) -> None:
        if self.host.keeps:
            self.reports.removed([entry], "CPU")
            if self.disk.find(entry.key) is None:
                self.misses.removed(entry.key)
