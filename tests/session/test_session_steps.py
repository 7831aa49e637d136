"""`Session.step`: a decode or prefill through all layers with numpy arrays, described once."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnd import (
    InvalidRequest,
    KeyMismatch,
    NewSequence,
    NotSupported,
    OutOfPages,
    Prefix,
    Session,
)

from tests.harness.waiting import wait_for
from tests.session.stepping import HEADS, LAYERS, Served, serve

KV_HEADS, DIM = 2, 64


@pytest.fixture
def session(served: Served) -> Iterator[Session]:
    with Session(served.path) as made:
        yield made
        made.delete_sequences(prefix="")
        reply = made.pool()
        assert reply.integrity == "ok" and reply.free == reply.total, reply


def run(session: Session, names: list[str], lens: list[int], seed: int, **options: Any) -> Any:
    """A step with `lens` rows for each sequence; inputs and o, lse by layer."""
    generator = np.random.default_rng(seed)
    slots = session.slots(sum(lens), HEADS)
    indptr = None if set(lens) == {1} else [0, *np.cumsum(lens).tolist()]
    kept = []
    with session.step(names, slots, qo_indptr=indptr, **options) as step:
        for layer in step.layers:
            given = []
            for array in (step.q(layer), step.k(layer), step.v(layer)):
                array[:] = generator.standard_normal(array.shape)
                given.append(array.copy())
            o = step.attend(layer)
            kept.append((given, o.copy(), step.lse(layer).copy()))
    step.wait()
    return kept


@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 3}, {"lse_base": "2"}, {"sm_scale": 0.3, "logits_soft_cap": 5.0}],
)
def test_a_step_with_arrays_gives_the_results_of_the_layers_operations(
    session: Session, options: dict[str, Any]
) -> None:
    session.create_sequences([NewSequence(name) for name in ("a", "b", "a2", "b2")])
    for lens in ([5, 20], [1, 1], [3, 1]):
        kept = run(session, ["a", "b"], lens, sum(lens), **options)
        for layer, ((q, k, v), o, lse) in enumerate(kept):
            if set(lens) == {1}:
                reply = session.decode(layer, ["a2", "b2"], q, k=k, v=v, **options)
            else:
                indptr = [0, *np.cumsum(lens).tolist()]
                reply = session.prefill(
                    layer, ["a2", "b2"], q, indptr, causal=True, k=k, v=v, **options
                )
            np.testing.assert_allclose(o, reply.o, atol=1e-5)
            np.testing.assert_allclose(lse, reply.lse, atol=1e-5)
    assert [session.get_sequence(name).length for name in ("a", "b")] == [9, 22]


def test_layers_of_a_step_in_slices_have_the_results_of_whole_ones(
    session: Session, tmp_path: Path
) -> None:
    lens, options = [300, 40], {"lse_base": "2", "sm_scale": 0.3}
    with (
        serve("cpu", tmp_path, "--engine.slice-ms", "0.05") as other,
        Session(other.path) as sliced,
    ):
        results = []
        for each in (session, sliced):
            each.create_sequences([NewSequence("trunk")])
            run(each, ["trunk"], [70], 1)
            each.create_sequences([NewSequence(name, parent="trunk") for name in "ab"])
            results.append(run(each, ["a", "b"], lens, 2, **options))
    for (_, whole_o, whole_lse), (_, o, lse) in zip(*results, strict=True):
        np.testing.assert_allclose(o, whole_o, atol=1e-5)
        np.testing.assert_allclose(lse, whole_lse, atol=1e-5)


def test_a_step_of_some_layers_appends_there_only(session: Session) -> None:
    session.create_sequence("a")
    run(session, ["a"], [4], 1, layers=[2, 0])
    assert list(session.get_sequence("a").lengths) == [4, 0, 4]


@pytest.mark.parametrize("layers", [[0, 0], [1], [LAYERS]], ids=["twice", "another's", "no layer"])
def test_a_layer_that_the_engine_does_not_wait_for_is_refused_at_once(
    session: Session, layers: list[int]
) -> None:
    session.create_sequence("a")
    slots = session.slots(1, HEADS)
    with (
        pytest.raises(ValueError, match=f"layer {layers[-1]} was attended before, or is none"),
        session.step(["a"], slots, layers=[0, 2]) as step,
    ):
        for layer in layers:
            step.attend(layer)
    assert session.get_sequence("a").length == 0
    run(session, ["a"], [2], 1)


def test_a_step_may_have_an_infinite_deadline(session: Session) -> None:
    session.create_sequence("a")
    run(session, ["a"], [4], 1, deadline=math.inf)
    assert session.get_sequence("a").length == 4


def test_a_session_that_is_dropped_leaves_no_descriptor(served: Served) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    dropped = Session(served.path)
    assert dropped.live().ok
    with pytest.warns(ResourceWarning):
        del dropped
        gc.collect()
    # An engine in this process closes its ends in its own time.
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "the descriptors to be closed")


def test_a_session_closed_by_a_fork_stays_open_in_the_parent(session: Session) -> None:
    session.info()
    connection = session._road.connection
    if (pid := os.fork()) == 0:
        session.close()
        os._exit(0)
    os.waitpid(pid, 0)
    session.info()
    assert session._road.connection is connection


def test_a_refused_step_changes_nothing_and_the_next_one_works(session: Session) -> None:
    session.create_sequence("a")
    with pytest.raises(OutOfPages):
        run(session, ["a"], [100_000], 1)
    with pytest.raises(InvalidRequest, match="num_layers"):
        run(session, ["a"], [2], 1, layers=[LAYERS])
    assert session.get_sequence("a").length == 0
    run(session, ["a"], [2], 1)
    assert session.get_sequence("a").length == 2


def test_arrays_of_deleted_slots_keep_their_values(session: Session) -> None:
    session.create_sequence("a")
    kept = session.slots(4, HEADS).q(0)
    kept[:] = 3.0
    for rows in (1, 300, 5000, 9000):
        slots = session.slots(rows, HEADS)
        slots.q(0)[:] = 1.0
        session.append(
            0, ["a"], *[np.ones((50, KV_HEADS, DIM), np.float32)] * 2, append_indptr=[0, 50]
        )
        session.truncate("a", 0)
    assert (kept == 3.0).all()


def test_other_calls_of_the_session_work_within_a_step(session: Session) -> None:
    session.create_sequences([NewSequence("a"), NewSequence("b")])
    slots = session.slots(1, HEADS)
    with session.step(["a"], slots) as step:
        step.attend(0)
        big = np.ones((1500, KV_HEADS, DIM), np.float32)
        for layer in range(LAYERS):  # the session's arena grows for these
            session.append(layer, ["b"], big, big, append_indptr=[0, len(big)])
        for layer in range(1, LAYERS):
            step.attend(layer)
    step.wait()
    assert session.get_sequence("a").length == 1


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype(np.float32), None])
def test_slots_take_dtypes_by_any_of_their_names(session: Session, dtype: Any) -> None:
    assert session.slots(2, HEADS, dtype=dtype).q(0).dtype == np.float32


def test_slots_refuse_a_dtype_that_steps_do_not_take(session: Session) -> None:
    with pytest.raises(ValueError, match="slots take float32, float16, bfloat16"):
        session.slots(2, HEADS, dtype=np.float64)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": 0}, "rows is 0: it must be at least 1"),
        ({"num_qo_heads": 0}, "num_qo_heads is 0"),
        ({"rotation": 0}, "rotation is 0"),
        ({"rows": 1.5}, "rows is 1.5: it must be a whole number"),
    ],
)
def test_slots_refuse_numbers_that_hold_nothing(
    session: Session, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        session.slots(**({"rows": 2, "num_qo_heads": HEADS} | given))


def test_an_engine_with_device_slots_is_refused_with_the_remedy(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = replace(session.info(), backend="cuda")
    monkeypatch.setattr(Session, "info", lambda self: reply)
    with pytest.raises(NotSupported, match="TorchSession"):
        session.slots(1, HEADS)


def test_a_forked_process_has_steps_of_its_own_and_leaves_its_parents(
    session: Session, served: Served
) -> None:
    session.create_sequences([NewSequence("a"), NewSequence("b")])
    slots, large = session.slots(1, HEADS), session.slots(9000, HEADS)
    step = session.step(["a"], slots).__enter__()
    step.attend(0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del step  # cancels nothing of the parent's
            own = session.slots(1, HEADS)
            with session.step(["b"], own) as other:
                for layer in range(LAYERS):
                    other.attend(layer)
            other.wait()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    for layer in range(1, LAYERS):
        step.attend(layer)
    step.__exit__(None, None, None)
    step.wait()
    with session.step(["a"], large) as step:
        for layer in range(LAYERS):
            step.attend(layer)
    step.wait()
    assert [session.get_sequence(name).length for name in ("a", "b")] == [2, 1]


def test_pages_of_a_session_get_names_by_token_ids_in_every_call(session: Session) -> None:
    """The prompt by steps and calls, then drafts of which a truncation accepts some."""
    size, layers = session.info().page_size, range(session.info().num_layers)
    prompt = [*range(100, 100 + 2 * size)]
    session.create_sequences([NewSequence(name, prefix=Prefix([])) for name in ("a", "b")])
    slots = session.slots(3 * size, HEADS)

    def step(counts: list[int], token_ids: Any) -> Any:
        indptr = [0, *np.cumsum(counts).tolist()]
        with session.step(["a", "b"], slots, qo_indptr=indptr, token_ids=token_ids) as step:
            for layer in layers:
                step.attend(layer)
        step.wait()
        return step

    made = step([size + 1, 1], [*prompt[: size + 1], 7])
    assert (made.known_len, made.committed_len) == ((size + 1, 1), (0, 0))
    made = step([size, 2], [prompt[size + 1 : 2 * size], [8]])
    assert (made.known_len, made.committed_len) == ((2 * size, 2), (size, 0))
    assert session.match_prefix(Prefix(prompt), lease_s=0).matched_len == 2 * size
    shape = (len(layers), 2, KV_HEADS, DIM)
    k = np.zeros(shape, np.float32)
    added = session.append([*layers], ["a", "b"], k, k, token_ids=[[1, 2], [9, 10]])
    assert (added.known_len, added.committed_len) == ((2 * size + 2, 4), (2 * size, 0))
    kept = session.truncate("b", 2, keep=[3], token_ids=[10])
    assert (kept.length, kept.known_len) == (3, 3)
    (cut,) = session.truncate_sequences(["a"], [2 * size], token_ids=[[]])
    assert (cut.known_len, cut.committed_len) == (2 * size, 2 * size)
    q = np.zeros((2, HEADS, DIM), np.float32)
    with pytest.raises(KeyMismatch, match="id 10, not 11"):
        session.decode(0, ["a", "b"], q, token_ids=[prompt[-1], 11])
    found = session.decode(0, ["a", "b"], q, token_ids=[prompt[-1], 10])
    assert (found.known_len, found.committed_len) == ((2 * size, 3), (2 * size, 0))
    session.delete_sequences(prefix="")
    session.clear()
