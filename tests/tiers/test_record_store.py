"""The record store: reads give the kept bytes, or a miss; quotas, erasure, restarts, faults."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from faulty_files import FaultyFiles
from xxhash import xxh3_128_digest

from service.tiers import other_records
from service.tiers.index import Index
from service.tiers.record_store import RecordStore, StoreUnavailable
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import PINNED

FLIPS = int(os.environ.get("FLIPS", "2000"))
"""Flipped bits, and other faults, of a test; `FLIPS=100000 FAULTS=100000` takes minutes."""
FAULTS = int(os.environ.get("FAULTS", "2000"))
LAYOUT: Final = RecordLayout(40, 1000, b"model and shape.")
ROOM: Final = 8 * LAYOUT.block_bytes
SECRET: Final = b"keys and values "


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[RecordStore]:
    opened = RecordStore(tmp_path / "tier", ROOM, LAYOUT, files)
    yield opened
    opened.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload_of(number: int) -> bytes:
    return SECRET + random.Random(number).randbytes(900)


def record(number: int, namespace: str = "a", rank: int = 35, **changes: Any) -> NewRecord:
    block = memoryview(bytearray(LAYOUT.block_bytes))
    payload = payload_of(number)
    LAYOUT.payload(block)[: len(payload)] = payload
    LAYOUT.seal(block, key_of(number), namespace, b"label", len(payload))
    return NewRecord(key_of(number), namespace, rank, b"tag", (block,))


def put(store: RecordStore, *numbers: int, **how: Any) -> list[bool]:
    return store.put([record(number, **how) for number in numbers])


def get(store: RecordStore, number: int) -> bytes | None:
    """The payload of a record; None where there is none."""
    entry = store.find(key_of(number))
    if entry is None:
        return None
    block = memoryview(bytearray(LAYOUT.block_bytes))
    found = store.get(entry, block)
    if found is None:
        return None
    label, length = found
    assert label == b"label"
    return bytes(LAYOUT.payload(block)[:length])


def clear(store: RecordStore, namespace: str) -> int:
    """Clear a namespace to the end; the number of its records."""
    pieces = store.clear(namespace)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return int(end.value)


def kept(store: RecordStore) -> list[int]:
    return [number for number in range(64) if store.find(key_of(number)) is not None]


def reopened(store: RecordStore, layout: RecordLayout = LAYOUT, room: int = ROOM) -> RecordStore:
    store.close()
    return RecordStore(store.path, room, layout)


def data_of(store: RecordStore) -> bytes:
    """All bytes of all files in the directory."""
    return b"".join(one.read_bytes() for one in store.path.iterdir())


def test_a_record_that_gives_way_to_others_of_its_own_write_is_not_durable(
    store: RecordStore,
) -> None:
    store.set_limit("a", 2 * LAYOUT.block_bytes)
    put(store, 1)
    put(store, 2)
    placed = put(store, 1, 3, 4)
    assert placed == [get(store, number) is not None for number in (1, 3, 4)]
    assert placed[0] is False


def test_a_record_is_read_as_it_was_kept(store: RecordStore) -> None:
    assert put(store, 1, 2) == [True, True]
    assert (get(store, 1), get(store, 2), get(store, 3)) == (payload_of(1), payload_of(2), None)


def test_a_record_is_kept_once(store: RecordStore) -> None:
    assert put(store, 1) + put(store, 1, 1) == [True, True, True]
    assert store.count() == 1


def test_records_and_notes_survive_a_restart(store: RecordStore) -> None:
    put(store, 1, 2)
    store.put((), {"quota": "3"})
    store.put((), {"other": "4"})
    store.put((), {"other": None})
    again = reopened(store)
    assert (get(again, 1), get(again, 2), again.notes()) == (
        payload_of(1),
        payload_of(2),
        {"quota": "3"},
    )
    again.close()


def test_the_least_recently_used_record_gives_way_also_after_a_restart(store: RecordStore) -> None:
    put(store, *range(8))
    get(store, 0)
    again = reopened(store)
    put(again, 8)
    assert kept(again) == [0, 2, 3, 4, 5, 6, 7, 8]
    again.close()


def test_low_ranks_give_way_first_and_pinned_records_never(store: RecordStore) -> None:
    put(store, 0, rank=PINNED)
    put(store, *range(1, 7), rank=50)
    put(store, 7, rank=10)
    put(store, 8, 9, rank=50)
    assert kept(store) == [0, 2, 3, 4, 5, 6, 8, 9]
    for number in kept(store):
        entry = store.find(key_of(number))
        assert entry is not None
        store.use(entry, PINNED)
    assert put(store, 20) == [False]
    again = reopened(store)
    assert put(again, 20) == [False], "ranks survive a restart"
    again.close()


def test_a_namespace_stays_within_its_limit(store: RecordStore) -> None:
    store.set_limit("a", 2 * LAYOUT.block_bytes)
    put(store, 1, 2)
    put(store, 3)
    put(store, 4, 5, namespace="b")
    assert kept(store) == [2, 3, 4, 5]
    store.set_limit("a", 0)
    assert put(store, 6) == [False]


def test_the_namespace_above_its_share_gives_way(store: RecordStore) -> None:
    put(store, 1, 2, namespace="b")
    put(store, *range(10, 16))
    put(store, *range(20, 26))
    assert {1, 2} <= set(kept(store)), "b has less than its share"
    for number in range(30, 36):
        put(store, number, namespace="b")
    numbers = set(kept(store))
    assert (len(numbers), len(numbers & {1, 2, *range(30, 36)})) == (8, 4)


def test_evictions_are_reported(tmp_path: Path) -> None:
    dropped: list[bytes] = []
    store = RecordStore(tmp_path, ROOM, LAYOUT, evicted=lambda entry: dropped.append(entry.key))
    for first in range(0, 10, 2):
        put(store, first, first + 1)
    assert dropped == [key_of(0), key_of(1)]
    store.close()


def test_cleared_records_leave_no_byte_behind(store: RecordStore) -> None:
    put(store, *range(6))
    put(store, 6, 7, namespace="b")
    put(store, 8, 9, namespace="b")  # two of a's give way, and their room is b's
    store.drop([entry for n in (2, 3) if (entry := store.find(key_of(n)))])
    assert clear(store, "a") == 2
    data = data_of(store)
    assert all(payload_of(number) not in data for number in range(6))
    assert all(payload_of(number) in data for number in range(6, 10))
    assert [get(store, n) for n in range(6, 10)] == [payload_of(n) for n in range(6, 10)]


def test_places_of_unknown_content_are_erased_with_any_namespace(store: RecordStore) -> None:
    put(store, 1, 2)
    store.drop([entry for n in (1, 2) if (entry := store.find(key_of(n)))])
    again = reopened(store)
    clear(again, "a")
    assert SECRET not in data_of(again)
    again.close()


def test_only_the_owner_can_read_the_files(store: RecordStore) -> None:
    put(store, 1)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in store.path.iterdir()} == {0o600}


def test_a_directory_of_another_user_is_refused(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could read what is written there."""
    store.close()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreUnavailable, match=f"belongs to user {owner}: name another path"):
        RecordStore(store.path, ROOM, LAYOUT)


