"""A session replays repeated calls, with the same results as for first calls."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import attnd
import numpy as np
import pytest
from attnd import Session
from attnd.road.replay import MAX_REPLAYS, Replay

from tests.session.scripted_engine import (
    Answers,
    Bench,
    Drop,
    Problem,
    Script,
    Scripted,
    Seen,
    Step,
)


def attended(seen: Seen) -> Step:
    """o is q and the layer, lse the kv_len that the caller gave, or -1."""
    q = seen.arrays["q"]
    (offset,) = seen.fields.get("offsets", [-1])
    fields = {"lse_base": seen.fields.get("lse_base", "e"), "levels": 1, "cascade": False}
    lse = np.full(q.shape[:2], offset, np.float32)
    return Answers(fields, {"o": q + q.dtype.type(seen.fields["layer"]), "lse": lse})


class Replaying:
    """A session with an engine, and the number of its replayed calls."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = bench.start(attended)
        self.session = bench.session()
        self.replayed = 0
        send = Replay.send

        def counted(repeat: Any, *args: Any) -> Any:
            self.replayed += 1
            return send(repeat, *args)

        monkeypatch.setattr(Replay, "send", counted)

    def play(self, *steps: Step | Script) -> None:
        self.engine.script = Scripted(*steps)


@pytest.fixture
def replaying(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Replaying:
    return Replaying(bench, monkeypatch)


def filled(session: Session, rows: int, value: float) -> Any:
    q = session.empty("q", (rows, 4, 8))
    q[...] = value
    return q


def test_a_replayed_call_sends_the_present_values_of_its_arrays(replaying: Replaying) -> None:
    q = filled(replaying.session, 2, 0.0)
    results = []
    for value in range(5):
        q[...] = value
        results.append(replaying.session.decode(3, ["a", "b"], q))
    assert replaying.replayed == 4
    assert [float(result.o.max()) for result in results] == [3, 4, 5, 6, 7]
    assert all(
        seen.fields == {"layer": 3, "sequences": ["a", "b"]} for seen in replaying.engine.seen
    )
    assert len({seen.request_id for seen in replaying.engine.seen}) == 5
    assert [one.meta.request_id for one in results] == [
        seen.request_id.hex() for seen in replaying.engine.seen
    ]
    assert results[-1].meta.timings["kernel"] == 2.0


def test_results_that_are_kept_do_not_change(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    kept = [replaying.session.decode(layer, ["a"], q) for layer in (0, 0, 0, 1, 1, 1)]
    assert [float(one.o.min()) for one in kept] == [1, 1, 1, 2, 2, 2]
    assert len({one.o.__array_interface__["data"][0] for one in kept}) == 6


def test_offsets_change_from_call_to_call(replaying: Replaying) -> None:
    session, q = replaying.session, filled(replaying.session, 1, 1.0)
    k, v = session.empty("k", (1, 2, 8)), session.empty("v", (1, 2, 8))
    k[...], v[...] = 5, 6
    for offsets in ([7], [8], np.array([1000000]), None, [9]):
        found = session.decode(0, ["a"], q, k=k, v=v, offsets=offsets)
        assert float(found.lse.max()) == (-1 if offsets is None else int(offsets[0]))
    assert replaying.replayed == 4
    assert all(set(seen.arrays) == {"q", "k", "v"} for seen in replaying.engine.seen)
    assert all((seen.arrays["v"] == 6).all() for seen in replaying.engine.seen)


def test_calls_with_other_arguments_are_not_replayed(replaying: Replaying) -> None:
    session, q = replaying.session, filled(replaying.session, 1, 1.0)
    other = filled(session, 1, 2.0)
    session.decode(1, ["a"], q)
    session.decode(True, ["a"], q)
    session.decode(1, ["b"], q)
    session.decode(1, ("a",), q, sm_scale=1.0)
    session.decode(1, ["a"], q, sm_scale=1)
    session.decode(1, ["a"], other)
    session.prefill(1, ["a"], q, [0, 1])
    assert replaying.replayed == 0
    found = [(seen.operation, seen.fields) for seen in replaying.engine.seen]
    assert [str(fields["layer"]) for _, fields in found] == ["1", "True", "1", "1", "1", "1", "1"]
    assert [fields["sequences"] for _, fields in found[:4]] == [["a"], ["a"], ["b"], ["a"]]


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_a_reshaped_array_is_not_replayed(replaying: Replaying) -> None:
    q = filled(replaying.session, 2, 1.0)
    assert replaying.session.decode(0, ["a", "b"], q).o.shape == (2, 4, 8)
    q.shape = (1, 8, 8)
    assert replaying.session.decode(0, ["a", "b"], q).o.shape == (1, 8, 8)


def test_arrays_outside_the_arena_are_copied_each_time(replaying: Replaying) -> None:
    session = replaying.session
    k, v = np.full((1, 2, 8), 5, np.float32), np.full((1, 2, 8), 6, np.float32)
    for value in (1, 2, 3):
        q = np.full((1, 4, 8), value, np.float32)  # another array each time
        found = session.decode(1, ["a"], q, v=v, k=k, offsets=[value])
        assert (float(found.o.max()), float(found.lse.max())) == (value + 1, value)
        assert float(session.prefill(0, ["a"], q, [0, 1]).o.max()) == value
    assert replaying.replayed == 4
    appended = [seen for seen in replaying.engine.seen if seen.operation == "decode"]
    assert all((one.arrays["k"] == 5).all() and (one.arrays["v"] == 6).all() for one in appended)


def test_calls_with_arrays_that_are_not_dense_are_replayed(replaying: Replaying) -> None:
    q = np.asfortranarray(np.arange(64, dtype=np.float32).reshape(2, 4, 8))
    for _ in range(3):
        np.testing.assert_array_equal(replaying.session.decode(0, ["a", "b"], q).o, q)
    assert replaying.replayed == 2


class Rare(np.ndarray[Any, Any]):
    """An array of a kind of its own."""


def test_arrays_of_another_dtype_shape_or_type_are_not_replayed(replaying: Replaying) -> None:
    session = replaying.session
    for q in (
        np.ones((1, 4, 8), np.float32),
        np.ones((1, 4, 8), np.float16),
        np.ones((1, 4, 16), np.float16),
        np.ones((2, 4, 16), np.float16)[1:],
        np.ones((2, 4, 16), np.float16)[1:],
        np.ones((1, 4, 8), np.float32).view(Rare),
    ):
        found = session.decode(0, ["a"], q)
        assert found.o.shape == q.shape and found.o.dtype == q.dtype
    assert replaying.replayed == 0


@pytest.mark.parametrize("first", ["one", "three"])
def test_the_same_array_may_be_given_twice(replaying: Replaying, first: str) -> None:
    one = np.ones((1, 4, 8), np.float32)
    three = [np.full((1, 4, 8), value, np.float32) for value in (2, 3, 4)]
    calls = [[one, one, one], three]
    for q, k, v in calls if first == "one" else calls[::-1]:
        for _ in range(2):
            replaying.session.decode(0, ["a"], q, k=k, v=v)
            seen = replaying.engine.seen[-1].arrays
            assert all((seen[n] == array).all() for n, array in zip("qkv", (q, k, v), strict=True))
    assert replaying.replayed == 3, "one array under two names repeats a call like two arrays"


def test_an_unexpected_answer_is_read_correctly(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    wider = Answers(
        {"lse_base": "2", "levels": 3, "cascade": True},
        {"o": np.full((1, 4, 8), 9, np.float16), "lse": np.zeros((1, 4), np.float32)},
    )
    replaying.play(attended, attended, wider, attended)
    found = [replaying.session.decode(0, ["a"], q) for _ in range(4)]
    assert replaying.replayed == 3
    assert [(one.levels, one.cascade, one.lse_base) for one in found] == [
        *[(1, False, "e")] * 2,
        (3, True, "2"),
        (1, False, "e"),
    ]
    assert [str(one.o.dtype) for one in found] == ["float32", "float32", "float16", "float32"]
    assert [float(one.o.max()) for one in found] == [1, 1, 9, 1]


def test_a_call_whose_answer_needs_more_room_is_sent_again(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    large = Answers(
        {"lse_base": "e", "levels": 1, "cascade": False},
        {"o": np.full((1, 4, 2048), 9, np.float32), "lse": np.zeros((1, 4), np.float32)},
    )
    replaying.play(attended, large, large, large, attended)
    found = [replaying.session.decode(0, ["a"], q) for _ in range(4)]
    assert [one.o.shape[2] for one in found] == [8, 2048, 2048, 8]
    assert len(replaying.engine.seen) == 5


def test_problems_are_raised_and_the_call_stays_remembered(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    unknown = Problem(404, "unknown_sequence", {"ids": ["a"]})
    replaying.play(attended, unknown, attended)
    replaying.session.decode(0, ["a"], q)
    with pytest.raises(attnd.UnknownSequence):
        replaying.session.decode(0, ["a"], q)
    assert float(replaying.session.decode(0, ["a"], q).o.max()) == 1
    assert replaying.replayed == 2


def test_a_replayed_call_is_retried_when_the_engine_is_overloaded(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    replaying.play(attended, Problem(429, "overloaded", {"retry_after_s": 0.01}), attended)
    replaying.session.decode(0, ["a"], q)
    assert float(replaying.session.decode(0, ["a"], q).o.max()) == 1
    assert len({seen.request_id for seen in replaying.engine.seen}) == 2


def test_a_lost_reply_is_retried_only_where_that_does_no_harm(replaying: Replaying) -> None:
    session, q = replaying.session, filled(replaying.session, 1, 1.0)
    replaying.play(attended, Drop(), attended)
    session.decode(0, ["a"], q)
    assert float(session.decode(0, ["a"], q).o.max()) == 1
    k, v = session.empty("k", (1, 2, 8)), session.empty("v", (1, 2, 8))
    replaying.play(Answers({"lengths": [5]}), Answers({"lengths": [6]}), Drop())
    lengths = [session.append(0, ["a"], k, v).lengths for _ in range(2)]
    assert lengths == [(5,), (6,)]
    with pytest.raises(attnd.ReplyLost):
        session.append(0, ["a"], k, v)


def test_an_append_whose_reply_was_lost_returns_its_lengths(replaying: Replaying) -> None:
    session = replaying.session
    k, v = session.empty("k", (1, 2, 8)), session.empty("v", (1, 2, 8))
    landed = Problem(409, "length_mismatch", {"lengths": {"a": 9}})
    replaying.play(Answers({"lengths": [8]}), Drop(), landed)
    assert session.append(0, ["a"], k, v, offsets=[7]).lengths == (8,)
    assert session.append(0, ["a"], k, v, offsets=[8]).lengths == (9,)


def test_a_call_with_its_own_id_or_deadline_sends_them_and_is_not_replayed(
    replaying: Replaying,
) -> None:
    q = filled(replaying.session, 1, 1.0)
    replaying.session.decode(0, ["a"], q)
    replaying.session.with_options(deadline=2.0).decode(0, ["a"], q)
    replaying.session.with_options(request_id="0" * 32).decode(0, ["a"], q)
    assert replaying.replayed == 0
    assert 1_900_000 < replaying.engine.seen[1].deadline_us <= 2_000_000
    assert replaying.engine.seen[2].request_id == bytes(16)


def test_remembered_calls_keep_no_memory(replaying: Replaying) -> None:
    free = replaying.session._road.connected(time.monotonic() + 5.0).arena.slots
    for _ in range(200):
        q = filled(replaying.session, 64, 1.0)
        for _ in range(3):
            replaying.session.decode(0, ["a"] * 64, q)
        del q
    gc.collect()
    slot = free.take(free.size - 2**16)
    assert slot is not None, "the arrays of calls are still held"


def test_the_number_of_remembered_calls_is_limited(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    for layer in range(MAX_REPLAYS + 10):
        replaying.session.decode(layer, ["a"], q)
    assert len(replaying.session._road.replays.known) <= MAX_REPLAYS
    assert float(replaying.session.decode(MAX_REPLAYS + 9, ["a"], q).o.max()) == MAX_REPLAYS + 10


def test_threads_may_replay_one_call(replaying: Replaying) -> None:
    q = filled(replaying.session, 1, 1.0)
    wrong: list[float] = []

    def work() -> None:
        for _ in range(100):
            found = float(replaying.session.decode(2, ["a"], q).o.max())
            if found != 3:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and replaying.replayed > 100


def test_a_new_engine_at_the_same_place_gets_arrays_of_the_old_arena(
    replaying: Replaying, bench: Bench
) -> None:
    q = filled(replaying.session, 1, 1.0)
    for _ in range(2):
        replaying.session.decode(0, ["a"], q)
    bench.stop()
    bench.start(attended)
    for value in (4, 5):
        q[...] = value
        assert float(replaying.session.decode(0, ["a"], q).o.max()) == value
