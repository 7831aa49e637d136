"""Records on a disk that fails, lies or is full, and after a restart: a miss, never other bytes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnd.calls.call import Call
from attnd.calls.records import key_arrays

from service.engine.records import moves
from service.engine.records.moves import EXTENT
from tests.engine.records.rig import MIB, STAMP, Rig, keys_of, read, records, values_of

RNG = np.random.default_rng
AT_ONCE = 4
ROUNDS = int(os.environ.get("RECORD_FLIPS", "1000")) // AT_ONCE
"""Of a test, each with some faults; `RECORD_FLIPS=100000` takes half an hour."""


def settle(rig: Rig) -> None:
    ends = time.monotonic() + 20.0
    while rig.pool.is_busy and time.monotonic() < ends:
        time.sleep(0.005)
    assert not rig.pool.is_busy


def data_of(directory: Path) -> Path:
    return directory / "disk" / "records" / f"{EXTENT}.data"


def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    keys, values = keys_of(40), values_of(RNG(2), 40)
    with records(tmp_path) as rig:
        rig.session.put_records(keys, values, stamp=STAMP)
        rig.session.contains_records(keys[:5], stamp=STAMP, job="j", lease_s=3600.0)
    with records(tmp_path, host_bytes=0) as rig:
        assert read(rig.session, keys) == dict(zip(keys, values, strict=True))
        assert rig.session.contains_records(keys[:1], stamp="other").outcomes == ("other_stamp",)
        assert not rig.pool.disk.store.pinned(), "jobs of the earlier start hold nothing"  # type: ignore[union-attr]


def test_durable_records_are_in_the_files_when_the_reply_comes(tmp_path: Path) -> None:
    """A copy of the files at that moment is what a killed service leaves."""
    keys, values = keys_of(20), values_of(RNG(3), 20)
    with records(tmp_path) as rig:
        rig.session.put_records(keys[:10], values[:10], stamp=STAMP)
        syncs = rig.files.num_syncs
        stored = rig.session.put_records(keys, values, stamp=STAMP, durable=True)
        assert stored.outcomes == ("present",) * 10 + ("stored",) * 10
        assert stored.durable == (True,) * 20 and rig.files.num_syncs > syncs
        shutil.copytree(tmp_path / "disk", tmp_path / "killed" / "disk")
    with records(tmp_path / "killed", host_bytes=0) as rig:
        assert read(rig.session, keys) == dict(zip(keys, values, strict=True))


def test_no_record_is_served_that_was_damaged(tmp_path: Path) -> None:
    """Bits flipped, stretches torn, and places exchanged, in files and in host memory."""
    rng = RNG(4)
    keys, values = keys_of(8), values_of(rng, 8, 150_000)
    served = missed = 0
    with records(tmp_path, disk_bytes=16 * MIB) as rig:
        session = rig.session
        for number in range(ROUNDS):
            missing = [
                at
                for at, how in enumerate(session.contains_records(keys, stamp=STAMP).outcomes)
                if how != "found"
            ]
            if missing or number == 0:
                some = range(8) if number == 0 else missing
                session.put_records(
                    [keys[at] for at in some],
                    [values[at] for at in some],
                    stamp=STAMP,
                    durable=number % 16 == 0,
                )
                settle(rig)
            if number % 2:
                damage(rng, rig.pool.memory[: 20 * EXTENT])
                for entry in [*rig.pool.host]:
                    if rng.integers(0, 2):
                        rig.pool.host.drop(entry)
            else:
                for entry in [*rig.pool.host]:
                    rig.pool.host.drop(entry)
                found = np.memmap(data_of(tmp_path), np.uint8, "r+")
                damage(rng, found)
                del found
            for key, value in read(session, keys).items():
                is_read = isinstance(value, bytes)
                served += is_read
                missed += not is_read
                assert not is_read or value == values[keys.index(key)], "other bytes"
    assert missed > ROUNDS / 4 and served


def damage(rng: np.random.Generator, memory: Any) -> None:
    for _ in range(AT_ONCE):
        match rng.integers(0, 3):
            case 0:
                memory[rng.integers(0, memory.size)] ^= np.uint8(1 << rng.integers(0, 8))
            case 1:
                at = int(rng.integers(0, memory.size))
                memory[at : at + int(rng.integers(1, EXTENT))] = 0
            case _:
                one, other = rng.integers(0, memory.size // EXTENT, 2) * EXTENT
                memory[one : one + EXTENT] = memory[other : other + EXTENT].copy()


@pytest.mark.parametrize("length", [0, 1, EXTENT, 5 * EXTENT + 7])
def test_a_file_that_was_cut_short_is_a_miss(tmp_path: Path, length: int) -> None:
    keys, values = keys_of(10), [bytes([at + 1]) * 100_000 for at in range(10)]
    with records(tmp_path) as rig:
        rig.session.put_records(keys, values, stamp=STAMP)
    os.truncate(data_of(tmp_path), length)
    with records(tmp_path, host_bytes=0) as rig:
        for key, value in read(rig.session, keys).items():
            assert value in (values[keys.index(key)], "never_stored", "corrupt")
        rig.session.put_records(keys, values, stamp=STAMP)
        assert read(rig.session, keys) == dict(zip(keys, values, strict=True))


@pytest.mark.parametrize("fault", ["full", "write", "sync", "removed"])
def test_a_failed_disk_costs_its_records_alone(tmp_path: Path, fault: str) -> None:
    with records(tmp_path) as rig:
        session = rig.session
        session.put_records([b"a"], [b"1"], stamp=STAMP, durable=True)
        if fault == "removed":
            shutil.rmtree(tmp_path / "disk")
        elif fault == "sync":
            rig.files.sync_error = errno.EIO
        else:
            rig.files.write_error = errno.ENOSPC if fault == "full" else errno.EIO
        stored = session.put_records([b"b"], [b"2"], stamp=STAMP, durable=True)
        assert stored.outcomes == ("stored",) and stored.durable == (False,)
        assert read(session, [b"a", b"b"]) == {b"a": b"1", b"b": b"2"}
        assert rig.metric('attnd_tier_up{tier="disk"}') == 0
        assert session.info().records == {"host_bytes": 32 * MIB, "disk_bytes": 0}


def test_a_disk_that_cannot_be_read_is_a_miss_with_its_reason(tmp_path: Path) -> None:
    with records(tmp_path, host_bytes=0) as rig:
        rig.session.put_records([b"a"], [b"1" * 100], stamp=STAMP, durable=True)
        rig.files.read_error = errno.EIO
        found = rig.session.get_records([b"a"], stamp=STAMP)
        assert found.outcomes == ("unreadable",) and found.values == (None,)
        rig.files.read_error = None
        assert read(rig.session, [b"a"]) == {b"a": b"1" * 100}
        assert rig.metric('attnd_record_lookups_total{outcome="unreadable"}') == 1


def test_no_byte_of_another_answer_is_where_a_record_was_not_read(tmp_path: Path) -> None:
    """A door's answers to many callers take turns in one place."""
    with records(tmp_path, host_bytes=0) as rig:
        session = rig.session
        session.put_records([b"a", b"b"], [b"1" * 50_000] * 2, stamp=STAMP, durable=True)
        secret = session.empty("values", (2**20,), np.uint8)
        secret[...] = 255
        del secret
        rig.files.read_error = errno.EIO
        found: list[Any] = []
        arrays = key_arrays([b"a", b"b"])
        room = 2**18
        session.send(
            Call("get_records", found.append, True, {"stamp": STAMP}, arrays, answer_bytes=room)
        )
        (reply,) = found
        assert reply.fields["outcomes"] == ["unreadable"] * 2
        assert reply.tensors["values"].size == 100_000 and not reply.tensors["values"].any()


