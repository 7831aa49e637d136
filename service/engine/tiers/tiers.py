"""The tiers below the pool: host memory and disk, written from the pool beside the engine's work.

The engine's thread decides everything and waits for nothing. A copier takes pages from the pool to
host memory, a writer from there to the disk, a loader (`loading.py`) brings them back. Each is a
thread with a bounded queue; the ends of their tasks are taken in the engine's round (`advance`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.backend import DeviceLost, PageCopies, PagePlaces
from service.core.pool.budget import Urgency
from service.core.pool.namespaces import Root
from service.core.prefix.keys import KEY_BYTES
from service.core.prefix.named_pages import Removed, Stored
from service.core.prefix.nodes import DEFAULT_PRIORITY, Int32, Name, Node, named
from service.core.tree import PrefixTree
from service.engine.store.event_history import EventHistory
from service.engine.tiers.misses import Misses
from service.engine.tiers.page_records import PageTag, next_id
from service.metrics import Metrics
from service.tiers.record_store import NewRecord, RecordStore
from service.tiers.records import RecordLayout
from service.tiers.shelf import PINNED, Entry, Shelf
from service.tiers.worker import Worker, nothing

LOG: Final = logging.getLogger("attnd.tiers")
TierName = Literal["host", "disk"]
IN_POOL: Final = 0
"""Rank of a record in host memory whose page is in the pool, too: it gives way first."""
COPIED_AT_ONCE: Final = 16
"""Maximum pages that one task of a worker moves, ..."""
BYTES_AT_ONCE: Final = 2**25
"""... and their bytes."""
LOOKED_AT: Final = 64
"""Pages at the front of the eviction order that are looked at for ones to copy."""
TASKS: Final = 4
"""Tasks that wait for one worker."""
AHEAD: Final = 64
"""With fewer free pages, the next ones to be evicted are copied."""
WAIT_S: Final = 1e-3
CLOSE_S: Final = 10.0
"""Longest wait for the workers at the engine's end."""


