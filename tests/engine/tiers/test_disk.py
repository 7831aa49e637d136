"""The tier on disk without an engine: the erasure of a namespace, piece by piece."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from service.engine.store.ledger import Ledger
from service.engine.tiers.disk import Disk
from service.tiers.record_store import RecordStore
from service.tiers.records import NewRecord, RecordLayout
from tests.harness.waiting import WAIT_S

LAYOUT = RecordLayout(40, 1000, b"model and shape.")


def record(number: int) -> NewRecord:
    key, block = number.to_bytes(16, "little"), memoryview(bytearray(LAYOUT.block_bytes))
    LAYOUT.seal(block, key, "a", b"label", 900)
    return NewRecord(key, "a", 35, b"tag", (block,))


def piece(disk: Disk) -> None:
    """Erases one piece."""
    disk.write_down()
    ends = time.monotonic() + WAIT_S
    while not disk.take_done(1):
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_clear_joins_one_that_waits_and_none_that_has_begun(tmp_path: Path) -> None:
    """The one that has begun would leave what was written since."""
    tiers: Any = SimpleNamespace(ledger=Ledger(), at_once=8, report=lambda: None)
    disk, ends = Disk(tiers, lambda: None), list[str]()
    with_room = 8 * LAYOUT.block_bytes
    disk.open(store := RecordStore(tmp_path / "tier", with_room, LAYOUT))
    try:
        store.put([record(1)])
        disk.clear("a", lambda error: ends.append("first"))
        disk.clear("a", lambda error: ends.append("joined"))
        piece(disk)
        store.put([record(2)])
        disk.clear("a", lambda error: ends.append("later"))
        disk.clear("b", lambda error: ends.append("another namespace"))
        while "joined" not in ends:
            piece(disk)
        assert ends[:2] == ["first", "joined"] and "later" not in ends
        while disk.is_busy:
            piece(disk)
        assert store.find(record(2).key) is None
        assert sorted(ends) == ["another namespace", "first", "joined", "later"]
    finally:
        disk.close(time.monotonic())
