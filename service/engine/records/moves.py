"""Copies of records' bytes by threads: between the caller's memory, host memory and the disk.

A digest covers a record's id, which has its namespace, stamp and key, its size and its bytes. It is
computed of the bytes where they are used, some at a time, while the processor's cache has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from service.engine.work.fair import FairQueue
from service.tiers.record_store import RecordStore
from service.tiers.records import InvalidRecord, digest_of
from service.tiers.shelf import Entry, stretches_of
from service.tiers.worker import Worker

Bytes = NDArray[np.uint8]
Outcome = Literal["stored", "found", "corrupt", "unreadable", "evicted"]

EXTENT: Final = 2**16
"""Bytes of a place; a record takes as many places as it needs."""
CHUNK: Final = 2**18
"""Bytes that are copied and digested at a time."""
WAITING: Final = 2
"""Batches that one thread has, the one under way among them: others wait in fair turns."""


class Abandoned(Exception):
    """The call of a batch was stopped."""


@dataclass(slots=True, eq=False)
class Move:
    """One record of `size` bytes to move: `memory` is the caller's. `digest` is the record's; of
    one to store, once it is copied."""

    entry: Entry
    size: int
    memory: Bytes
    digest: bytes = b""
    outcome: Outcome | None = None


@dataclass(slots=True, eq=False)
class MoveBatch:
    """Records that one thread moves. `released` is called in the engine's thread at the end, also
    of one that was abandoned."""

    namespace: str
    moves: Sequence[Move]
    run: Callable[[MoveBatch], None]
    released: Callable[[MoveBatch], None]
    is_done: bool = False
    """Whether its bytes are where they belong, ..."""
    is_over: bool = False
    """... and the engine's thread knows."""
    is_abandoned: bool = False
    lock: Lock = field(default_factory=Lock)

    @property
    def num_bytes(self) -> int:
        return sum(move.size for move in self.moves)

    def abandon(self) -> None:
        """Neither read nor write the caller's memory any more, from the return on."""
        with self.lock:
            self.is_abandoned = True
            for move in self.moves:
                move.memory = EMPTY

    def copy(self, to: Bytes, source: Bytes) -> None:
        """Copy some bytes; raises `Abandoned`."""
        with self.lock:
            if self.is_abandoned:
                raise Abandoned
            to[...] = source

    def task(self) -> Callable[[], None]:
        """In a worker's thread."""
        with suppress(Abandoned):
            self.run(self)
        self.is_done = True
        return self.end

    def end(self) -> None:
        self.released(self)
        self.is_over = True


EMPTY: Final[Bytes] = np.empty(0, np.uint8)
ZERO: Final[Bytes] = np.zeros(1, np.uint8)


class Mover:
    """Threads that move batches; each namespace has its turns, by bytes."""

    def __init__(self, name: str, wake: Callable[[], None], threads: int) -> None:
        self._worker = Worker(name, WAITING, wake, threads)
        self._turns: FairQueue[MoveBatch] = FairQueue()

    @property
    def is_busy(self) -> bool:
        return bool(self._worker.count or self._turns.count)

    def add(self, batch: MoveBatch) -> None:
        self._turns.append(batch.namespace, batch)
        self._start()

    def advance(self) -> None:
        """Take the ends of batches, and start the next ones."""
        self._worker.take_done()
        self._start()

    def close(self, ends: float) -> None:
        while self._turns.count:
            self._worker.add(self._turns.pop().task)
        self._worker.close(ends)
        self._worker.take_done()

    def _start(self) -> None:
        while self._turns.count and not self._worker.is_full:
            batch = self._turns.pop()
            self._turns.charge(batch.namespace, float(batch.num_bytes))
            self._worker.add(batch.task)


def pieces(entry: Entry, size: int) -> Iterator[tuple[int, int]]:
    """Where a record's bytes are, in order: the first of each piece, and its length."""
    for first, count in stretches_of(entry.slots):
        begin, end = first * EXTENT, min((first + count) * EXTENT, first * EXTENT + size)
        size -= end - begin
        for at in range(begin, end, CHUNK):
            yield at, min(CHUNK, end - at)


def store(batch: MoveBatch, host: Bytes) -> None:
    """Copy records from the caller's memory to host memory."""
    for move in batch.moves:
        memory = move.memory
        digest, done = digest_of(move.entry.key, move.size), 0
        for at, count in pieces(move.entry, move.size):
            place = host[at : at + count]
            batch.copy(place, memory[done : done + count])
            digest.update(place.data)
            done += count
        move.digest, move.outcome = digest.digest(), "stored"


Source = Callable[[int, int], Bytes]
"""Reads bytes of a tier: the first, and their number. Can raise `InvalidRecord`, `OSError`."""


def load(batch: MoveBatch, source: Source, has: Callable[[Entry], bool]) -> None:
    """Copy records from a tier to the caller's memory, and verify them there. `has` says whether
    the tier still has a record that was found."""
    for move in batch.moves:
        try:
            is_intact = load_one(batch, move, source)
        except OSError:
            move.outcome = "unreadable"
            continue
        except InvalidRecord:
            is_intact = False
        if is_intact:
            move.outcome = "found"
        elif not has(move.entry):
            move.outcome = "evicted"
        else:
            is_damaged = not is_whole(move.entry, move.size, move.digest, source)
            move.outcome = "corrupt" if is_damaged else "unreadable"


def load_one(batch: MoveBatch, move: Move, source: Source) -> bool:
    """Whether the record's bytes are, in the caller's memory, what was stored."""
    memory = move.memory
    digest, done = digest_of(move.entry.key, move.size), 0
    for at, count in pieces(move.entry, move.size):
        place = memory[done : done + count]
        batch.copy(place, source(at, count))
        digest.update(place.data)
        done += count
    return digest.digest() == move.digest


def blank(batch: MoveBatch) -> None:
    """Overwrite the places of records that were not read: no caller reads there what others had."""
    for move in batch.moves:
        batch.copy(move.memory, ZERO)


def is_whole(entry: Entry, size: int, digest: bytes, source: Source) -> bool:
    """Whether a tier's own bytes are what was stored: the caller's memory can have been written to
    meanwhile."""
    found = digest_of(entry.key, size)
    try:
        for at, count in pieces(entry, size):
            found.update(source(at, count).data)
    except (InvalidRecord, OSError):
        return False
    return found.digest() == digest


def of_host(host: Bytes) -> Source:
    return lambda at, count: host[at : at + count]


def of_disk(disk: RecordStore) -> Source:
    """Through memory of the thread's own: a read of a disk that hangs writes to no caller's."""
    scratch = np.empty(CHUNK, np.uint8)

    def read(at: int, count: int) -> Bytes:
        disk.read_part(scratch[:count].data, at)
        return scratch[:count]

    return read