@dataclass(slots=True, eq=False)
class PageCopy:
    """A page on its way to host memory. `is_void`: the page was freed meanwhile."""

    page: int
    entry: Entry
    label: bytes
    before: bytes
    is_void: bool = False


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
        self.tree = tree
        self.named_pages = tree.cache.named
        self.copies = copies
        self.layout = layout
        self.metrics = metrics
        self.keeps_host = keeps_host
        self.host = Shelf(host_slots, self._host_evicted)
        self.disk: RecordStore | None = None
        self.misses = Misses()
        self.disk_bytes: int | None = None
        """Size of the disk tier, also of one that is off; None: there is none."""
        self.history: EventHistory | None = None
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}
        """Pages moved to (in) and from (out) each tier, and their seconds."""
        self.writes_commits = writes_commits
        self._limits: dict[str, tuple[int | None, int | None]] = {}
        """Maximum bytes of namespaces in host memory and on disk."""
        self._wake = wake
        self.at_once = max(1, min(COPIED_AT_ONCE, BYTES_AT_ONCE // layout.block_bytes))
        """Pages that one task moves."""
        self._memory = self.blocks(host_slots)
        self._ids = memoryview(bytearray(KEY_BYTES * tree.allocator.num_pages))
        self._copying: dict[int, PageCopy] = {}
        self._doomed: set[Entry] = set()
        """Held records of host memory that are removed once they are not held."""
        self._to_copy: dict[str, dict[bytes, int]] = {}
        """Committed pages of each namespace, by their identities; first the namespace that was
        served least recently."""
        self._to_write: deque[PageCopy] = deque()
        """Copies in host memory that go to the disk."""
        self._pins: Counter[bytes] = Counter()
        """Pins of each page that stays on disk, by its identity."""
        self._evicted_from_disk: deque[Entry] = deque()
        self._discarded: list[bytes] | None = None
        """Identities of pages that are being evicted from all tiers; None: from the pool alone."""
        self._seen_changes = -1
        self._copier = Worker("tiers-copier", TASKS, wake, copies.calls, DeviceLost)
        self._writer = Worker("tiers-writer", TASKS, wake)
        tree.cache.named.watcher = self
        tree.budget.keeper = self

    def blocks(self, count: int) -> NDArray[np.uint8]:
        """Memory for records, `[count, block_bytes]`."""
        return self.copies.memory(count, self.layout.block_bytes)

    def use_disk(self, disk: RecordStore) -> None:
        """Write records to a store made with `evicted=tiers.disk_evicted`, and read from it."""
        self.disk, self.disk_bytes = disk, disk.capacity_bytes
        self.report()

    def disk_evicted(self, entry: Entry) -> None:
        """In the writer's thread."""
        self._evicted_from_disk.append(entry)

    # What happens in the tree.

    def id_of(self, page: int) -> bytes:
        """The identity of a page that has a name."""
        return self._ids[page * KEY_BYTES : (page + 1) * KEY_BYTES].tobytes()

    def named(self, node: Node, root: Root, keys: bytes) -> None:
        """`Watcher`: note the identities of committed pages, and queue them for copies."""
        if node.parent is None:
            before, name = root.key, named(node)
            ids = self.named_pages.token_ids[node.pages.item(0)].tobytes()
            first = ids if name.with_ids else keys[:KEY_BYTES]
            self.misses.named(root.namespace.name, first, before)
        else:
            before = self.id_of(node.parent.pages.item(-1))
        for at, page in enumerate(node.pages.tolist()):
            before = next_id(before, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            self._ids[page * KEY_BYTES : (page + 1) * KEY_BYTES] = before
            if self.writes_commits and self.disk is not None:
                self._queue_copy(root.namespace.name, page, before)

    def unnamed(self, pages: Int32, name: Name) -> None:
        """`Watcher`: records of pages that leave the pool are now the most recently used ones."""
        for page in pages.tolist():
            record_id = self.id_of(page)
            if (copy := self._copying.get(page)) is not None and copy.entry.key == record_id:
                copy.is_void = True
            if self._discarded is not None:
                self._discarded.append(record_id)
                continue
            in_host, on_disk = self.host.find(record_id), None
            if in_host is not None:
                self.host.use(in_host, name.keep.priority)
            if self.disk is not None and (on_disk := self.disk.find(record_id)) is not None:
                self.disk.use(on_disk, self._disk_rank(record_id, name.keep.priority))
            if in_host is None and on_disk is None:
                self.misses.gone(record_id)

    def num_ready(self, node: Node, size: int, urgency: Urgency) -> int:
        """`Keeper`: pages with copies can be evicted; others are copied first where that can wait.

        Pages that cannot be copied are lost, the last ones first.
        """
        pages, count = node.pages[-size:].tolist(), 0
        while count < size and self._has_copy(self.id_of(pages[-1 - count])):
            count += 1
        if count or urgency == "now" or not (self.keeps_host or self.disk):
            return count or size
        self.copy_next(named(node).root.namespace.order.upcoming())
        has_no_room = self._copier.is_full or self.host.is_jammed
        is_awaited = pages[-1] in self._copying or (has_no_room and self.is_copying)
        return 0 if urgency == "ahead" or is_awaited else size

    def pin(self, record_ids: Sequence[bytes], by: int) -> None:
        """Add (`by` 1) or remove (-1) a pin of records on disk, now and when they are written."""
        for record_id in record_ids:
            self._pins[record_id] += by
            rank = PINNED if self._pins[record_id] else DEFAULT_PRIORITY
            if rank == DEFAULT_PRIORITY:
                del self._pins[record_id]
            if self.disk is not None and (entry := self.disk.find(record_id)) is not None:
                self.disk.use(entry, rank)

    def _disk_rank(self, record_id: bytes, priority: int) -> int:
        return PINNED if record_id in self._pins else priority

    def _has_copy(self, record_id: bytes) -> bool:
        if self.host.find(record_id) is not None:
            return True
        return not self.keeps_host and self.on_disk(record_id)

    def on_disk(self, record_id: bytes) -> bool:
        return self.disk is not None and self.disk.find(record_id) is not None

    # Down: pool to host memory to disk.

    def advance(self) -> None:
        """Take the ends of tasks, and start copies that are due."""
        self._copier.take_done()
        self._writer.take_done()
        self._write_down()
        while self._evicted_from_disk:
            entry = self._evicted_from_disk.popleft()
            self._report_removed(entry, "DISK")
            if not self.host.has(entry.key):
                self.misses.gone(entry.key)
        self._copy_queued()
        allocator = self.tree.allocator
        if allocator.num_free < AHEAD and allocator.num_changes != self._seen_changes:
            self._seen_changes = allocator.num_changes
            if (victim := self.tree.budget.victim(None)) is not None:
                self.copy_next(victim.order.upcoming())

    def copy_next(self, nodes: Iterable[Node]) -> None:
        """Start copies of pages that are evicted next and have none."""
        if self._copier.is_full:
            return
        pages, looked = [], 0
        for node in nodes:
            for page in node.pages[: -LOOKED_AT - 1 : -1].tolist():
                looked += 1
                if page not in self._copying and not self._has_copy(self.id_of(page)):
                    pages.append(page)
            if looked >= LOOKED_AT or len(pages) >= TASKS * self.copies.calls * self.at_once:
                break
        for first in range(0, len(pages), self.at_once):
            if self._copier.is_full or not self._copy(pages[first : first + self.at_once]):
                break

    def _queue_copy(self, namespace: str, page: int, record_id: bytes) -> None:
        self._to_copy.setdefault(namespace, {})[record_id] = page

    def _copy_queued(self) -> None:
        """Start copies of queued pages, in turns of the namespaces.

        A namespace at its own limit waits until its records are written; without any, it has no
        room for a page at all. Its pages delay no other namespace.
        """
        has_moved = True
        while has_moved:
            has_moved = False
            for namespace in tuple(self._to_copy):
                if self._copier.is_full:
                    return
                queue = self._to_copy[namespace]
                queued = list(islice(queue.items(), self.at_once))
                wanted = [page for record_id, page in queued if self._is_wanted(page, record_id)]
                if wanted and not self._copy(wanted):
                    if self.host.is_jammed:
                        return
                    if self.host.own(namespace):
                        continue
                has_moved = True
                del self._to_copy[namespace]
                for record_id, _ in queued:
                    del queue[record_id]
                if queue:
                    self._to_copy[namespace] = queue

    def is_pending(self, namespace: str, record_id: bytes) -> bool:
        """Whether a page waits for its copy, or its copy is on its way to the disk."""
        return record_id in self._to_copy.get(namespace, ()) or self.host.is_held(record_id)

    @property
    def is_copying(self) -> bool:
        """Whether copies wait or are under way."""
        moving = self._copier.count + self._writer.count
        return bool(self._to_copy or self._to_write or moving)

    def request_copies(
        self, namespace: str, record_ids: Sequence[bytes], pages: Sequence[int]
    ) -> bool:
        """Queue copies of committed pages that are not on disk; whether all are there."""
        are_all_there = True
        for page, record_id in zip(pages, record_ids, strict=True):
            if not self.on_disk(record_id):
                are_all_there = False
                if not self.host.has(record_id):
                    self._queue_copy(namespace, page, record_id)
        return are_all_there

    def _is_wanted(self, page: int, record_id: bytes) -> bool:
        """Whether a queued page has the same identity, and no copy."""
        is_same = self.named_pages.node_of[page] >= 0 and self.id_of(page) == record_id
        known = self.host.has(record_id) or self.on_disk(record_id)
        return is_same and not known and page not in self._copying

    def _copy(self, pages: Sequence[int]) -> bool:
        """Start the copies of some pages; whether there was room for all."""
        copies: list[PageCopy] = []
        for page in pages:
            if (copy := self._place(page)) is None:
                break
            self._copying[page] = copy
            copies.append(copy)
        if copies:
            self._copier.add(partial(self._run_copies, copies, self.copies.mark()))
        return len(copies) == len(pages)

    def _place(self, page: int) -> PageCopy | None:
        """A place in host memory for a page that has a name; None where there is none."""
        names, record_id = self.named_pages, self.id_of(page)
        node = names.nodes[int(names.node_of[page])]
        if node is None or page in self._copying or self.host.has(record_id):
            return None
        name, at = named(node), int(np.flatnonzero(node.pages == page)[0])
        tag = PageTag(names.key_of(page), name.keep.priority, name.with_ids).pack()
        entry = self.host.place(record_id, name.root.namespace.name, IN_POOL, tag)
        if entry is None:
            return None
        before = name.root.key
        if at:
            before = names.key_of(node.pages.item(at - 1))
        elif node.parent is not None:
            before = names.last_key(node.parent)
        ids = names.token_ids[page].tobytes() if name.with_ids else b""
        return PageCopy(page, entry, tag + ids, before)

    def _run_copies(self, copies: Sequence[PageCopy], after: object) -> Callable[[], None]:
        """In the copier's thread."""
        began, layout = time.monotonic(), self.layout
        pages = np.array([copy.page for copy in copies], np.int32)
        blocks = [self._memory[copy.entry.slot] for copy in copies]
        slots = np.array([copy.entry.slot for copy in copies])
        self.copies.read(pages, PagePlaces(self._memory, slots, layout.head_bytes), after)()
        for copy, block in zip(copies, blocks, strict=True):
            entry, view = copy.entry, memoryview(block)
            layout.seal(view, entry.key, entry.namespace, copy.label, layout.payload_bytes)
        return partial(self._copied, copies, time.monotonic() - began)

    def _copied(self, copies: Sequence[PageCopy], seconds: float) -> None:
        self.count("host", "in", len(copies), seconds)
        writes: list[PageCopy] = []
        for copy in copies:
            del self._copying[copy.page]
            entry = copy.entry
            entry.holds -= 1
            if copy.is_void:
                self.host.remove(entry)
                continue
            entry.is_ready = True
            if self.keeps_host:
                self._report_stored(copy, "CPU")
            if self.disk is None:
                continue
            if self.on_disk(entry.key):
                self.release(entry)
            else:
                entry.holds += 1
                writes.append(copy)
        self._to_write += writes

    def _write_down(self, waits: bool = True) -> None:
        """Start a write to the disk, of what came together while the last one ran."""
        while self._to_write:
            is_small = len(self._to_write) < self.at_once and self._writer.count > 0
            if waits and (is_small or self._writer.is_full):
                return
            count = min(self.at_once, len(self._to_write))
            writes = [self._to_write.popleft() for _ in range(count)]
            self._writer.add(partial(self._run_writes, writes))

    def _run_writes(self, writes: Sequence[PageCopy]) -> Callable[[], None]:
        """In the writer's thread."""
        began, disk, kept = time.monotonic(), self.disk, [False] * len(writes)
        if disk is not None:
            records = [
                NewRecord(
                    one.entry.key,
                    one.entry.namespace,
                    self._disk_rank(one.entry.key, PageTag.read(one.label).priority),
                    one.entry.tag,
                    memoryview(self._memory[one.entry.slot]),
                )
                for one in writes
            ]
            try:
                kept = disk.put(records)
            except OSError as error:
                return partial(self._lose_disk, error, writes)
        return partial(self._written, writes, kept, time.monotonic() - began)

    def _written(self, writes: Sequence[PageCopy], kept: Sequence[bool], seconds: float) -> None:
        self.count("disk", "in", sum(kept), seconds)
        for copy, is_kept in zip(writes, kept, strict=True):
            written = self.disk.find(copy.entry.key) if self.disk is not None else None
            if written is not None and copy.entry in self._doomed:
                self.drop_from_disk([written])
            elif is_kept:
                self._report_stored(copy, "DISK")
            copy.entry.holds -= 1
            self.release(copy.entry)

    def release(self, entry: Entry) -> None:
        """Remove a record of host memory that is not held any more, if it was deleted or was there
        only on its way to the disk."""
        if not entry.holds and (entry in self._doomed or not self.keeps_host):
            self._doomed.discard(entry)
            self.host.remove(entry)

    def _lose_disk(self, error: OSError, writes: Sequence[PageCopy] = ()) -> None:
        """Continue without the disk."""
        if self.disk is not None:
            LOG.error("the disk tier is off until the next start: %s", error)
            self.disk = None
            self.report()
        for copy in writes:
            copy.entry.holds -= 1
            self.release(copy.entry)

    def loaded(self, entry: Entry, is_in_pool: bool) -> None:
        """A load no longer holds a record of host memory, whose page may be in the pool now."""
        entry.holds -= 1
        if entry.is_ready and is_in_pool:
            self.host.use(entry, IN_POOL)
        self.release(entry)

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

        def run() -> Callable[[], None]:
            try:
                if self.disk is not None:
                    self.disk.drop(entries)
            except OSError as error:
                return partial(self._lose_disk, error)
            return partial(self._report_all_removed, entries)

        self._writer.add(run)

    def clear_host(self, namespace: str) -> Generator[None, None, None]:
        """Delete all records of a namespace from host memory, one a step."""
        self.misses.forget(namespace)
        for copy in self._copying.values():
            copy.is_void |= copy.entry.namespace == namespace
        for entry in self.host.own(namespace):
            if self.host.find(entry.key) is entry:
                self._remove_from_host(entry)
            yield

    def clear_disk(self, namespace: str, done: Callable[[OSError | None], None]) -> None:
        """Delete all records of a namespace from the disk and overwrite them; then `done` is
        called."""

        def run() -> Callable[[], None]:
            try:
                if self.disk is not None:
                    self.disk.clear(namespace)
            except OSError as error:
                return partial(ended, error)
            return partial(ended, None)

        def ended(error: OSError | None) -> None:
            if error is not None:
                self._lose_disk(error)
            self.report()
            done(error)

        self._write_down(waits=False)
        self._writer.add(run)

    def drop_from_host(self, entry: Entry) -> None:
        """Delete a record from host memory, as soon as it is not held."""
        self._remove_from_host(entry)
        self._report_removed(entry, "CPU")
        self.report()

    def _remove_from_host(self, entry: Entry) -> None:
        entry.is_ready = False
        if entry.holds:
            self._doomed.add(entry)
        else:
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

        def run() -> Callable[[], None]:
            try:
                if self.disk is not None:
                    self.disk.note(name, value)
            except OSError as error:
                return partial(self._lose_disk, error)
            return nothing

        if self.disk is not None:
            self._writer.add(run)

    def close(self, writes_pool: bool) -> None:
        """Finish copies under way, with `writes_pool` also copy pages that only the pool has, and
        stop the workers."""
        if writes_pool:
            self._write_all(time.monotonic() + CLOSE_S)
        ended = self._copier.close(CLOSE_S)
        with suppress(DeviceLost):
            self._copier.take_done()
        self._write_down(waits=False)
        ended = self._writer.close(CLOSE_S) and ended
        self._writer.take_done()
        if self.disk is not None and ended:
            self.disk.close()

    def _write_all(self, ends: float) -> None:
        """Copy all named pages to the disk, until a time."""
        pages = deque(np.flatnonzero(self.named_pages.node_of >= 0).tolist())
        while pages and self.disk is not None and time.monotonic() < ends:
            some = [pages[at] for at in range(min(self.at_once, len(pages)))]
            wanted = [page for page in some if self._is_wanted(page, self.id_of(page))]
            if self._copier.is_full or not self._copy(wanted):
                time.sleep(WAIT_S)
            else:
                for _ in some:
                    pages.popleft()
            self.advance()

    # Reports.

    @property
    def records(self) -> NDArray[np.uint8]:
        """The memory of the records in host memory, by their slot."""
        return self._memory

    def describe(self) -> list[dict[str, Any]]:
        """The tiers for `/v1/info`."""
        size, described = self.layout.block_bytes, []
        sizes = {"host": size * self.host.num_slots if self.keeps_host else None}
        sizes["disk"] = None if self.disk_bytes is None else self.disk_bytes * bool(self.disk)
        for name, total in sizes.items():
            if total is not None:
                described.append(
                    {
                        "name": name,
                        "total_bytes": total,
                        "page_bytes": size,
                        "store_s": self._page_s(name, "in"),
                        "load_s": self._page_s(name, "out"),
                    }
                )
        return described

    def _page_s(self, tier: str, way: str) -> float | None:
        pages, seconds = self._moved.get((tier, way), (0, 0.0))
        return seconds / pages if pages else None

    def _host_evicted(self, entry: Entry) -> None:
        if self.keeps_host:
            self._report_removed(entry, "CPU")
            if not self.on_disk(entry.key):
                self.misses.gone(entry.key)

    def _report_stored(self, copy: PageCopy, medium: str) -> None:
        if self.history is not None:
            ids = copy.label[len(copy.entry.tag) :] or None
            key = PageTag.read(copy.label).key
            self.history.hear(Stored(copy.entry.namespace, key, copy.before, ids, medium))

    def _report_all_removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._report_removed(entry, "DISK")
        self.report()

    def _report_removed(self, entry: Entry, medium: str) -> None:
        if self.history is not None and entry.tag:
            self.history.hear(Removed(entry.namespace, PageTag.read(entry.tag).key, medium))

    def count(self, tier: TierName, way: str, pages: int, seconds: float) -> None:
        moved, spent = self._moved.get((tier, way), (0, 0.0))
        self._moved[tier, way] = moved + pages, spent + seconds
        self.metrics.add(pages, "tier_pages_moved", tier, way)
        self.metrics.add(pages * self.layout.payload_bytes, "tier_bytes_moved", tier, way)
        self.metrics.add(seconds, "tier_seconds", tier, way)
        self.report()

    def report(self) -> None:
        """Update the gauges."""
        for tier, number in self.num_records.items():
            self.metrics.set(number, "tier_records", tier)
        self.metrics.set(float(self.keeps_host), "tier_up", "host")
        self.metrics.set(float(self.disk is not None), "tier_up", "disk")

    @property
    def num_records(self) -> dict[str, int]:
        """Pages in each tier."""
        host = len(self.host) if self.keeps_host else 0
        return {"host": host, "disk": 0 if self.disk is None else self.disk.count()}