def test_a_link_in_place_of_a_file_is_not_followed(store: RecordStore, tmp_path: Path) -> None:
    store.close()
    data = store.path / f"{LAYOUT.block_bytes}.data"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        RecordStore(store.path, ROOM, LAYOUT)


def test_a_link_in_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    """Another user can plant one in a directory for temporary files; its target stays as it is."""
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "tier").symlink_to(tmp_path / "target")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        RecordStore(tmp_path / "tier", ROOM, LAYOUT)
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o755
    assert not [*(tmp_path / "target").iterdir()]


@pytest.mark.parametrize("name", ["tier", "new/tier"])
def test_a_parent_that_others_can_write_needs_the_sticky_bit(tmp_path: Path, name: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StoreUnavailable, match=f"others can write to {shared}: chmod o-w it"):
        RecordStore(shared / name, ROOM, LAYOUT)
    assert not [*shared.iterdir()]
    shared.chmod(0o1777)
    RecordStore(shared / name, ROOM, LAYOUT).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("planted", ["parent", "file"])
def test_what_another_user_planted_is_refused(tmp_path: Path, planted: str) -> None:
    link, path = tmp_path / "link", tmp_path / "tier"
    link.symlink_to(tmp_path)
    path.mkdir()
    (path / "1.index-wal").write_text("")
    os.chown(link if planted == "parent" else path / "1.index-wal", 7, 7, follow_symlinks=False)
    found = {"parent": f"{link} is a link of user 7", "file": "1.index-wal belongs to user 7"}
    with pytest.raises(StoreUnavailable, match=found[planted]):
        RecordStore(link / "tier", ROOM, LAYOUT)


