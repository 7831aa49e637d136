"""The world of a disk: the record store of the tiers on files that tear, flip, fill and lie.

What is read is what was kept, or a miss; what was durable survives. SQLite's files are among these.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from service.tiers.record_store import RecordStore
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import Entry
from tests.world.oracle.calls import SPACES, check
from tests.world.simulation import Plan, Result, Run
from tests.world.tiers import MEMORY, SimFiles

LAYOUT: Final = RecordLayout(8, 200, b"model and shape.")
NUM_KEYS: Final = 24
RARE: Final = ("restart", "kill", "power loss")
OPERATIONS: Final = (*("put", "get") * 9, *("drop", "clear", "limit") * 3, *RARE)


class DiskWorld(Run):
    """One run: `statements` operations of each of the plan's callers, one after another."""

    store: RecordStore

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.order = random.Random(f"{plan.seed} disk")
        self.kept: dict[bytes, str] = {}  # namespaces of records that are certainly there, by key
        self.room = self.order.choice((6, 12, 30)) * LAYOUT.block_bytes
        self.files = SimFiles(self.order, self.fault)

    @property
    def is_honest(self) -> bool:
        """Whether no fault can have cost a record."""
        return "disk lies about a sync" not in self.faults

    def run(self) -> Result:
        with ExitStack() as stack:
            for replaced in self.files.patches():
                stack.enter_context(patch.object(*replaced))
            folder = stack.enter_context(tempfile.TemporaryDirectory("attnd-disk", dir=MEMORY))
            self.open(Path(folder) / "0")
            try:
                for number in range(self.plan.statements * self.plan.callers):
                    if number not in self.plan.skipped:
                        self.order.seed(f"{self.plan.seed} {number}")
                        self.step()
                self.restart("restart")
            except Exception as error:
                self.fail(error)
            self.store.close()
        self.result.faults = Counter(self.faults)
        return self.result

    def open(self, path: Path) -> None:
        self.path, self.files.unsynced = path, {}
        self.store = self.files.open_store(path, self.room, LAYOUT, evicted=self.forget)

    def forget(self, entry: Entry) -> None:
        self.kept.pop(entry.key, None)

    def step(self) -> None:
        name, since, code = self.order.choice(OPERATIONS), len(self.faults), "ok"
        self.result.rounds += 1
        self.note(name)
        try:
            self.operate(name)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "EIO")
            self.kept = {k: v for k, v in self.kept.items() if self.store.find(k) is not None}
            self.restart("kill")  # a store that has failed is not written to any more
        self.count(name, code, since)

    def operate(self, name: str) -> None:
        order, store = self.order, self.store
        match name:
            case "put":
                keys = {order.randrange(NUM_KEYS) for _ in range(order.randint(1, 3))}
                records = [record(key) for key in sorted(keys)]
                for one, is_kept in zip(records, store.put(records), strict=True):
                    if is_kept:
                        self.kept[one.key] = one.namespace
            case "get":
                self.read(order.randrange(NUM_KEYS))
            case "drop":
                if (entry := store.find(record(order.randrange(NUM_KEYS)).key)) is not None:
                    store.drop([entry])
                    self.forget(entry)
            case "clear":
                space = order.choice(SPACES)
                self.kept = {key: owner for key, owner in self.kept.items() if owner != space}
                for _ in store.clear(space):
                    pass
                (path,) = store.path.glob("*.data")
                if self.is_honest:
                    check(space.encode() not in path.read_bytes(), "bytes are left of", space)
            case "limit":
                limit = order.choice((None, 2 * LAYOUT.block_bytes))
                store.set_limit(order.choice(SPACES), limit)
            case _:
                self.restart(name)

    def read(self, number: int) -> None:
        wanted, since = record(number), len(self.faults)
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
            is_flipped = "disk flips a bit" in self.faults[since:]
            check(is_flipped or not certain, "a durable record is damaged:", number)
            self.store.drop([entry])
            self.forget(entry)
            return
        check(found is not None, "a record gave way to none:", number)
        check(bytes(block) == b"".join(wanted.parts), "a wrong record was read:", number)

    def restart(self, how: str) -> None:
        """The next store has a copy of what the one before left on its disk."""
        old, here = self.store, self.path
        if how == "restart":
            old.close()
        elif how == "power loss":
            self.files.lose_power()
        there = here.with_name(str(int(here.name) + 1))
        shutil.copytree(here, there)
        if how != "restart":
            old.close()
        shutil.rmtree(here)
        self.open(there)
        for number in range(NUM_KEYS):
            with suppress(OSError):
                self.read(number)


def record(number: int) -> NewRecord:
    """The record of a key, which is always the same, as for a page of tokens."""
    block: Any = memoryview(bytearray(LAYOUT.block_bytes))
    key, space = number.to_bytes(16, "little"), SPACES[number % 2]
    payload = f"{space} {number} ".encode() * 12
    LAYOUT.payload(block)[: len(payload)] = payload
    LAYOUT.seal(block, key, space, b"label", len(payload))
    return NewRecord(key, space, 35, b"tag", (block,))
