"""Loads: pages of a prefix that are in host memory or on disk come back to the pool, verified.

A load takes pages like an import: a hidden sequence holds the pages of the prefix that the pool has
and fresh ones for the rest. The loader's thread verifies each record and writes it to its page.
Then the pages are committed under the names they had, and the hidden sequence is deleted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count, groupby
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from kernels.backend import DeviceLost, Int64, PagePlaces, UInt8
from service.core.errors import CoreError, OutOfPages
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.core.prefix.keys import Prefix, root_key
from service.core.sequences.transfer import fill
from service.core.values import Int32, NewSpec
from service.engine.loop.job import (
    WAIT,
    Counts,
    Slice,
    Slices,
    empty_slice,
    in_slices,
)
from service.engine.tiers.loads import (
    ALL_TIERS,
    Found,
    Load,
    LoadLimits,
    Miss,
    Origin,
    Record,
    Steps,
    runs_of,
    waiting,
)
from service.engine.tiers.page_records import PageTag, next_id
from service.engine.tiers.pins import Pins
from service.engine.tiers.tiers import CLOSE_S, TASKS, Tiers
from service.errors import Internal
from service.tiers.records import InvalidRecord
from service.tiers.worker import Worker

LOG: Final = logging.getLogger("attnd.tiers")
HIDDEN: Final = "~~"
"""First characters of the names of hidden sequences; no caller's begin so."""
BATCHES: Final = 2
"""Batches of one load for each of the loader's threads: others have their turns between them."""
LOOKED_UP: Final = 32
"""Pages looked up at once: they are loaded while others are looked up."""
EVICTED_AT_ONCE: Final = 1024


