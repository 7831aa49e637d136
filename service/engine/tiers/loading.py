"""Loads: pages of a prefix that are in host memory or on disk come back to the pool, verified.

A load takes pages like an import: a hidden sequence holds the pages of the prefix that the pool has
and fresh ones for the rest. A fetcher (`fetcher.py`) writes records to these pages and verifies
them. Then they are committed under the names they had, and the hidden sequence is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

import numpy as np

from service.core.errors import CoreError, OutOfPages
from service.core.keys import Prefix
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.core.values import NewSpec
from service.engine.tiers.copier import IN_POOL
from service.engine.tiers.fetcher import Fetcher
from service.engine.tiers.loads import (
    Found,
    Load,
    LoadLimits,
    Origin,
    Record,
    Steps,
    runs_of,
    waiting,
)
from service.engine.tiers.lookup import Lookup
from service.engine.tiers.pins import Pins
from service.engine.tiers.tiers import Tiers
from service.engine.work.work import WAIT, Counts, Slice, Slices, empty_slice, in_slices
from service.errors import NotErased

LOG: Final = logging.getLogger("attnd.tiers")
HIDDEN: Final = "~~"
"""First characters of the names of hidden sequences; no caller's begin so."""
BATCHES: Final = 2
"""Batches of one load for each of the fetcher's threads: others have their turns between them."""
CLOSE_S: Final = 10.0
"""Longest time for writing pages at the engine's end."""
EVICTED_AT_ONCE: Final = 1024
MAX_DELAY_S: Final = 7.5e-4
"""Beside answers that others wait for, time between two pieces of the engine's work for tiers."""
POLL_S: Final = 1e-3
STEPS: Final = 2
"""Steps of the lookup in one piece, but for the first one, so that the first copy soon begins, and
beside answers that others wait for."""