def test_a_damaged_record_of_host_memory_is_read_from_the_disk(tmp_path: Path) -> None:
    with records(tmp_path) as rig:
        rig.session.put_records([b"a"], [b"1" * 70_000], stamp=STAMP, durable=True)
        rig.pool.memory[: 2 * EXTENT] = 0
        assert read(rig.session, [b"a"]) == {b"a": b"1" * 70_000}
        assert len(rig.pool.host) == 0


def test_a_caller_that_writes_into_a_read_drops_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with records(tmp_path) as rig:
        rig.session.put_records([b"a"], [b"1" * 100_000], stamp=STAMP, durable=True)
        real = moves.load_one

        def disturbed(batch: Any, move: Any, source: Any) -> bool:
            return real(batch, move, source) and False

        monkeypatch.setattr(moves, "load_one", disturbed)
        found = rig.session.get_records([b"a"], stamp=STAMP)
        assert found.outcomes == ("unreadable",) and found.values == (None,)
        monkeypatch.undo()
        assert len(rig.pool.host) == 1
        assert read(rig.session, [b"a"]) == {b"a": b"1" * 100_000}


def test_clear_leaves_no_byte_of_the_namespace(tmp_path: Path) -> None:
    mark = RNG(5).bytes(64)
    with records(tmp_path) as rig:
        keys = keys_of(30)
        rig.session.put_records(keys, [mark * n for n in range(1, 31)], stamp=STAMP)
        rig.session.delete_records(keys[:5], stamp=STAMP)
        settle(rig)
        assert rig.session.clear_records() == 25
        assert mark not in data_of(tmp_path).read_bytes()
        assert set(rig.session.contains_records(keys, stamp=STAMP).outcomes) <= {
            "never_stored",
            "evicted",
        }


def test_a_hanging_disk_delays_no_record_of_host_memory(tmp_path: Path) -> None:
    leave = threading.Event()
    with records(tmp_path) as rig:
        rig.session.put_records([b"a", b"b"], [b"1", b"2"], stamp=STAMP, durable=True)
        (first, _) = rig.pool.host
        rig.pool.host.drop(first)
        store = rig.pool.disk.store
        assert store is not None
        real = store.read_part

        def hang(into: Any, offset: int) -> None:
            assert leave.wait(30.0)
            real(into, offset)

        store.read_part = hang  # type: ignore[method-assign]
        try:
            with pytest.raises(Exception, match=r"deadline|timeout"):
                rig.session.with_options(deadline=0.3).get_records([b"a"], stamp=STAMP)
            assert read(rig.session, [b"b"]) == {b"b": b"2"}
        finally:
            leave.set()
        assert read(rig.session, [b"a"]) == {b"a": b"1"}