class Loading:
    """All loads of an engine; belongs to its thread."""

    def __init__(self, tiers: Tiers, wake: Callable[[], None]) -> None:
        self.tiers = tiers
        self._tree = tiers.tree
        self._loads: set[Load] = set()
        self._by_id: dict[bytes, Load] = {}
        self._numbers = count()
        self._spare: SimpleQueue[UInt8] = SimpleQueue()
        """Blocks for a batch of records from disk, one set for each thread."""
        for _ in range(tiers.copies.calls):
            self._spare.put(tiers.blocks(tiers.at_once))
        self.pins = Pins(tiers)
        self._wake = wake
        self._restoring: Generator[Slice, Any, None] | None = None
        if tiers.disk is not None:
            self._restoring = self.pins.restore(tiers.disk.notes(), self)
        self._loader = Worker("tiers-loader", TASKS, wake, tiers.copies.calls, DeviceLost)

    def num_hidden(self, namespace: str | None) -> int:
        """Hidden sequences of a namespace, or of all (None)."""
        return sum(namespace in (None, one.namespace) for one in self._loads)

    def advance(self) -> None:
        """Take the ends of all tasks, and start copies that are due."""
        self._loader.take_done()
        self.tiers.advance()
        if self._restoring is not None:
            step = next(self._restoring, None)
            if step is None:
                self._restoring = None
            elif step.kind != WAIT:
                self._wake()

    def close(self, writes_pool: bool) -> None:
        """End all loads, finish copies under way, with `writes_pool` also copy pages that only the
        pool has, and stop the threads."""
        for load in self._loads:
            load.is_stopped = True
        self._loader.close(CLOSE_S)
        self.tiers.close(writes_pool)

    def clear(self, namespace: str) -> Slices:
        """Delete all of a namespace from the lower tiers; ends when nothing of it is left there.

        Raises `Internal` where the disk fails: then its files may still have some of it.
        """
        for load in self._loads:
            if load.namespace == namespace:
                load.has_failed = load.is_stopped = True
                load.labels.clear()
        ends: list[OSError | None] = []
        yield from in_slices(self.tiers.clear_host(namespace))
        self.tiers.clear_disk(namespace, ends.append)
        while not ends:
            yield waiting()
        if ends[0] is not None:
            raise Internal(f"not all could be erased: {ends[0]}: delete cache.disk_path yourself")

    def count(self, found: Counts) -> None:
        """Count the tokens that an operation in slices looked up and found."""
        self.tiers.metrics.add(found.found, "prefix_tokens", "hit")
        self.tiers.metrics.add(found.looked_up - found.found, "prefix_tokens", "miss")

    # Lookup.

    def has_more(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> bool:
        """Whether a lower tier has the page that the pool lacks first."""
        if limits.max_pages == 0:
            return False
        found = Found()
        next(self._look_up(namespace, prefix, limits, found, 1), None)
        self._count_miss(namespace, prefix, found)
        return bool(found.records) or found.is_loading

    def look_up(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> Steps:
        """Where the pages of a prefix are; loads nothing."""
        found = Found()
        yield from in_slices(self._look_up(namespace, prefix, limits, found))
        self._count_miss(namespace, prefix, found)
        origin = Origin(record.tier for record in found.records)
        origin["pool"] = found.num_cached
        return origin

    def _look_up(
        self,
        namespace: str,
        prefix: Prefix,
        limits: LoadLimits,
        found: Found,
        most: int | None = None,
    ) -> Generator[None, None, None]:
        """Fill `found`, some pages a step."""
        tree, names = self._tree, self._tree.cache.named
        match = tree.cache.match(namespace, prefix)
        found.num_cached = match.num_pages
        key = record_id = root_key(namespace, prefix.cache_salt)
        if match.node is not None:
            page = match.node.pages.item(match.num_pages - 1 - match.node.start)
            key, record_id = names.key_of(page), self.tiers.id_of(page)
        most = limits.max_pages if most is None else most
        stop = prefix.num_pages(names.page_size)
        stop = stop if most is None else min(stop, match.num_pages + most)
        if match.is_cut:
            return
        for at in range(match.num_pages, stop):
            key = prefix.key_at(at, key, names.page_size)
            record_id = next_id(record_id, key)
            if record_id in self._by_id:
                found.is_loading = not found.records
                return
            record = self._find(record_id, limits)
            if record is None or (prefix.token_ids is not None and not record.tag.with_ids):
                found.missing = record_id
                return
            found.records.append(record)
            if not len(found.records) % LOOKED_UP:
                yield

    def _find(self, record_id: bytes, limits: LoadLimits) -> Record | None:
        tiers = self.tiers
        if "host" in limits.tiers and (entry := tiers.host.find(record_id)) is not None:
            return Record(record_id, PageTag.read(entry.tag), entry, "host")
        if "disk" in limits.tiers and tiers.disk is not None:
            found = tiers.disk.find(record_id)
            if found is not None:
                return Record(record_id, PageTag.read(found.tag), found, "disk")
        return None

    def _count_miss(self, namespace: str, prefix: Prefix, found: Found) -> None:
        """Count the page at which a prefix ends in all tiers."""
        if found.missing is None:
            return
        tiers, first = self.tiers, b""
        if not found.num_cached and not found.records:
            ids = prefix.ids_of(0, 1, self._tree.page_size)
            first = prefix.key_at(0, b"", 0) if ids is None else ids.tobytes()
        is_foreign = tiers.disk is not None and found.missing in tiers.disk.foreign
        root = root_key(namespace, prefix.cache_salt)
        why = tiers.misses.reason(found.missing, is_foreign, namespace, first, root)
        tiers.metrics.add(1, "tier_misses", why)

    # Loads.

    def load(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> Steps:
        """Load what lower tiers have of a prefix; where its pages were. Stops at `limits.ends`."""
        origin, left = Origin(), limits.max_pages
        while True:
            now = LoadLimits(limits.tiers, left, limits.ends)
            found = Found()
            looking = self._look_up(namespace, prefix, now, found)
            next(looking, None)
            origin["pool"] = found.num_cached - origin["host"] - origin["disk"]
            if time.monotonic() >= limits.ends:
                return origin
            if found.is_loading:
                yield waiting()
                continue
            if not found.records:
                self._count_miss(namespace, prefix, found)
                return origin
            load = self._open(namespace, prefix, found)
            try:
                yield from self._load_found(load, found, looking, limits.ends)
            finally:
                num_loaded = self._finish(load, prefix)
            origin.update(record.tier for record in load.records[:num_loaded])
            left = None if left is None else left - num_loaded
            if num_loaded < len(found.records):
                return origin

    def load_all(self, namespace: str, prefix: Prefix) -> Steps:
        """`load` without limits."""
        return self.load(namespace, prefix, LoadLimits(ALL_TIERS, None, math.inf))

    def _open(self, namespace: str, prefix: Prefix, found: Found) -> Load:
        """A load without records, whose hidden sequence holds the pages that the pool has."""
        name = f"{HIDDEN}{next(self._numbers)}"
        self._tree.create((NewSpec(name, prefix=prefix, namespace=namespace),))
        load = Load(name, namespace, found.num_cached)
        self._loads.add(load)
        return load

    def _load_found(
        self, load: Load, found: Found, looking: Iterator[None], ends: float
    ) -> Generator[Slice, Any, None]:
        """Load records while more are looked up."""
        can_grow, is_known = True, False
        while not load.has_failed and time.monotonic() < ends:
            if can_grow and len(load.records) < len(found.records):
                can_grow = yield from self._grow(load, found, ends)
            is_busy = self._feed(load)
            if can_grow and not is_known:
                yield empty_slice()
                is_known = next(looking, looking) is looking  # what is found is held at once
            elif is_busy:
                yield waiting()
            else:
                return

    def _grow(self, load: Load, found: Found, ends: float) -> Generator[Slice, Any, bool]:
        """Take pages for records that were found meanwhile; whether there was room for all."""
        tree, budget, size = self._tree, self._tree.budget, self._tree.page_size
        room = budget.obtainable(budget.namespace(load.namespace))
        first, wanted = len(load.records), found.records[len(load.records) :]
        records = wanted[:room]
        for record in records:
            self._by_id[record.id] = load
            if record.tier == "host":
                record.entry.holds += 1
        try:
            while records:
                budget.most_evicted = EVICTED_AT_ONCE
                try:
                    first_page = load.num_cached + first
                    stop = first_page + len(records)
                    fill(tree, load.name, [stop * size] * tree.num_layers)
                    pages = tree.books.leaf(load.name).table[first_page:stop]
                    load.pages = np.concatenate((load.pages, pages))
                    load.records += records
                    load.after = self.tiers.copies.mark()
                    break
                except EvictionPaused:
                    if time.monotonic() >= ends:
                        break
                finally:
                    budget.most_evicted = NO_LIMIT
                yield waiting()
        except OutOfPages:
            pass
        finally:
            if len(load.records) == first:
                self._let_go(records)
        return len(load.records) == len(found.records)

    def _feed(self, load: Load) -> bool:
        """Hand records to the loader; whether any are left or on their way."""
        while (
            load.asked < len(load.records)
            and load.in_flight < BATCHES * self.tiers.copies.calls
            and not self._loader.is_full
            and not load.has_failed
        ):
            first, tier = load.asked, load.records[load.asked].tier
            most = min(first + self.tiers.at_once, len(load.records))
            while load.asked < most and load.records[load.asked].tier == tier:
                load.asked += 1
            batch = slice(first, load.asked)
            load.in_flight += 1
            self._loader.add(partial(self._run, load, load.records[batch], load.pages[batch]))
        return bool(load.in_flight) or (load.asked < len(load.records) and not load.has_failed)

    def _run(self, load: Load, records: Sequence[Record], pages: Int32) -> Callable[[], None]:
        """In a thread of the loader: write records to their pages, and verify them. Pages of
        records that are invalid, and later ones, are never committed."""
        began = time.monotonic()
        spare = self._spare.get()
        try:
            labels, miss = self._write(load, records, pages, spare)
        finally:
            self._spare.put(spare)
        return partial(self._loaded, load, records, labels, miss, time.monotonic() - began)

    def _write(
        self, load: Load, records: Sequence[Record], pages: Int32, spare: UInt8
    ) -> tuple[list[bytes], Miss | None]:
        """The labels of the first records, which are valid, and why the next one is a miss."""
        tiers, is_in_host = self.tiers, records[0].tier == "host"
        blocks = tiers.records if is_in_host else spare
        slots = [one.entry.slot for one in records] if is_in_host else range(len(records))
        rows = np.array(slots, np.int64)
        found = [] if is_in_host else self._verify_all(load, records, blocks, rows)
        count = len(rows) if is_in_host else len(found)
        places = PagePlaces(blocks, rows[:count], tiers.layout.head_bytes)
        wait = tiers.copies.write(pages[:count], places, load.after)
        try:
            if is_in_host:
                found = self._verify_all(load, records, blocks, rows)
        finally:
            wait()
        labels = [one for one in found if isinstance(one, bytes)]
        return labels, next((one for one in found if isinstance(one, str)), None)

    def _verify_all(
        self, load: Load, records: Sequence[Record], blocks: UInt8, rows: Int64
    ) -> list[bytes | Miss]:
        """The labels of records, up to the first one that is a miss."""
        found: list[bytes | Miss] = []
        for record, row in zip(records, rows.tolist(), strict=True):
            if load.is_stopped or (found and isinstance(found[-1], str)):
                break
            found.append(self._verify(record, blocks[row].data))
        return found

    def _verify(self, record: Record, block: memoryview) -> bytes | Miss:
        """The label of a record that is read to `block`, or is there, or why it is a miss."""
        layout, disk = self.tiers.layout, self.tiers.disk
        try:
            if record.tier == "host":
                label, length = layout.check(block, record.id, record.entry.namespace)
            else:
                read = None if disk is None else disk.get(record.entry, block)
                if read is None:
                    return "evicted"
                label, length = read
        except InvalidRecord:
            return "corrupt"
        except OSError:
            return "unreadable"
        is_same = length == layout.payload_bytes and PageTag.read(label).key == record.tag.key
        return label if is_same else "corrupt"

    def _loaded(
        self,
        load: Load,
        records: Sequence[Record],
        labels: list[bytes],
        miss: Miss | None,
        seconds: float,
    ) -> None:
        load.in_flight -= 1
        tiers = self.tiers
        for tier, same in groupby(records[: len(labels)], key=lambda one: one.tier):
            number = len(list(same))
            tiers.count(tier, "out", number, seconds * number / len(labels))
        if not load.has_failed:
            load.labels += labels
        if miss is not None:
            load.has_failed = True
            self._report(records[len(labels)], miss)
        if load.is_abandoned and not load.in_flight:
            self._end(load)

    def _report(self, record: Record, miss: Miss) -> None:
        """A record could not be loaded: unless it gave way to others, it is deleted."""
        self.tiers.metrics.add(1, "tier_misses", miss)
        if miss == "evicted":
            return
        LOG.warning("a record in the %s tier is %s: it is deleted", record.tier, miss)
        if record.tier == "disk":
            self.tiers.drop_from_disk([record.entry])
        elif record.entry.is_ready:
            self.tiers.drop_from_host(record.entry)

    def _finish(self, load: Load, prefix: Prefix) -> int:
        """Commit the pages that are loaded; returns their number. The others are freed when the
        loader is done with them."""
        load.is_stopped = True
        num_loaded = 0
        try:
            for names, keep in runs_of(load, prefix.cache_salt, self._tree.page_size):
                done = self._tree.commits.commit(load.name, names, keep) - load.num_cached
                num_loaded = max(num_loaded, done)
        except CoreError as error:
            LOG.debug("loaded pages are not committed: %s", error)
        load.is_abandoned = bool(load.in_flight)
        if not load.is_abandoned:
            self._end(load)
        return num_loaded

    def _end(self, load: Load) -> None:
        """Free the hidden sequence: its committed pages stay cached."""
        self._loads.discard(load)
        self._tree.free((load.name,))
        self._let_go(load.records, len(load.labels))

    def _let_go(self, records: Sequence[Record], num_loaded: int = 0) -> None:
        """Other loads can have these records; the first ones are in the pool now."""
        for at, record in enumerate(records):
            del self._by_id[record.id]
            if record.tier == "host":
                self.tiers.loaded(record.entry, is_in_pool=at < num_loaded)