def test_a_second_service_is_refused_in_one_line(store: RecordStore) -> None:
    with pytest.raises(StoreUnavailable, match="another service uses it: name another path") as no:
        RecordStore(store.path, ROOM, LAYOUT)
    assert "\n" not in str(no.value)
    put(store, 1)
    assert get(store, 1) == payload_of(1)


def test_a_path_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"cannot be used.*name another path"):
        RecordStore(tmp_path / "file" / "tier", ROOM, LAYOUT)


def test_too_little_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"one record takes {LAYOUT.block_bytes}"):
        RecordStore(tmp_path, LAYOUT.block_bytes - 1, LAYOUT)


def test_records_with_another_stamp_are_ignored_and_give_way(store: RecordStore) -> None:
    put(store, *range(8))
    other = reopened(store, RecordLayout(40, 1000, b"another model   "))
    assert (kept(other), other.count()) == ([], 0)
    put(other, 1)
    assert (kept(other), other.count()) == ([1], 1)
    back = reopened(other)
    assert len(kept(back)) == back.count() == 7
    assert all(get(back, number) == payload_of(number) for number in kept(back))
    back.close()


def test_files_of_another_geometry_stay_until_their_room_is_needed(store: RecordStore) -> None:
    put(store, *range(6))
    small = RecordLayout(40, 100, b"model and shape.")
    other = reopened(store, small)
    assert (store.path / f"{LAYOUT.block_bytes}.data").exists()
    blocks = []
    for number in range(ROOM // small.block_bytes):
        block = memoryview(bytearray(small.block_bytes))
        small.seal(block, key_of(number), "a", b"", 100)
        blocks.append(NewRecord(key_of(number), "a", 35, b"", (block,)))
    other.put(blocks[:1])
    assert (store.path / f"{LAYOUT.block_bytes}.data").exists()
    other.put(blocks)
    assert not (store.path / f"{LAYOUT.block_bytes}.data").exists()
    other.close()


@pytest.mark.parametrize("how", ["put", "drop", "clear"])
def test_rows_are_gone_for_good_before_their_places_are_written_to(
    store: RecordStore, how: str
) -> None:
    """SQLite syncs its log only where `synchronous` is full."""
    put(store, *range(8))
    statements: list[str] = []
    store._index._db.set_trace_callback(statements.append)
    if how == "put":
        put(store, 8)
    elif how == "drop":
        store.drop(store.records()[:1])
        put(store, 8)
    else:
        clear(store, "a")
    store._index._db.set_trace_callback(None)
    deleted = next(at for at, one in enumerate(statements) if one.startswith("delete"))
    levels = [one for one in statements[:deleted] if "synchronous" in one]
    assert levels[-1] == "pragma synchronous = full"


def test_a_clear_erases_where_the_index_cannot_be_written(store: RecordStore) -> None:
    """And the next one removes its rows: else a restart would find records that are zeros."""
    put(store, 1)
    store._index._db.execute("pragma query_only = on")
    with pytest.raises(OSError, match="readonly"):
        clear(store, "a")
    assert SECRET not in data_of(store)
    store._index._db.execute("pragma query_only = off")
    clear(store, "a")
    again = reopened(store)
    assert kept(again) == []
    again.close()


class FullDisk(FaultyFiles):
    """A file that cannot grow beyond `room` bytes."""

    room = 2 * LAYOUT.block_bytes

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if offset >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fd, data[: self.room - offset], offset)


