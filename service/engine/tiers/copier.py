"""Pages on their way down: a copier takes them from the pool to host memory.

The engine's thread begins copies, and takes their ends in its round. Threads wait for copies and
write files: the fewer instructions they have, the less the engine's thread waits for the
interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.backend import DeviceLost, EndOfCopies, PageCopies, PagePlaces
from service.core.nodes import Node, named
from service.core.tree import PrefixTree
from service.engine.tiers.disk import TASKS, Disk, TiersOfDisk
from service.engine.tiers.page_records import TAG, PagePaths
from service.tiers.records import RecordLayout
from service.tiers.shelf import Entry
from service.tiers.worker import Worker

IN_POOL: Final = 0
"""Rank of a record in host memory whose page stays in the pool, too: it gives way first."""
LOOKED_AT: Final = 64
"""Pages at the front of the eviction order that are looked at for ones to copy; at most half as
many as host memory has records. Their records have the rank of their pages: those to be evicted
next must not give way to each other."""
AHEAD: Final = 64
"""With fewer free pages, the next ones to be evicted are copied."""
WAIT_S: Final = 1e-3


@dataclass(slots=True, eq=False)
class PageCopy:
    """A page on its way to host memory, which holds its record there."""

    page: int
    entry: Entry
    label: bytes


class TiersOfCopier(TiersOfDisk, Protocol):
    """The copier's part in all tiers."""

    tree: PrefixTree
    copies: PageCopies
    layout: RecordLayout
    paths: PagePaths
    records: NDArray[np.uint8]
    disk: Disk

    @property
    def is_copying(self) -> bool: ...
    def has_copy(self, record_id: bytes) -> bool: ...
    def batch(self, left: int, are_last: bool = True) -> int: ...
    def is_shared(self) -> bool: ...
    def advance(self, most: int | None = None) -> bool: ...