class Loading:
    """All loads of an engine; belongs to its thread."""

    def __init__(self, tiers: Tiers, wake: Callable[[], None]) -> None:
        self.tiers = tiers
        self._tree = tiers.tree
        self._loads: set[Load] = set()
        self._by_id: dict[bytes, Load] = {}
        self._numbers = count()
        self.lookup = Lookup(tiers, self._by_id)
        self.pins = Pins(tiers)
        self._latest, self._has_advanced = 0.0, False
        """When the latest piece of work began, and whether loads have the next one; ..."""
        self._waiting = 0
        """... if any wait for it."""
        self._wake = wake
        self._restoring: Generator[Slice, Any, None] | None = None
        if tiers.disk.store is not None:
            self._restoring = self.pins.restore(self.load)
        self.fetcher = Fetcher(tiers, wake, self._end)

    def num_hidden(self, namespace: str | None) -> int:
        """Hidden sequences of a namespace, or of all (None)."""
        return sum(namespace in (None, one.namespace) for one in self._loads)

    def advance(self) -> None:
        """Take the ends of tasks, and start copies that are due: all, or one piece of this where
        calls may come that wait. Loads have every other piece then."""
        began, is_shared = time.monotonic(), self.tiers.is_shared()
        has_worked, is_due = False, self._is_due() and not (self._waiting and self._has_advanced)
        if is_due:
            most = 1 if is_shared else None
            has_worked = self.fetcher.take_done(most)
            if not (is_shared and has_worked):
                has_worked |= self.tiers.advance(most)
        if has_worked:
            self._latest, self._has_advanced = began, is_shared
        is_left = (is_shared and has_worked) or not is_due
        if is_left and (self.fetcher.count or self.tiers.is_copying):
            self._wake()
        if self._restoring is not None:
            step = next(self._restoring, None)
            if step is None:
                self._restoring = None
            elif step.kind != WAIT:
                self._wake()

    @property
    def poll_s(self) -> float | None:
        """Longest time until the next `advance`; None: `wake` is called. Without other work the
        engine's thread stays awake while copies are under way: it is faster than after a sleep. It
        does not keep the interpreter from threads at the disk."""
        tiers = self.tiers
        if not (self.fetcher.is_polled or tiers.copier.is_polled):
            return None
        return POLL_S if self.fetcher.is_reading or tiers.disk.is_writing else 0.0

    def close(self, writes_pool: bool) -> None:
        """End all loads, finish copies under way, with `writes_pool` also copy pages that only the
        pool has, and stop the threads; within `CLOSE_S`."""
        ends = time.monotonic() + CLOSE_S
        for load in self._loads:
            load.is_over = True
        self.fetcher.close(ends)
        self.tiers.close(writes_pool, ends)

    def clear(self, namespace: str) -> Slices:
        """Delete all of a namespace from the lower tiers; ends when nothing of it is left there,
        nor on its way to the pool.

        Raises `NotErased` where the disk fails: then its files may still have some of it.
        """
        ends: list[OSError | None] = []
        self._stop(namespace)
        yield from in_slices(self.tiers.clear_host(namespace))
        self.tiers.disk.clear(namespace, ends.append)
        while not ends or self._stop(namespace):
            yield waiting()
        if ends[0] is not None:
            remedy = "stop the service, and delete the files in cache.disk_path"
            raise NotErased(f"the disk failed: {ends[0]}: {remedy}")

    def _stop(self, namespace: str) -> bool:
        """Stop a namespace's loads, which commit nothing more; whether there are any."""
        own = [load for load in self._loads if load.namespace == namespace]
        for load in own:
            load.is_over = True
            del load.labels[load.committed :]
        return bool(own)

    def count(self, namespace: str, found: Counts) -> None:
        """Count the tokens that an operation in slices looked up and found."""
        metrics = self.tiers.metrics
        metrics.add(found.found, "prefix_tokens", "hit")
        metrics.add(found.looked_up - found.found, "prefix_tokens", "miss")
        metrics.namespaces.looked_up(namespace, found.looked_up, found.found)

    # Loads.

    def load(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> Steps:
        """Load what lower tiers have of a prefix; where its pages were. Stops at `limits.ends`."""
        origin, left = Origin(), limits.max_pages
        while True:
            found = Found()
            looking = self.lookup.find(namespace, prefix, replace(limits, max_pages=left), found)
            next(looking, None)
            origin["pool"] = found.num_cached - origin["host"] - origin["disk"]
            if time.monotonic() >= limits.ends:
                return origin
            if found.loading is not None and not found.records:
                while found.loading in self._by_id and time.monotonic() < limits.ends:
                    yield waiting()
                continue
            if found.records:
                load = self._open(namespace, prefix, found)
                try:
                    yield from self._load_found(load, found, looking, limits.ends)
                finally:
                    self._finish(load)
                if self.tiers.is_shared():
                    yield from self._give_way()
                origin.update(record.tier for record in load.records[: load.committed])
                left = None if left is None else left - load.committed
                if load.committed < len(found.records):
                    return origin
            if found.loading is None:
                self.lookup.count_miss(namespace, prefix, found)
                return origin

    def _open(self, namespace: str, prefix: Prefix, found: Found) -> Load:
        """A load whose hidden sequence holds the pages that the pool has."""
        name = f"{HIDDEN}{next(self._numbers)}"
        self._tree.create((NewSpec(name, prefix=prefix, namespace=namespace),))
        load = Load(name, namespace, prefix.cache_salt, found.num_cached)
        self._loads.add(load)
        self._hold(load, found)
        return load

    def _hold(self, load: Load, found: Found) -> None:
        """Add the records that were found meanwhile: none gives way any more."""
        for record in found.records[len(load.records) :]:
            self._by_id[record.id] = load
            if record.tier == "host":
                record.entry.holds += 1
            load.records.append(record)

    def _load_found(
        self, load: Load, found: Found, looking: Iterator[None], ends: float
    ) -> Generator[Slice, Any, None]:
        """Load records while more are looked up, and commit their pages; a piece of this at once,
        between which others have their turns."""
        can_grow, is_known, has_waited = True, False, False
        while not load.is_over and time.monotonic() < ends:
            if can_grow and len(load.pages) < len(load.records):
                if load.pages.size:
                    yield from self._give_way()
                can_grow = yield from self._grow(load, ends)
                if self.tiers.is_shared():
                    yield from self._give_way()
            is_busy = yield from self._feed(load, is_known)
            if len(load.labels) > load.committed:
                if not has_waited or self.tiers.is_shared():
                    yield from self._give_way()
                self._commit(load, self.tiers.at_once if self.tiers.is_shared() else None)
                has_waited = False
            elif can_grow and not is_known:
                yield from self._give_way()
                for _ in range(1 if self.tiers.is_shared() else STEPS):
                    is_known = is_known or next(looking, looking) is looking
                self._hold(load, found)
            elif is_busy:
                has_waited = True
                yield waiting()
            else:
                return

    def _is_due(self) -> bool:
        """Whether the next piece of work may begin."""
        return not self.tiers.is_awaited() or time.monotonic() >= self._latest + MAX_DELAY_S

    def _give_way(self) -> Generator[Slice, Any, None]:
        """Let others have their turns until the next piece may begin."""
        self._waiting += 1
        try:
            yield empty_slice()
            while not self._is_due():
                yield waiting()
        finally:
            self._waiting -= 1
        self._latest, self._has_advanced = time.monotonic(), False

    def _grow(self, load: Load, ends: float) -> Generator[Slice, Any, bool]:
        """Take pages for records that have none; whether there was room for all."""
        tree, budget = self._tree, self._tree.budget
        wanted = len(load.records) - len(load.pages)
        count = min(wanted, budget.obtainable(budget.namespace(load.namespace)))
        while count:
            budget.most_evicted = EVICTED_AT_ONCE
            try:
                load.pages = np.concatenate((load.pages, tree.add_pages(load.name, count)))
                load.after = self.tiers.copies.mark()
                break
            except OutOfPages:
                return False
            except EvictionPaused:
                if time.monotonic() >= ends:
                    return False
            finally:
                budget.most_evicted = NO_LIMIT
            yield waiting()
        return count == wanted

    def _feed(self, load: Load, is_known: bool) -> Generator[Slice, Any, bool]:
        """Begin loads of records, all of which are found where `is_known`; whether any are left or
        on their way."""
        tiers = self.tiers
        while (
            load.asked < len(load.pages)
            and load.in_flight < BATCHES * tiers.copies.calls
            and not load.is_over
        ):
            first, tier = load.asked, load.records[load.asked].tier
            is_other = load.in_flight and load.records[first - 1].tier != tier
            if is_other or self.fetcher.is_full(tier):
                break  # batches of one tier end in order
            most = tiers.batch(len(load.pages) - first, is_known)
            stop = first + (most if tier == "host" else min(most, tiers.at_once))
            while load.asked < stop and load.records[load.asked].tier == tier:
                load.asked += 1
            self.fetcher.begin(load, slice(first, load.asked))
            if tiers.is_shared():
                yield from self._give_way()
        return bool(load.in_flight) or (load.asked < len(load.pages) and not load.is_over)

    def _commit(self, load: Load, most: int | None = None) -> None:
        """Commit the pages that are loaded (up to `most`), whose records others can use then."""
        first, stop = load.committed, len(load.labels)
        stop = stop if most is None else min(stop, first + most)
        try:
            for names, keep in runs_of(load, stop, self._tree.page_size):
                done = self._tree.commits.commit(load.name, names, keep) - load.num_cached
                load.committed = max(load.committed, done)
            load.is_over |= load.committed < stop
        except CoreError as error:
            LOG.debug("loaded pages are not committed: %s", error)
            load.is_over = True
        self._release(load.records[first : load.committed], is_in_pool=True)

    def _finish(self, load: Load) -> None:
        """Commit the pages that are loaded. The others are freed when the loader is done with
        them."""
        load.is_over = True
        self._commit(load)
        load.is_abandoned = bool(load.in_flight)
        if not load.is_abandoned:
            self._end(load)

    def _end(self, load: Load) -> None:
        """Free the hidden sequence: its committed pages stay cached."""
        self._loads.discard(load)
        self._tree.free((load.name,))
        self._release(load.records[load.committed :], is_in_pool=False)

    def _release(self, records: Sequence[Record], is_in_pool: bool) -> None:
        """Other loads can have these records."""
        for record in records:
            del self._by_id[record.id]
            if record.tier == "host":
                if is_in_pool and record.entry.is_ready:
                    self.tiers.host.use(record.entry, IN_POOL)
                self.tiers.host.release(record.entry)
