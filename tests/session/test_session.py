"""`Session` with a scripted engine: its use of the arena, and its results."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attnd
import ml_dtypes
import numpy as np
import pytest
from attnd import NewSequence
from attnd.road.pending import Answer

from tests.client.client_stub import SEQUENCE
from tests.session.scripted_engine import (
    MIB,
    Answers,
    Bench,
    Drop,
    Later,
    Never,
    Problem,
    Scripted,
    Seen,
    Step,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
Q = np.arange(64, dtype=np.float32).reshape(2, 4, 8)
K = np.ones((2, 2, 8), np.float32)


def attended(seen: Seen) -> Step:
    """o is q and one more, lse the row's number."""
    q = seen.arrays["q"]
    lse = np.broadcast_to(np.arange(len(q), dtype=np.float32)[:, None], q.shape[:2])
    fields = {"lse_base": "e", "levels": 1, "cascade": False}
    return Answers(fields, {"o": q + np.ones((), q.dtype), "lse": np.array(lse)})


# Requests and results.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_a_decode_sends_its_fields_and_arrays_and_gives_the_state(bench: Bench, dtype: Any) -> None:
    engine = bench.start(attended)
    session = bench.session()
    q = Q.astype(dtype)
    result = session.decode(3, ["a", "ü"], q, offsets=[1, 2], sm_scale=0.5)
    seen = engine.seen[0]
    assert seen.operation == "decode"
    assert seen.fields == {"layer": 3, "sequences": ["a", "ü"], "offsets": [1, 2], "sm_scale": 0.5}
    np.testing.assert_array_equal(seen.arrays["q"], q)
    assert result.o.dtype == q.dtype
    np.testing.assert_array_equal(result.o, q + np.ones((), dtype))
    assert result.lse[:, 0].tolist() == [0, 1]
    assert type(result.o) is np.ndarray
    result.o[...] = 0  # it may be written to
    stages = {"queue": 0.5, "plan": 0.25, "kernel": 2.0, "encode": 0.125}
    assert {name: s for name, s in result.meta.timings.items() if s} == stages


def test_arrays_that_are_not_dense_and_empty_ones_travel_by_value(bench: Bench) -> None:
    engine = bench.start(Answers({"lengths": [0]}))
    k = np.arange(48, dtype=np.float32).reshape(2, 4, 6).transpose(2, 0, 1)
    empty = np.zeros((0, 2, 4), np.float32)
    bench.session().append(0, ["a"], k, empty)
    np.testing.assert_array_equal(engine.seen[0].arrays["k"], k)
    assert engine.seen[0].arrays["v"].shape == (0, 2, 4)


def test_control_operations_are_images_without_arrays(bench: Bench) -> None:
    engine = bench.start(
        Answers({"sequences": [SEQUENCE]}, status=201),
        Answers({"sequences": [SEQUENCE], "next": None}),
        Answers(SEQUENCE),
        Answers({}, status=204),
    )
    session = bench.session()
    assert session.create_sequences([NewSequence("b", parent="a")])[0].id == "a"
    assert [one.id for one in session.list_sequences(page_size=7)] == ["a"]
    assert session.truncate("a", 5).length == 5
    assert session.delete_sequence("a") is None
    assert [(seen.operation, seen.fields) for seen in engine.seen] == [
        ("create_sequences", {"sequences": [{"id": "b", "parent": "a"}]}),
        ("list_sequences", {"limit": 7}),
        ("truncate", {"id": "a", "length": 5}),
        ("delete_sequence", {"id": "a"}),
    ]