class Copier:
    """Belongs to the engine's thread, as the `tiers` do whose pages it copies."""

    def __init__(self, tiers: TiersOfCopier, wake: Callable[[], None]) -> None:
        self.tiers, self._wake = tiers, wake
        self.copying: dict[int, PageCopy] = {}
        """Copies to host memory that are under way, by their page."""
        self._named_pages = tiers.tree.cache.named
        self._to_copy: dict[str, dict[bytes, int]] = {}
        """Committed pages of each namespace, by their identities; first the namespace that was
        served least recently."""
        self._seen_changes = -1
        self._copier = Worker("tiers-copier", TASKS, wake, tiers.copies.calls, DeviceLost)

    # Requests.

    def request(self, namespace: str, copies: Iterable[tuple[bytes, int]]) -> None:
        """Queue copies of committed pages, by their identities."""
        if queued := dict(copies):
            self._to_copy.setdefault(namespace, {}).update(queued)
            self._wake()

    def is_pending(self, namespace: str, record_id: bytes) -> bool:
        """Whether a page waits for its copy, or its copy is on its way to the disk."""
        is_queued = record_id in self._to_copy.get(namespace, ())
        return is_queued or self.tiers.host.is_held(record_id)

    def copy_next(self, nodes: Iterable[Node]) -> bool:
        """Start copies of a batch of the pages that are evicted next and have none; whether there
        were any."""
        tiers, pages = self.tiers, list[int]()
        if self._copier.is_full:
            return False
        left = max(1, min(LOOKED_AT, tiers.host.num_slots // 2))
        for node in nodes:
            some = node.pages[: -left - 1 : -1]
            left -= some.size
            for page, record_id in zip(some.tolist(), tiers.paths.ids_of(some), strict=True):
                if page not in self.copying and not tiers.has_copy(record_id):
                    pages.append(page)
            if not left or len(pages) >= tiers.at_once:
                break
        return bool(pages) and self._copy(pages[: tiers.at_once], are_next=True)

    @property
    def is_busy(self) -> bool:
        """Whether copies wait or are under way."""
        return bool(self._to_copy or self._copier.count)

    @property
    def is_polled(self) -> bool:
        """Whether the engine's thread has to look for the next end."""
        return self._copier.is_polled

    def is_awaited(self, page: int) -> bool:
        """Whether a page's copy is under way, or waits for room that others free."""
        has_no_room = self._copier.is_full or self.tiers.host.is_jammed
        return page in self.copying or (has_no_room and self.tiers.is_copying)

    # The engine's round.

    def take_done(self, most: int | None = None) -> bool:
        """Take the ends of tasks, up to `most`; whether there were any."""
        return self._copier.take_done(most)

    def start(self) -> bool:
        """Start copies that are due, a batch of each kind; whether there were any."""
        has_started, allocator = self._copy_queued(), self.tiers.tree.allocator
        if has_started:
            self._wake()
        if allocator.num_free < AHEAD and allocator.num_changes != self._seen_changes:
            self._seen_changes = allocator.num_changes
            victim = self.tiers.tree.budget.victim(None)
            has_started |= victim is not None and self.copy_next(victim.order.upcoming())
        return has_started

    def close(self, writes_pool: bool, ends: float) -> None:
        """Finish copies under way, with `writes_pool` also copy pages that only the pool has."""
        if writes_pool:
            self._write_all(ends)
        self._copier.close(ends)
        with suppress(DeviceLost):
            self._copier.take_done()

    def _write_all(self, ends: float) -> None:
        """Copy all named pages to the disk, until a time."""
        for node in filter(None, self._named_pages.nodes):
            pages, namespace = node.pages, named(node).root.namespace
            both = zip(self.tiers.paths.ids_of(pages), pages.tolist(), strict=True)
            self.request(namespace.name, both)
        tiers = self.tiers
        while tiers.is_copying and tiers.disk.store is not None and time.monotonic() < ends:
            if not tiers.advance():
                time.sleep(WAIT_S)

    # Pool to host memory.

    def _copy_queued(self) -> bool:
        """Start copies of queued pages of the namespace whose turn it is; whether there were any.

        A namespace at its own limit waits until its records are written; without any, it has no
        room for a page at all. Its pages delay no other namespace.
        """
        host = self.tiers.host
        for namespace, queue in tuple(self._to_copy.items()):
            if self._copier.is_full:
                return False
            is_first, tiers = not self._copier.count, self.tiers
            most = tiers.at_once if is_first else tiers.batch(len(queue))
            queued = list(islice(queue.items(), most))
            wanted = [page for record_id, page in queued if self._is_wanted(page, record_id)]
            if wanted and not self._copy(wanted):
                if host.is_jammed:
                    return False
                if any(host.own(namespace)):
                    continue
            del self._to_copy[namespace]
            for record_id, _ in queued:
                del queue[record_id]
            if queue:
                self._to_copy[namespace] = queue
            return True
        return False

    def _is_wanted(self, page: int, record_id: bytes) -> bool:
        """Whether a queued page has the same identity, and no copy."""
        tiers = self.tiers
        is_same = self._named_pages.node_of.item(page) >= 0 and tiers.paths.id_of(page) == record_id
        is_known = tiers.host.has(record_id) or tiers.disk.find(record_id) is not None
        return is_same and not is_known and page not in self.copying

    def _copy(self, pages: Sequence[int], are_next: bool = False) -> bool:
        """Start the copies of some pages, which are evicted next or stay in the pool; whether there
        was room for all."""
        copies: list[PageCopy] = []
        for page in pages:
            if (copy := self._place(page, are_next)) is None:
                break
            self.copying[page] = copy
            copies.append(copy)
        if copies:
            slots = np.array([copy.entry.slot for copy in copies])
            places = PagePlaces(self.tiers.records, slots, self.tiers.layout.head_bytes)
            if self.tiers.copies.is_prepared(places):
                self._begin(copies, places)
            else:
                self._copier.add(partial(self._prepare, copies, places))
        return len(copies) == len(pages)

    def _prepare(self, copies: Sequence[PageCopy], places: PagePlaces) -> Callable[[], None]:
        """In the copier's thread."""
        self.tiers.copies.prepare(places)
        return partial(self._begin, copies, places)

    def _begin(self, copies: Sequence[PageCopy], places: PagePlaces) -> None:
        moves = self.tiers.copies
        wait = moves.read(np.array([one.page for one in copies], np.int32), places, moves.mark())
        is_ready = None if self.tiers.is_shared() else wait.has_come
        self._copier.add(partial(self._wait, copies, wait, time.monotonic()), is_ready)

    def _place(self, page: int, is_next: bool) -> PageCopy | None:
        """A place in host memory for a page that has a name; None where there is none."""
        tiers, names = self.tiers, self._named_pages
        node, record_id = names.nodes[names.node_of.item(page)], tiers.paths.id_of(page)
        if node is None or page in self.copying or tiers.host.has(record_id):
            return None
        name = named(node)
        keep = name.keep.priority, name.with_ids
        tag = TAG.pack(names.key_of(page), *tiers.paths.before(page), *keep)
        rank = name.keep.priority if is_next else IN_POOL
        entry = tiers.host.place(record_id, name.root.namespace.name, rank, tag)
        if entry is None:
            return None
        ids = names.token_ids[page].tobytes() if name.with_ids else b""
        return PageCopy(page, entry, tag + ids + names.extra.get(page, b""))

    def _wait(
        self, copies: Sequence[PageCopy], wait: EndOfCopies, began: float
    ) -> Callable[[], None]:
        """In the copier's thread, or once the copies are done."""
        digests = wait()
        return partial(self._copied, copies, digests, began)

    def _copied(self, copies: Sequence[PageCopy], every: Sequence[bytes], began: float) -> None:
        tiers, layout = self.tiers, self.tiers.layout
        tiers.count("host", "in", len(copies), began)
        for copy, digests in zip(copies, every, strict=True):
            entry, block = copy.entry, tiers.records[copy.entry.slot].data
            head = (entry.key, entry.namespace, copy.label)
            layout.seal(block, *head, layout.payload_bytes, digests)
            del self.copying[copy.page]
            if not entry.is_dropped:
                entry.is_ready = True
                if tiers.host.keeps:
                    tiers.reports.stored(entry, copy.label, "CPU")
                tiers.disk.add(entry, copy.label)
            tiers.host.release(entry)