def test_a_clear_erases_a_full_disk(tmp_path: Path) -> None:
    """Places that could not be written to have no bytes, and need no room for zeros."""
    store = RecordStore(tmp_path, ROOM, LAYOUT, FullDisk())
    assert store.put([record(1), record(2)]) == [True, True]
    with pytest.raises(OSError, match="No space left"):
        store.put([record(number) for number in range(3, 7)])
    assert clear(store, "a") == 2
    store.close()
    assert not any((tmp_path / f"{LAYOUT.block_bytes}.data").read_bytes())


def test_a_clear_erases_what_it_can(store: RecordStore, files: FaultyFiles) -> None:
    store.put([record(number) for number in range(4)])
    files.write_error, files.writes_until_error = errno.EIO, 2
    with pytest.raises(OSError, match="EIO"):
        clear(store, "a")
    files.write_error = None
    clear(store, "a")
    assert not any((store.path / f"{LAYOUT.block_bytes}.data").read_bytes())


def test_a_clear_reaches_its_own_records_of_another_geometry(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other namespaces are there after a switch back."""
    monkeypatch.setattr(other_records, "DELETED_AT_ONCE", 2)
    monkeypatch.setattr(other_records, "ERASED_AT_ONCE", 1)
    put(store, 0, 1, 2)
    put(store, 3, 4, 5, namespace="b")
    store.drop([entry for entry in [store.find(key_of(5))] if entry])
    other = reopened(store, RecordLayout(40, 100, b"model and shape."))
    clear(other, "c")
    data = data_of(other)
    there = [payload_of(number) in data for number in range(6)]
    assert there == [True] * 5 + [False], "places without a record are erased with any namespace"
    clear(other, "a")
    data = data_of(other)
    assert [payload_of(number) in data for number in range(6)] == [False] * 3 + [True] * 2 + [False]
    back = reopened(other)
    assert (kept(back), get(back, 3), get(back, 4)) == ([3, 4], payload_of(3), payload_of(4))
    assert clear(back, "b") == 2
    assert SECRET not in data_of(back)
    back.close()


def test_a_clear_leaves_other_namespaces_records_of_another_stamp(store: RecordStore) -> None:
    put(store, 0, 1, 2)
    put(store, 3, 4, namespace="b")
    other = reopened(store, RecordLayout(40, 1000, b"another model   "))
    assert clear(other, "a") == 3
    back = reopened(other)
    assert kept(back) == [3, 4]
    back.close()


def test_files_of_others_are_left(store: RecordStore) -> None:
    mine = store.path / "mine.data"
    mine.write_bytes(b"text")
    again = reopened(store)
    clear(again, "a")
    put(again, *range(8))
    assert mine.read_bytes() == b"text"
    again.close()


def test_dropped_records_are_deleted_together_and_their_places_used_again(
    store: RecordStore,
) -> None:
    put(store, *range(8))
    store.drop([entry for n in range(7) if (entry := store.find(key_of(n)))])
    assert (kept(store), store.has_deleted) == ([7], True)
    statements: list[str] = []
    store._index._db.set_trace_callback(statements.append)
    assert put(store, 0, 1) == [True, True]
    store._index._db.set_trace_callback(None)
    assert (kept(store), statements.count("begin"), store.has_deleted) == ([0, 1, 7], 2, False)
    again = reopened(store)
    assert (kept(again), get(again, 0)) == ([0, 1, 7], payload_of(0))
    again.close()


def test_a_smaller_size_drops_the_records_beyond_it(store: RecordStore) -> None:
    put(store, *range(8))
    again = reopened(store, room=4 * LAYOUT.block_bytes)
    assert kept(again) == [0, 1, 2, 3]
    assert (again.path / f"{LAYOUT.block_bytes}.data").stat().st_size == ROOM // 2
    assert all(get(again, number) == payload_of(number) for number in range(4))
    again.close()


# Faults.


def test_short_reads_and_writes_are_continued(store: RecordStore, files: FaultyFiles) -> None:
    files.most = 7
    put(store, 1)
    assert get(store, 1) == payload_of(1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("when", [0, 1])
def test_a_write_that_fails_keeps_nothing(
    store: RecordStore, files: FaultyFiles, code: int, when: int
) -> None:
    put(store, 1)
    files.write_error, files.writes_until_error = code, when
    with pytest.raises(OSError) as raised:
        put(store, 2, 3)
    assert raised.value.errno == code
    assert (kept(store), get(store, 1)) == ([1], payload_of(1))
    files.write_error = None
    again = reopened(store)
    assert kept(again) == [1]
    again.close()


def test_a_sync_that_fails_keeps_nothing(store: RecordStore, files: FaultyFiles) -> None:
    files.sync_error = errno.EIO
    with pytest.raises(OSError):
        put(store, 1)
    assert kept(store) == []


def test_a_read_that_fails_is_an_error_of_that_record(
    store: RecordStore, files: FaultyFiles
) -> None:
    put(store, 1)
    files.read_error = errno.EIO
    with pytest.raises(OSError):
        get(store, 1)
    files.read_error = None
    assert get(store, 1) == payload_of(1)


def test_a_torn_write_is_a_miss(store: RecordStore, files: FaultyFiles) -> None:
    put(store, 1)
    files.lost_bytes = 300
    put(store, 2, 3)
    for number, reason in ((2, "corrupt"), (3, "torn")):
        with pytest.raises(InvalidRecord, match=reason):
            get(store, number)
    assert get(store, 1) == payload_of(1)


def test_no_flipped_bit_is_served(store: RecordStore) -> None:
    put(store, 1)
    path = store.path / f"{LAYOUT.block_bytes}.data"
    good = path.read_bytes()
    chosen = random.Random(5)
    for _ in range(FLIPS):
        bit = chosen.randrange(8 * len(good))
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([good[bit // 8] ^ 1 << bit % 8]))
            file.flush()
            with pytest.raises(InvalidRecord):
                get(store, 1)
            file.seek(bit // 8)
            file.write(good[bit // 8 : bit // 8 + 1])
    assert get(store, 1) == payload_of(1)


def test_random_faults_are_misses_or_errors(store: RecordStore, files: FaultyFiles) -> None:
    """Torn and short writes and reads, EIO, a full disk and flipped bits, in any order."""
    chosen = random.Random(FAULTS)
    path = store.path / f"{LAYOUT.block_bytes}.data"
    outcomes: Counter[str] = Counter()
    for _ in range(FAULTS):
        number, fault = chosen.randrange(20), chosen.randrange(7)
        files.most = chosen.randrange(1, 400) if fault == 0 else None
        files.lost_bytes = chosen.randrange(1, LAYOUT.block_bytes) if fault == 1 else 0
        files.write_error = chosen.choice((errno.EIO, errno.ENOSPC)) if fault == 2 else None
        files.read_error = errno.EIO if fault == 3 else None
        files.sync_error = errno.EIO if fault == 4 else None
        if fault == 5 and (size := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(at := chosen.randrange(size))
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << chosen.randrange(8)]))
        try:
            if chosen.random() < 0.5:
                put(store, number)
                outcomes["kept"] += 1
            elif store.find(key_of(number)) is not None:
                assert get(store, number) == payload_of(number)
                outcomes["right"] += 1
        except InvalidRecord as error:
            outcomes[error.reason] += 1
            store.drop([found for found in [store.find(key_of(number))] if found])
        except OSError:
            outcomes["error"] += 1
    print(f"{FAULTS} faults: {dict(outcomes)}")
    assert min(outcomes[one] for one in ("kept", "right", "corrupt", "error")) > 0


@pytest.mark.parametrize(
    "stolen",
    [("a", 2), ("b", 1)],
    ids=["another record of the namespace", "the key in another namespace"],
)
def test_a_record_in_the_place_of_another_is_a_miss(
    store: RecordStore, stolen: tuple[str, int]
) -> None:
    namespace, number = stolen
    put(store, 1)
    block = record(number, namespace).parts[0]
    (store.path / f"{LAYOUT.block_bytes}.data").write_bytes(block)
    with pytest.raises(InvalidRecord, match="foreign"):
        get(store, 1)


def test_a_directory_that_was_removed_is_an_error_of_writes(store: RecordStore) -> None:
    put(store, 1)
    shutil.rmtree(store.path)
    for write in (
        lambda: put(store, 2),
        lambda: clear(store, "a"),
        lambda: store.put((), {"x": "y"}),
    ):
        with pytest.raises(OSError, match="was removed or replaced"):
            write()
    assert get(store, 1) == payload_of(1), "the open file has it still"


def test_a_damaged_index_is_replaced_by_an_empty_one(store: RecordStore) -> None:
    put(store, *range(8))
    store.close()
    index = store.path / f"{LAYOUT.block_bytes}.index"
    index.write_bytes(b"\xff" * index.stat().st_size)
    again = RecordStore(store.path, ROOM, LAYOUT)
    assert kept(again) == []
    clear(again, "another")
    assert SECRET not in data_of(again)
    put(again, 1)
    assert get(again, 1) == payload_of(1)
    assert {stat.S_IMODE(one.stat().st_mode) for one in again.path.iterdir()} == {0o600}
    again.close()


@pytest.mark.parametrize(
    "change",
    [
        "update records set namespace = cast(namespace as blob)",
        "update records set namespace = 'b'",
        "update records set tag = x'00'",
        "update notes set value = cast(value as blob)",
        "update notes set name = 'quota/b'",
    ],
)
def test_damaged_entries_of_the_index_are_ignored(store: RecordStore, change: str) -> None:
    put(store, *range(8))
    store.put((), {"quota/a": "text"})
    store.close()
    index = sqlite3.connect(store.path / f"{LAYOUT.block_bytes}.index")
    with index:
        index.execute(change)
    index.close()
    again = RecordStore(store.path, 2 * ROOM, LAYOUT)
    assert (len(kept(again)), len(again.notes())) == ((8, 0) if "notes" in change else (0, 1))
    clear(again, "another")
    assert (SECRET in data_of(again)) == ("notes" in change), "their namespace is not known"
    again.close()


def test_flipped_bits_in_the_index_cost_records_at_most(store: RecordStore) -> None:
    put(store, 1, 2, 3)
    put(store, 4, namespace="b")
    store.put((), {"quota/a": "text"})
    store.close()
    data, index = (store.path / f"{LAYOUT.block_bytes}.{kind}" for kind in ("data", "index"))
    good, payloads, order = index.read_bytes(), data.read_bytes(), random.Random(2)
    for _ in range(FLIPS // 20):
        flipped = bytearray(good)
        flipped[order.randrange(len(good))] ^= 1 << order.randrange(8)
        index.write_bytes(flipped)
        again = RecordStore(store.path, ROOM, LAYOUT)
        assert again.notes() in ({}, {"quota/a": "text"})
        assert all(get(again, number) in (None, payload_of(number)) for number in range(1, 5))
        with suppress(OSError):  # the index is damaged where it was not read
            clear(again, "a")
            assert get(again, 4) in (None, payload_of(4))
            clear(again, "b")
        again.close()
        assert SECRET not in data.read_bytes()
        data.write_bytes(payloads)


def test_an_index_that_cannot_be_opened_now_is_not_replaced(store: RecordStore) -> None:
    put(store, 1)
    store.close()
    in_the_way = store.path / f"{LAYOUT.block_bytes}.index-wal"
    in_the_way.mkdir()
    with pytest.raises(StoreUnavailable, match="unable to open"):
        RecordStore(store.path, ROOM, LAYOUT)
    in_the_way.rmdir()
    again = RecordStore(store.path, ROOM, LAYOUT)
    assert get(again, 1) == payload_of(1)
    again.close()


WRITER: Final = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_record_store import LAYOUT, record, RecordStore
store = RecordStore(Path(sys.argv[1]), 200 * LAYOUT.block_bytes, LAYOUT)
number = 0
while True:
    store.put([record(number), record(number + 1)], {"newest": str(number + 2), str(number): None})
    old = store.find(record(max(0, number - 90)).key)
    store.drop([old] if old and number >= 90 else [])
    number += 2
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(6))
def test_all_that_was_durable_survives_a_kill(tmp_path: Path, seed: int) -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[2]), str(here.parents[2] / "client/src")]
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "tier"), *paths],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    durable = int(child.stdout.readline())
    ends = time.monotonic() + random.Random(seed).random() * 0.2
    while time.monotonic() < ends:
        durable = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    durable = max([durable, *map(int, child.stdout.read().split())])
    child.wait()
    child.stdout.close()
    store = RecordStore(tmp_path / "tier", 200 * LAYOUT.block_bytes, LAYOUT)
    for number in range(max(0, durable - 198), durable):
        is_dropped = number % 2 == 0 and number < durable - 88
        assert get(store, number) in (payload_of(number), None if is_dropped else b"")
    assert int(store.notes()["newest"]) >= durable
    store.close()


@pytest.mark.timing
def test_a_hundred_thousand_records_are_known_within_a_second(tmp_path: Path) -> None:
    layout = RecordLayout(0, 1, b"model and shape.")
    room = 100_000 * layout.block_bytes
    store = RecordStore(tmp_path, room, layout)
    block = memoryview(bytearray(layout.block_bytes))
    for first in range(0, 100_000, 1000):
        store.put(
            [NewRecord(key_of(n), "a", 35, b"tag", (block,)) for n in range(first, first + 1000)]
        )
    store.close()
    began = time.monotonic()
    again = RecordStore(tmp_path, room, layout)
    spent = time.monotonic() - began
    assert again.count() == 100_000
    again.close()
    assert spent < 1.0


def test_the_labels_of_a_record_must_fit() -> None:
    block = memoryview(bytearray(LAYOUT.block_bytes))
    for key, namespace, label, length in (
        (b"short", "a", b"", 0),
        (key_of(1), "a" * 65, b"", 0),
        (key_of(1), "a", b"l" * 41, 0),
        (key_of(1), "a", b"", 1001),
    ):
        with pytest.raises(ValueError, match="do not fit a record"):
            LAYOUT.seal(block, key, namespace, label, length)


def test_digests_of_a_payloads_segments_can_come_from_the_mover() -> None:
    layout = RecordLayout(40, 1000, b"model and shape.", 300)
    blocks = [memoryview(bytearray(layout.block_bytes)) for _ in range(2)]
    for block in blocks:
        layout.payload(block)[:] = payload_of(1)[:900] + bytes(100)
    payload = bytes(layout.payload(blocks[0]))
    digests = b"".join(xxh3_128_digest(payload[at : at + 300]) for at in range(0, 1000, 300))
    layout.seal(blocks[0], key_of(1), "a", b"label", 900)
    layout.seal(blocks[1], key_of(1), "a", b"label", 900, digests)
    assert blocks[0] == blocks[1]
    head = blocks[0][: layout.head_bytes]
    assert layout.check(head, key_of(1), "a", digests) == (b"label", 900)
    for at in range(len(digests)):
        wrong = bytes(byte ^ (number == at) for number, byte in enumerate(digests))
        with pytest.raises(InvalidRecord, match="corrupt"):
            layout.check(blocks[0], key_of(1), "a", wrong)
    layout.payload(blocks[0])[950] ^= 1
    with pytest.raises(InvalidRecord, match="corrupt"):
        layout.check(blocks[0], key_of(1), "a")


def test_a_record_that_is_read_unverified_is_known_to_be_there_still(store: RecordStore) -> None:
    put(store, 1)
    entry = store.find(key_of(1))
    assert entry is not None
    block = memoryview(bytearray(LAYOUT.block_bytes))
    store.read(entry, block)
    assert LAYOUT.check(block, key_of(1), "a") == (b"label", len(payload_of(1)))
    assert store.has(entry)
    store.drop([entry])
    assert not store.has(entry)


def test_the_umask_does_not_open_the_directory(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RecordStore(tmp_path / "tier", ROOM, LAYOUT).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700


def test_an_index_that_cannot_be_connected_to_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="unable to open"):
        Index(tmp_path / "none" / "index")
