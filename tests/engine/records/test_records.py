"""Records in host memory and on disk: what is read is what was stored, or a miss with a reason."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnd import DeadlineExceeded, InvalidRequest, NotSupported, Session, TimedOut

from tests.engine.records.rig import MIB, STAMP, Rig, keys_of, read, records, values_of

RNG = np.random.default_rng


@pytest.fixture(params=["host", "both", "disk"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    directory = None if request.param == "host" else tmp_path
    host = 0 if request.param == "disk" else 32 * MIB
    with records(directory, host_bytes=host) as made:
        yield made


def settle(rig: Rig) -> None:
    """Wait until nothing is on its way to the disk."""
    ends = time.monotonic() + 20.0
    while rig.pool.is_busy and time.monotonic() < ends:
        time.sleep(0.005)
    assert not rig.pool.is_busy


def test_what_is_read_is_what_was_stored(rig: Rig) -> None:
    """Against a dictionary, over random batches of all operations."""
    rng, model = RNG(1), dict[bytes, bytes]()
    session, every = rig.session, keys_of(60)
    for _ in range(60):
        keys = [every[at] for at in rng.permutation(60)[: int(rng.integers(1, 12))]]
        match rng.integers(0, 4):
            case 0 | 1:
                values = values_of(rng, len(keys), 100_000)
                stored = session.put_records(keys, values, stamp=STAMP)
                expected = ["present" if key in model else "stored" for key in keys]
                assert list(stored.outcomes) == expected
                model = {**dict(zip(keys, values, strict=True)), **model}
            case 2:
                found = session.delete_records(keys, stamp=STAMP)
                assert [how == "found" for how in found.outcomes] == [k in model for k in keys]
                for key in keys:
                    model.pop(key, None)
                settle(rig)
            case _:
                for key, value in read(session, keys).items():
                    assert value == model.get(key, value)
                    assert isinstance(value, bytes) == (key in model)
        settle(rig)
    found = session.contains_records(every, stamp=STAMP)
    assert [how == "found" for how in found.outcomes] == [key in model for key in every]
    assert session.clear_records() == len(model)
    assert set(session.contains_records(every, stamp=STAMP).outcomes) == {"never_stored"}


def test_reasons_of_misses(rig: Rig) -> None:
    session = rig.session
    session.put_records([b"a"], [b"1"], stamp=STAMP)
    found = session.contains_records([b"a", b"b"], stamp="another")
    assert found.outcomes == ("other_stamp", "never_stored")
    assert read(session, [b"a", b"b"], "another") == {b"a": "other_stamp", b"b": "never_stored"}
    session.put_records([b"a"], [b"2"], stamp="another")
    assert read(session, [b"a"]) == {b"a": b"1"}
    assert read(session, [b"a"], "another") == {b"a": b"2"}


def test_a_lookup_stops_at_the_first_miss(rig: Rig) -> None:
    keys = keys_of(5)
    rig.session.put_records([*keys[:2], keys[3]], [b"x"] * 3, stamp=STAMP)
    found = rig.session.contains_records(keys, stamp=STAMP, stop_at_miss=True)
    assert found.outcomes == ("found", "found", "never_stored") and found.num_found == 2
    assert rig.session.contains_records(keys, stamp=STAMP).num_found == 2


def test_an_array_of_the_arena_is_sent_without_a_copy(rig: Rig) -> None:
    session, keys = rig.session, keys_of(8)
    array = session.empty("values", (8, 4096), np.uint8)
    array[...] = np.arange(8, dtype=np.uint8)[:, None]
    before = session._road.connection.arena.slots.free  # type: ignore[union-attr]
    assert set(session.put_records(keys, array, stamp=STAMP).outcomes) == {"stored"}
    assert session._road.connection.arena.slots.size == 64 * MIB  # type: ignore[union-attr]
    array[...] = 255  # the caller's again
    found = read(session, keys)
    assert found == {key: bytes([at]) * 4096 for at, key in enumerate(keys)}
    assert before > 0


def test_records_are_copied_into_given_arrays(rig: Rig) -> None:
    session = rig.session
    session.put_records([b"a", b"b"], [b"12345", b"678"], stamp=STAMP)
    places = [np.zeros(8, np.uint8), np.zeros(2, np.float32), np.zeros(4, np.uint8)]
    found = session.get_records([b"a", b"b", b"c"], stamp=STAMP, into=places)
    assert places[0].tobytes() == b"12345\0\0\0" and places[1].tobytes() == b"678" + bytes(5)
    assert found.values[2] is None and not places[2].any()
    with pytest.raises(ValueError, match="has 4 bytes, its record 5"):
        session.get_records([b"b", b"a"], stamp=STAMP, into=[places[0], places[2]])
    assert places[0].tobytes() == b"12345\0\0\0", "nothing is written"


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([b""], [b"1"], "1 to 64"),
        ([b"k" * 65], [b"1"], "1 to 64"),
        ([b"a"], [b"1", b"2"], "one for each key"),
        ([b"a"], [b""], "sizes"),
    ],
)
def test_what_is_no_record_is_refused(
    rig: Rig, keys: list[bytes], values: list[bytes], error: str
) -> None:
    with pytest.raises((ValueError, InvalidRequest), match=error):
        rig.session.put_records(keys, values, stamp=STAMP)


HOSTILE: list[tuple[list[int], list[int], int]] = [
    ([1, 1], [1, 2], 4),
    ([1, 1], [2**62, 2**62], 3),
    ([1, 1], [-1, 4], 3),
    ([1, 1], [3, 0], 3),
    ([0, 2], [1, 2], 3),
    ([2, 1], [1, 2], 3),
    ([255, 255], [1, 2], 3),
]


@pytest.mark.parametrize(("lens", "sizes", "total"), HOSTILE)
def test_lengths_that_do_not_add_up_are_refused(
    rig: Rig, lens: list[int], sizes: list[int], total: int
) -> None:
    from attnd.calls.call import Call

    arrays = {
        "sizes": np.array(sizes, np.int64),
        "keys": np.frombuffer(b"ab", np.uint8),
        "key_lens": np.array(lens, np.uint8),
        "values": np.zeros(total, np.uint8),
    }
    call = Call("put_records", lambda reply: reply.fields, fields={"stamp": "m"}, arrays=arrays)
    with pytest.raises(InvalidRequest, match=r"add up|must be 1 to"):
        rig.session.send(call)
    assert rig.session.contains_records([b"a", b"b"], stamp="m").num_found == 0


def test_many_threads_store_the_same_records_once(rig: Rig) -> None:
    keys, value = keys_of(20), b"v" * 100_000
    outcomes: list[str] = []

    def put() -> None:
        with Session(rig.running.path, arena_bytes=4 * MIB) as own:
            outcomes.extend(own.put_records(keys, [value] * 20, stamp=STAMP).outcomes)

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(outcomes) == ["present"] * 60 + ["stored"] * 20
    assert set(read(rig.session, keys).values()) == {value}


def test_the_least_recently_used_records_give_way() -> None:
    with records(host_bytes=4 * MIB) as rig:
        keys, value = keys_of(65), bytes(65_536)
        rig.session.put_records(keys[:64], [value] * 64, stamp=STAMP)
        rig.session.touch_records(keys[:1], stamp=STAMP)
        rig.session.get_records(keys[1:2], stamp=STAMP)
        rig.session.put_records(keys[64:], [value], stamp=STAMP)
        found = rig.session.contains_records(keys[:4], stamp=STAMP)
        assert found.outcomes == ("found", "found", "evicted", "found")
        stored = rig.session.put_records([b"large"], [bytes(4 * MIB + 1)], stamp=STAMP)
        assert stored.outcomes == ("no_room",) and rig.metric('attnd_records{tier="host"}') == 64


def test_a_job_holds_records_until_its_release_or_its_end(later: Any) -> None:
    with records(host_bytes=4 * MIB) as rig:
        session, keys, value = rig.session, keys_of(80), bytes(65_536)
        session.put_records(keys[:3], [value] * 3, stamp=STAMP)
        session.contains_records(keys[:1], stamp=STAMP, job="one", lease_s=60.0)
        session.contains_records(keys[:2], stamp=STAMP, job="two", lease_s=600.0)
        session.put_records(keys[3:], [value] * 77, stamp=STAMP)
        found = session.contains_records(keys[:3], stamp=STAMP)
        assert found.outcomes == ("found", "found", "evicted")
        assert rig.pool.leases.count("default") == 2
        session.release_records("two")
        session.release_records("two")
        session.put_records(keys_of(64, "more"), [value] * 64, stamp=STAMP)
        assert session.contains_records(keys[:2], stamp=STAMP).outcomes == ("found", "evicted")
        later(61.0)
        session.put_records(keys_of(64, "last"), [value] * 64, stamp=STAMP)
        assert session.contains_records(keys[:1], stamp=STAMP).outcomes == ("evicted",)


def test_after_a_deadline_nothing_of_a_call_is_left(rig: Rig) -> None:
    """Neither places that it holds, nor writes to the caller's memory."""
    session = rig.session
    session.put_records([b"a"], [b"x" * MIB], stamp=STAMP)
    settle(rig)
    entered, leave = threading.Event(), threading.Event()

    def hang(batch: Any, *args: Any, **kwargs: Any) -> None:
        entered.set()
        assert leave.wait(20.0)
        batch.copy(batch.moves[0].memory, np.zeros(1, np.uint8))

    place = np.full(MIB, 7, np.uint8)
    for mover in (rig.pool.copies, rig.pool.reads):
        add = mover.add
        mover.add = lambda batch, add=add: add(hung(batch, hang))  # type: ignore[method-assign]
    with pytest.raises((DeadlineExceeded, TimedOut)):
        session.with_options(deadline=0.3).get_records([b"a"], stamp=STAMP, into=[place])
    assert entered.is_set()
    leave.set()
    settle(rig)
    assert (place == 7).all()
    for mover in (rig.pool.copies, rig.pool.reads):
        del mover.add
    assert read(session, [b"a"]) == {b"a": b"x" * MIB}


def hung(batch: Any, run: Any) -> Any:
    batch.run = run
    return batch


def test_a_service_without_a_pool_refuses_pages(rig: Rig) -> None:
    for call in (rig.session.pool, rig.session.create_sequence, rig.session.holds):
        with pytest.raises(NotSupported, match=r"backend.kind = none"):
            call()
    info = rig.session.info()
    assert info.backend == "none" and info.records is not None
