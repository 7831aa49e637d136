"""Records on their way up: threads copy them to pages of the pool, the engine's verifies them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np

from kernels.backend import DeviceLost, EndOfCopies, Int64, PagePlaces, UInt8
from service.core.values import Int32
from service.engine.tiers.disk import TASKS
from service.engine.tiers.loads import Load, Miss, Record
from service.engine.tiers.tiers import Tiers
from service.tiers.records import InvalidRecord
from service.tiers.worker import Worker

LOG: Final = logging.getLogger("attnd.tiers")


class Fetcher:
    """Belongs to the engine's thread. `ended` gets each abandoned load once it has no batch under
    way."""

    def __init__(
        self, tiers: Tiers, wake: Callable[[], None], ended: Callable[[Load], None]
    ) -> None:
        self.tiers, self._ended = tiers, ended
        self._spare: SimpleQueue[UInt8] = SimpleQueue()
        """Blocks for a batch of records from disk, one set for each thread."""
        for _ in range(tiers.copies.calls):
            self._spare.put(tiers.blocks(tiers.at_once))
        how = TASKS, wake, tiers.copies.calls, DeviceLost
        self._workers = {
            "host": Worker("tiers-loader", *how),
            "disk": Worker("tiers-reader", *how),
        }
        """A task copies a batch from its tier; its end verifies it. Loads from host memory wait for
        no disk."""

    @property
    def count(self) -> int:
        """Batches under way."""
        return sum(worker.count for worker in self._workers.values())

    @property
    def is_polled(self) -> bool:
        """Whether the engine's thread has to look for the next end."""
        return self._workers["host"].is_polled

    @property
    def is_reading(self) -> bool:
        """Whether threads read the disk."""
        return self._workers["disk"].count > 0

    def is_full(self, tier: str) -> bool:
        return self._workers[tier].is_full

    def take_done(self, most: int | None) -> bool:
        """Take the ends of batches, up to `most` of each tier; whether there were any."""
        return max(worker.take_done(most) for worker in self._workers.values())

    def close(self, ends: float) -> None:
        for worker in self._workers.values():
            worker.close(ends)

    def begin(self, load: Load, batch: slice) -> None:
        """Begin to write a batch of records, all of one tier, to their pages."""
        records, pages, tiers = load.records[batch], load.pages[batch], self.tiers
        load.in_flight += 1
        began = time.monotonic()
        if records[0].tier == "disk":
            self._workers["disk"].add(partial(self._read, load, records, pages, began))
            return
        slots = np.array([one.entry.slot for one in records])
        places = PagePlaces(tiers.records, slots, tiers.layout.head_bytes)
        wait = tiers.copies.write(pages, places, load.after)
        task = partial(self._wait, load, records, slots, wait, began)
        self._workers["host"].add(task, None if tiers.is_shared() else wait.has_come)

    def _wait(
        self,
        load: Load,
        records: Sequence[Record],
        slots: Int64,
        wait: EndOfCopies,
        began: float,
    ) -> Callable[[], None]:
        """In a thread of the loader, or once the copies are done."""
        digests, tiers = wait(), self.tiers
        heads = tiers.records[slots, : tiers.layout.head_bytes].data
        return partial(self._loaded, load, records, heads, digests, None, began)

    def _read(
        self, load: Load, records: Sequence[Record], pages: Int32, began: float
    ) -> Callable[[], None]:
        """In a thread of the loader: read records from the disk, and write them to their pages."""
        spare, tiers = self._spare.get(), self.tiers
        try:
            count, miss = self._read_some(load, records, spare)
            places = PagePlaces(spare, np.arange(count), tiers.layout.head_bytes)
            digests = tiers.copies.write(pages[:count], places, load.after)()
            heads = spare[:count, : places.skip].copy().data
        finally:
            self._spare.put(spare)
        return partial(self._loaded, load, records, heads, digests, miss, began)

    def _read_some(
        self, load: Load, records: Sequence[Record], blocks: UInt8
    ) -> tuple[int, Miss | None]:
        """Read records from the disk: how many, and why the next one is a miss."""
        for number, record in enumerate(records):
            if load.is_over:
                return number, None
            if (disk := self.tiers.disk.store) is None:
                return number, "evicted"
            try:
                disk.read(record.entry, blocks[number].data)
            except InvalidRecord:
                return number, "corrupt" if disk.has(record.entry) else "evicted"
            except OSError:
                return number, "unreadable"
        return len(records), None

    def _loaded(
        self,
        load: Load,
        records: Sequence[Record],
        heads: memoryview,
        digests: Sequence[bytes],
        miss: Miss | None,
        began: float,
    ) -> None:
        """Records were written to their pages, whose digests are there now: those of records that
        are invalid, and later ones, are never committed. `heads`: uint8 `[n, head_bytes]`. `miss`:
        why the next record was not."""
        load.in_flight -= 1
        labels: list[bytes] = []
        if load.is_over:
            digests = ()
        every, size = bytes(heads), self.tiers.layout.head_bytes
        for at, (record, own) in enumerate(zip(records, digests, strict=False)):
            if (label := self._verify(record, every[at * size : (at + 1) * size], own)) is None:
                is_there = record.tier == "host" or self.tiers.disk.find(record.id) is record.entry
                miss = "corrupt" if is_there else "evicted"
                break
            labels.append(label)
        if labels:
            self.tiers.count(records[0].tier, "out", len(labels), began)
        if not load.is_over:
            load.labels += labels
            if miss is not None:
                load.is_over = True
                self._report(records[len(labels)], miss)
        if load.is_abandoned and not load.in_flight:
            self._ended(load)

    def _verify(self, record: Record, head: bytes, digests: bytes) -> bytes | None:
        """The label of the record of a head, whose payload has these digests where it was loaded
        to; None where it is not what was stored."""
        layout = self.tiers.layout
        try:
            label, length = layout.check(head, record.id, record.entry.namespace, digests)
        except InvalidRecord:
            return None
        is_same = length == layout.payload_bytes and label.startswith(record.entry.tag)
        return label if is_same else None

    def _report(self, record: Record, miss: Miss) -> None:
        """A record could not be loaded: unless it gave way to others, it is deleted."""
        self.tiers.reports.miss(miss)
        if miss == "evicted":
            return
        LOG.warning("a record in the %s tier is %s: it is deleted", record.tier, miss)
        if record.tier == "disk":
            self.tiers.disk.drop([record.entry])
        elif record.entry.is_ready:
            self.tiers.drop_from_host(record.entry)
