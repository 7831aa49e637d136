"""The world of a disk: the record store of the tiers on files that tear, flip, fill and lie.

What is read is what was kept, or a miss; what was durable is there after a kill or a loss of power.
SQLite's own files are real: their commits are durable once they return.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from service.tiers.files import Files
from service.tiers.record_store import RecordStore
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import Entry
from tests.world.calls import check
from tests.world.simulation import Plan, Result

LAYOUT: Final = RecordLayout(8, 200, b"model and shape.")
MEMORY: Final = "/dev/shm" if os.path.isdir("/dev/shm") else None
NUM_KEYS: Final = 24
SPACES: Final = ("ours", "theirs")
RESTARTS: Final = ("restart", "kill", "power loss")
OPERATIONS: Final = (*("put", "get") * 9, *("drop", "clear", "limit") * 3, *RESTARTS)


class SimFiles(Files):
    """Real files below a cache that is lost with the power."""

    def __init__(self, order: random.Random, fault: Callable[[str, float], bool]) -> None:
        self.order, self.fault = order, fault
        self.unsynced: list[tuple[int, int, bytes]] = []
        """Descriptor, offset and old bytes of writes that are not on the device."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        size = len(into)
        if self.fault("disk reads short", 0.05):
            size = self.order.randint(1, size)
        if self.fault("disk fails to read", 0.01):
            raise OSError(errno.EIO, "a fault of the disk")
        count = super().read(fd, into[:size], offset)
        if count and self.fault("disk flips a bit", 0.02):
            into[self.order.randrange(count)] ^= 1 << self.order.randrange(8)
        return count

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.fault("disk is full", 0.02):
            raise OSError(errno.ENOSPC, "the disk is full")
        if self.fault("disk writes short", 0.05):
            data = data[: self.order.randint(1, len(data))]
        self.unsynced.append((fd, offset, os.pread(fd, len(data), offset)))
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self.fault("disk fails to sync", 0.01):
            raise OSError(errno.EIO, "a fault of the disk")
        if not self.fault("disk lies about a sync", 0.01):
            self.unsynced = []

    def lose_power(self) -> None:
        """Writes since the last sync are lost, or torn, in any order."""
        for fd, offset, old in reversed(self.unsynced):
            kept = self.order.choice((0, len(old), self.order.randint(0, len(old))))
            os.pwrite(fd, old[kept:], offset + kept)
        self.unsynced = []


class DiskWorld:
    """One run: `statements` operations of each of the plan's callers, one after another."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.result = plan, Result(plan)
        self.order = random.Random(f"{plan.seed} disk")
        self.luck = random.Random(f"{plan.seed} faults")
        self.kept: dict[bytes, str] = {}
        """Namespaces of records that are certainly there, by key."""
        self.is_honest = True
        """Whether no fault can have cost a record."""
        self.room = self.order.choice((6, 12, 30)) * LAYOUT.block_bytes
        self.files = SimFiles(self.order, self.fault)
        self.store: RecordStore

    def fault(self, name: str, share: float) -> bool:
        if not self.plan.faults or self.luck.random() >= share:
            return False
        self.result.faults[name] += 1
        self.result.trace.append(name)
        self.is_honest = self.is_honest and name != "disk lies about a sync"
        return True

    def run(self) -> Result:
        with tempfile.TemporaryDirectory(prefix="attnd-disk-", dir=MEMORY) as folder:
            self.path, self.number = Path(folder), 0
            self.open()
            try:
                for number in range(self.plan.statements * self.plan.callers):
                    if number not in self.plan.skipped:
                        self.order.seed(f"{self.plan.seed} {number}")
                        self.step()
                self.restart("restart")
            except Exception as error:
                self.result.error = f"{type(error).__name__}: {error}"
            self.store.close()
        return self.result

    def open(self) -> None:
        self.files.unsynced = []
        path = self.path / str(self.number)
        self.store = RecordStore(path, self.room, LAYOUT, self.files, self.evicted)

    def evicted(self, entry: Entry) -> None:
        self.kept.pop(entry.key, None)

    def step(self) -> None:
        order = self.order
        name = order.choice(OPERATIONS)
        self.result.rounds += 1
        self.result.trace.append(name)
        before = Counter(self.result.faults)
        code = "ok"
        try:
            if name in RESTARTS:
                self.restart(name)
            else:
                getattr(self, f"_{name}")()
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "EIO")
            self.kept = {k: v for k, v in self.kept.items() if self.store.find(k) is not None}
            self.restart("kill")  # a store that has failed is not written to any more
        self.result.coverage[name, code] += 1
        for fault in self.result.faults - before:
            self.result.coverage[name, fault] += 1

    def _put(self) -> None:
        keys = {self.order.randrange(NUM_KEYS) for _ in range(self.order.randint(1, 3))}
        records = [record(key) for key in sorted(keys)]
        placed = self.store.put(records)
        for one, is_kept in zip(records, placed, strict=True):
            if is_kept:
                self.kept[one.key] = one.namespace

    def _get(self) -> None:
        self.read(self.order.randrange(NUM_KEYS))

    def read(self, number: int) -> None:
        wanted, before = record(number), self.result.faults["disk flips a bit"]
        entry = self.store.find(wanted.key)
        certain = self.is_honest and wanted.key in self.kept
        check(entry is not None or not certain, "a durable record is missing:", number)
        if entry is None:
            return
        check(entry.namespace == wanted.namespace, "a record of another namespace:", number)
        block = memoryview(bytearray(LAYOUT.block_bytes))
        try:
            found = self.store.get(entry, block)
        except InvalidRecord:
            flipped = self.result.faults["disk flips a bit"] > before
            check(flipped or not certain, "a durable record is damaged:", number)
            self.store.drop([entry])
            self.kept.pop(wanted.key, None)
            return
        check(found is not None, "a record gave way to none:", number)
        check(bytes(block) == bytes(wanted.block), "a wrong record was read:", number)

    def _drop(self) -> None:
        entry = self.store.find(key_of(self.order.randrange(NUM_KEYS)))
        if entry is not None:
            self.store.drop([entry])
            self.kept.pop(entry.key, None)

    def _clear(self) -> None:
        """Nothing of a namespace is on the disk afterwards."""
        space = self.order.choice(SPACES)
        self.kept = {key: owner for key, owner in self.kept.items() if owner != space}
        self.store.clear(space)
        (path,) = self.store.path.glob("*.data")
        if self.is_honest:
            check(space.encode() not in path.read_bytes(), "bytes are left of", space)

    def _limit(self) -> None:
        limit = self.order.choice((None, 2 * LAYOUT.block_bytes))
        self.store.set_limit(self.order.choice(SPACES), limit)

    def restart(self, how: str) -> None:
        """The next store has a copy of what the one before left on its disk."""
        old = self.store
        if how == "restart":
            old.close()
        elif how == "power loss":
            self.files.lose_power()
        here, self.number = self.path / str(self.number), self.number + 1
        shutil.copytree(here, self.path / str(self.number))
        if how != "restart":
            old.close()
        shutil.rmtree(here)
        self.open()
        for number in range(NUM_KEYS):
            try:
                self.read(number)
            except OSError:
                continue


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def record(number: int) -> NewRecord:
    """The record of a key, which is always the same, as for a page of tokens."""
    block: Any = memoryview(bytearray(LAYOUT.block_bytes))
    space = SPACES[number % 2]
    payload = f"{space} {number} ".encode() * 12
    LAYOUT.payload(block)[: len(payload)] = payload
    LAYOUT.seal(block, key_of(number), space, b"label", len(payload))
    return NewRecord(key_of(number), space, 35, b"tag", block)