def test_request_ids_and_deadlines_are_sent(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    hexadecimal = "0123456789abcdef" * 2
    plain = session.decode(0, ["a"], Q)
    named = session.with_options(request_id=hexadecimal, deadline=1.5).decode(0, ["a"], Q)
    worded = session.with_options(request_id="step-7", deadline=1e9).decode(0, ["a"], Q)
    first, second, third = engine.seen
    assert first.deadline_us == 0
    assert plain.meta.request_id == first.request_id.hex()
    assert 1_000_000 < second.deadline_us <= 1_500_000
    assert second.request_id == bytes.fromhex(hexadecimal)
    assert named.meta.request_id == hexadecimal
    assert third.deadline_us == 2**32 - 1
    assert any(third.request_id)
    assert worded.meta.request_id == "step-7"


def test_a_dtype_that_cannot_travel_is_named(bench: Bench) -> None:
    bench.start(attended)
    with pytest.raises(TypeError, match="q has dtype complex64"):
        bench.session().decode(0, ["a"], Q.astype(np.complex64))


# arrays of the arena


def test_arrays_made_in_turn_are_sent_in_place(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    q, k, v = (session.empty(name, (2, 4, 8), np.float16) for name in "qkv")
    for turn in range(3):
        q[...], k[...], v[...] = turn, turn + 10, turn + 20
        session.decode(turn, ["a", "b"], q, k=k, v=v)
        seen = engine.seen[-1]
        assert seen.fields["layer"] == turn
        assert [seen.arrays[name][0, 0, 0] for name in "qkv"] == [turn, turn + 10, turn + 20]
        # A later write of the caller is visible to the engine: nothing was copied.
        q[...], v[...] = 77, 88
        assert seen.views["q"][0, 0, 0] == 77
        assert seen.views["v"][0, 0, 0] == 88


def test_the_first_array_of_an_area_is_sent_alone_and_its_first_rows_too(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    q = session.empty("q", (8, 4, 8))
    session.empty("k", (8, 4, 8))
    for rows in (8, 3, 0):
        q[...] = rows
        np.testing.assert_array_equal(session.decode(0, ["a"], q[:rows]).o, q[:rows] + 1)
        view = engine.seen[-1].views["q"]
        q[...] = 99
        assert (view == 99).all(), rows


def test_arrays_that_do_not_begin_an_area_or_do_not_adjoin_are_copied(bench: Bench) -> None:
    engine = bench.start(Answers({"lengths": [0]}))
    session = bench.session()
    q, k, v = (session.empty(name, (2, 4, 8)) for name in "qkv")
    q[...], k[...], v[...] = 1, 2, 3
    elsewhere = np.full((2, 4, 8), 4, np.float32)
    other = session.empty("k", (2, 4, 8))
    other[...] = 5
    cases = [(k, v), (q, v), (elsewhere, v), (q, elsewhere), (v[:, ::2], q[::-1]), (q, other)]
    for first, second in cases:
        session.append(0, ["a"], first, second)
        seen = engine.seen[-1]
        np.testing.assert_array_equal(seen.arrays["k"], first)
        np.testing.assert_array_equal(seen.arrays["v"], second)
    np.testing.assert_array_equal(q, np.full((2, 4, 8), 1))


def test_a_name_begins_a_new_area_where_no_call_would_follow_on(bench: Bench) -> None:
    engine = bench.start(Answers({"lengths": [0]}))
    session = bench.session()
    session.empty("q", (2, 4, 8))
    session.empty("q", (2, 4, 8))
    o, lse = session.empty("o", (2, 4, 8)), session.empty("lse", (2, 4))
    o[...], lse[...] = 1, 2
    engine.script = Scripted(Answers({"lse_base": "e"}, {"o": o.copy(), "lse": lse.copy()}))
    session.merge(o, lse, indptr=[0, 2])
    lse[...] = 9
    assert (engine.seen[-1].views["lse"] == 9).all()


def test_a_header_longer_than_its_room_is_no_error(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    q = session.empty("q", (2, 4, 8))
    q[...] = 3
    names = [f"a-long-name-of-a-sequence-{i}" for i in range(2000)]
    assert (session.decode(0, names, q).o == 4).all()
    assert engine.seen[0].fields["sequences"] == names


def test_a_call_reuses_the_place_of_a_deleted_result_and_no_other(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session(arena_bytes=64 * MIB)
    for q in (session.empty("q", (2, 4, 8)), Q):
        for _ in range(40):
            session.decode(0, ["a"], q)
        places = [seen.place for seen in engine.seen]
        assert len(set(places)) == 1, places
        kept = [session.decode(0, ["a"], q) for _ in range(5)]
        assert len({seen.place for seen in engine.seen[-5:]}) == 5
        del kept
        engine.seen.clear()


def test_a_kept_view_of_a_result_keeps_its_memory(bench: Bench) -> None:
    bench.start(attended)
    session = bench.session()
    kept = []
    for turn in range(200):
        o = session.decode(0, ["a"], np.full((16, 4, 8), turn, np.float32)).o
        kept.append(o[3:5, 1])
    del o
    gc.collect()
    for turn, rows in enumerate(kept):
        assert (rows == turn + 1).all(), turn


def test_results_are_copied_out_when_the_arena_is_short(bench: Bench) -> None:
    engine = bench.start(attended, limit=MIB)
    session = bench.session()
    q = np.zeros((64, 4, 64), np.float32)
    kept = [session.decode(0, ["a"], q + turn) for turn in range(100)]
    for turn, result in enumerate(kept):
        assert (result.o == turn + 1).all(), turn
    assert engine.arena_sizes == [MIB]


def test_the_arena_grows_for_a_call_that_needs_more(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    small = session.empty("q", (2, 4, 8))
    small[...] = 5
    before = session.decode(0, ["a"], Q)
    q = np.ones((2048, 8, 64), np.float32)
    assert (session.decode(0, ["a"], q).o == 2).all()
    assert len(engine.arena_sizes) > 1
    # What lay in the arena before still does.
    np.testing.assert_array_equal(before.o, Q + 1)
    assert (session.decode(0, ["a"], small).o == 6).all()
    small[...] = 7
    assert (engine.seen[-1].views["q"] == 7).all()


def test_an_arena_that_may_not_grow_is_full_and_nothing_is_sent(bench: Bench) -> None:
    engine = bench.start(attended, limit=MIB)
    session = bench.session()
    with pytest.raises(attnd.ArenaFull, match="1048576"):
        session.decode(0, ["a"], np.ones((2048, 8, 64), np.float32))
    assert engine.seen == []
    assert (session.decode(0, ["a"], Q).o == Q + 1).all()


def test_an_answer_that_does_not_fit_is_asked_for_once_more(bench: Bench) -> None:
    k = np.ones((4096, 2, 8), np.float32)
    engine = bench.start(Answers({"kv_indptr": [0, 4096]}, {"k": k, "v": k + 1}))
    result = bench.session().gather(0, ["a"])
    np.testing.assert_array_equal(result.v, k + 1)
    first, second = engine.seen
    assert first.capacity < 2 * k.nbytes <= second.capacity


# errors


def test_a_problem_raises_its_class_with_its_numbers(bench: Bench) -> None:
    bench.start(Problem(409, "length_mismatch", {"lengths": {"a": 3}}))
    with pytest.raises(attnd.LengthMismatch) as caught:
        bench.session().with_options(request_id="r9").append(0, ["a"], K, K, offsets=[1])
    assert caught.value.lengths == {"a": 3}
    assert caught.value.request_id == "r9"
    assert caught.value.timings["kernel"] == 2.0


def test_a_reply_lost_is_asked_for_again_over_a_new_connection(bench: Bench) -> None:
    engine = bench.start(Drop(), attended)
    assert (bench.session().decode(0, ["a"], Q).o == Q + 1).all()
    assert len(engine.connections) == 2


def test_a_new_engine_is_found_and_arrays_of_the_old_arena_still_serve(bench: Bench) -> None:
    bench.start(attended)
    session = bench.session()
    q = session.empty("q", (2, 4, 8))
    q[...] = 1
    result = session.decode(0, ["a"], q)
    bench.stop()
    with pytest.raises(attnd.ConnectionFailed):
        session.append(0, ["a"], K, K)
    engine = bench.start(Problem(404, "unknown_sequence", {"sequences": ["a"]}), attended)
    with pytest.raises(attnd.UnknownSequence):
        session.decode(0, ["a"], q)
    assert (session.decode(0, ["a"], q).o == 2).all()
    assert (result.o == 2).all()
    assert len(engine.connections) == 1


def test_nothing_listening_is_connection_failed(bench: Bench) -> None:
    with pytest.raises(attnd.ConnectionFailed, match="no such socket: start it"):
        bench.session().decode(0, ["a"], Q)


def test_a_refused_session_raises_the_problem(bench: Bench) -> None:
    engine = bench.start(attended)
    engine.refusal = {"code": "overloaded", "status": 429, "detail": "too many sessions"}
    with pytest.raises(attnd.Overloaded, match="too many sessions"):
        bench.session().decode(0, ["a"], Q)
    engine.refusal = None
    bench.session().decode(0, ["a"], Q)


@pytest.mark.parametrize("step", ["timeout", "deadline"])
def test_a_call_without_an_answer_times_out_and_is_cancelled(bench: Bench, step: str) -> None:
    engine = bench.start(Never(), attended)
    session = bench.session(timeout=0.2 if step == "timeout" else 60.0)
    waiting = session.with_options(deadline=None if step == "timeout" else 0.2)
    began = time.monotonic()
    with pytest.raises(attnd.TimedOut):
        waiting.decode(0, ["a"], Q)
    assert 0.2 <= time.monotonic() - began < 30
    assert (session.decode(0, ["a"], Q).o == Q + 1).all()
    assert engine.cancelled == [engine.seen[0].number]


def test_slots_of_a_call_given_up_stay_taken_until_its_answer(bench: Bench) -> None:
    late = Answers({"lse_base": "e", "levels": 1, "cascade": False}, {"o": Q, "lse": Q[..., 0]})
    engine = bench.start(Later(late), attended)
    session = bench.session(timeout=0.2)
    with pytest.raises(attnd.TimedOut) as kept:
        session.decode(0, ["a"], Q)
    given_up = engine.seen[0]
    session.decode(0, ["a"], Q)
    assert engine.seen[1].place >= given_up.offset + given_up.length
    session.decode(0, ["a"], Q)  # the late answer came before this one's
    session.decode(0, ["a"], Q)
    assert engine.seen[3].place == given_up.place
    assert kept.value.request_id


def test_a_session_that_was_closed_says_so(bench: Bench) -> None:
    bench.start(attended)
    session = bench.session()
    result = session.decode(0, ["a"], Q)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.decode(0, ["a"], Q)
    np.testing.assert_array_equal(result.o, Q + 1)


# the engine's state


def test_health_is_the_engines_last_state(bench: Bench) -> None:
    engine = bench.start(attended, state="starting")
    session = bench.session()
    assert (session.ready().ok, session.ready().reason) == (False, "starting")
    assert session.live().ok
    with pytest.raises(TimeoutError, match="starting"):
        session.wait_ready(0)
    engine.send_state("ready")
    session.wait_ready(5)
    engine.send_state("draining", "asked to stop")
    while (health := session.ready()).ok:
        time.sleep(0.01)
    assert health.reason == "asked to stop"


def test_waiting_for_ready_outlasts_an_engine_that_is_not_there_yet(bench: Bench) -> None:
    session = bench.session(retries=0)
    timer = threading.Timer(0.3, lambda: bench.start(attended))
    timer.start()
    session.wait_ready(5)
    timer.join()
    bench.stop()
    with pytest.raises(attnd.ConnectionFailed):
        session.ready()


# threads


def test_threads_share_a_session_and_their_calls_are_pipelined(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()

    def work(worker: int) -> None:
        for turn in range(100):
            q = np.full((1 + worker, 2, 8), 1000 * worker + turn, np.float32)
            assert (session.decode(worker, ["a"], q).o == q + 1).all()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(engine.connections) == 1
    assert len(engine.seen) == 800


def test_answers_out_of_order_reach_their_callers(bench: Bench) -> None:
    def script(seen: Seen) -> Step:
        step = attended(seen)
        assert isinstance(step, Answers)
        return Later(step) if seen.fields["layer"] == 0 else step

    bench.start(script)
    session = bench.session()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(session.decode, 0, ["a"], Q)
        time.sleep(0.1)
        assert not first.done()
        assert (session.decode(1, ["a"], Q * 2).o == Q * 2 + 1).all()
        assert (first.result(5).o == Q + 1).all()


def answers_others_once(released: threading.Event) -> Callable[[Seen], Step]:
    """Calls at layer 0 get no answer, others once an event is set."""

    def script(seen: Seen) -> Step:
        if seen.fields["layer"] == 0:
            return Never()
        released.wait(5)
        return attended(seen)

    return script


def test_a_thread_that_gives_up_leaves_reading_to_the_others(bench: Bench) -> None:
    released = threading.Event()
    bench.start(answers_others_once(released))
    session = bench.session()
    with ThreadPoolExecutor(4) as threads:
        reads = threads.submit(session.with_options(deadline=0.3).decode, 0, ["a"], Q)
        time.sleep(0.05)
        others = [threads.submit(session.decode, 1, ["a"], Q + i) for i in range(3)]
        with pytest.raises(attnd.TimedOut):
            reads.result(5)
        released.set()
        for i, other in enumerate(others):
            assert (other.result(5).o == Q + i + 1).all()


def test_a_thread_reads_although_the_one_that_was_to_do_so_gave_up(bench: Bench) -> None:
    bench.start(attended)
    session = bench.session()
    connection = session._road.connected(time.monotonic() + 5.0)
    with ThreadPoolExecutor(1) as threads, connection._reading:
        waits = threads.submit(session.decode, 1, ["a"], Q)
        while not any(one.gate is not None for one in connection._all_pending()):
            time.sleep(0.001)
        connection._reading.release()  # and wakes none
        assert (waits.result(5).o == Q + 1).all()
        connection._reading.acquire()


def test_a_broken_connection_fails_the_calls_of_every_thread(bench: Bench) -> None:
    engine = bench.start(Never())
    session = bench.session(retries=0)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(session.decode, 0, ["a"], Q) for _ in range(4)]
        while len(engine.seen) < 4:
            time.sleep(0.01)
        engine.drop_all()
        for one in waiting:
            with pytest.raises(attnd.ReplyLost):
                one.result(5)


def test_an_interrupt_of_the_thread_that_reads_ends_the_call_whose_answer_it_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Answer):
        def __new__(cls, *_: Any) -> Any:
            raise KeyboardInterrupt

    released = threading.Event()
    bench.start(answers_others_once(released))
    session = bench.session(retries=0)
    monkeypatch.setattr("attnd.road.connection.Answer", Interrupted)
    with ThreadPoolExecutor(2) as threads:
        reads = threads.submit(session.decode, 0, ["a"], Q)
        time.sleep(0.1)
        other = threads.submit(session.decode, 1, ["a"], Q)
        time.sleep(0.1)
        released.set()
        with pytest.raises(KeyboardInterrupt):
            reads.result(5)
        with pytest.raises(attnd.ReplyLost):
            other.result(5)


def test_the_arena_grows_at_once_while_another_thread_reads(bench: Bench) -> None:
    released = threading.Event()
    released.set()
    engine = bench.start(answers_others_once(released))
    session = bench.session(timeout=120.0, retries=attnd.Retries(0))
    with ThreadPoolExecutor(1) as threads:
        reads = threads.submit(session.decode, 0, ["a"], Q)
        connection = session._road.connected(time.monotonic() + 60.0)
        while not (engine.seen and connection._is_read):
            time.sleep(0.001)
        began = time.monotonic()
        q = np.ones((2048, 8, 64), np.float32)
        assert (session.decode(1, ["a"], q).o == 2).all()
        assert time.monotonic() - began < 60, "it waited until its timeout"
        engine.drop_all()
        with pytest.raises(attnd.ReplyLost):
            reads.result(60)


def test_threads_make_the_arena_grow_together(bench: Bench) -> None:
    bench.start(attended)
    session = bench.session(timeout=120.0)
    began = time.monotonic()

    def work(worker: int) -> bool:
        q = np.full((512, 8, 64), worker, np.float32)
        return all(bool((session.decode(0, ["a"], q).o == q + 1).all()) for _ in range(5))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert time.monotonic() - began < 60, "a thread waited until its timeout"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_its_own_connection(bench: Bench) -> None:
    engine = bench.start(attended)
    session = bench.session()
    session.decode(0, ["a"], Q)
    child = os.fork()
    if child == 0:
        good = bool((session.decode(0, ["a"], Q).o == Q + 1).all())
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(engine.connections) == 2
    assert (session.decode(0, ["a"], Q).o == Q + 1).all()
