"""Tensors of every kind on CUDA: what waits for what, and what lives until it is done."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from faked_backend import FLOAT32, SCORING, attention, mask_of, merging
from tensor_rig import HALF, KINDS, Rig, address, attend

from kernels.backend import NUMPY_DTYPES, AttentionState, DeviceLost, Done, RaggedAttend
from kernels.cuda.device.transfer import MOST_INFLIGHT
from kernels.tensor import PinnedArray


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_handles_gives_the_numbers_whatever_runs_first(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Calls overlap; inputs are overwritten as soon as their owner is allowed to, then dropped."""
    rig = Rig(monkeypatch, seed)
    pick = rig.device.order.choice
    waiting = []
    for _ in range(6):
        dtype = NUMPY_DTYPES[pick(["fp16", "fp16", "bf16", "fp32"])]
        masked = pick([True, False])
        requests, want = [], []
        for _ in range(pick([1, 1, 2, 4])):
            rows = pick([0, 1, 2, 3])
            values = rig.values(rows, 4, 64, dtype=dtype)
            kind = pick([None, *KINDS])
            place = None if kind is None else rig.state(kind, values.shape, dtype)
            mask = mask_of(rows) if masked else None
            requests.append(attend(rig.give(pick(KINDS), values), place, mask))
            o, lse = attention(values.astype(HALF), (), 255 if masked else 0)
            want.append((o.astype(dtype), lse))
        pending = rig.backend.attend(requests)
        for request in requests:
            rig.spoil(request.q)
        outs = [r.out and (r.out, *rig.readings(r.out)) for r in requests]
        waiting.append((pending, outs, want))
        del requests, request, place
        if pick([True, False]):
            rig.device.run(until=lambda: rig.device.order.random() < 0.1)
    rig.device.order.shuffle(waiting)
    for pending, outs, want in waiting:
        for state, out, (o, lse) in zip(pending.result(), outs, want, strict=True):
            if out is not None:
                assert state is out[0]
                assert np.array_equal(out[1](), o)
                assert np.array_equal(out[2](), lse)
            else:
                assert np.array_equal(state.o, o)
                assert np.array_equal(state.lse, lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_ragged_keys_of_any_kind_are_attended(
    monkeypatch: pytest.MonkeyPatch, seed: int, kind: str
) -> None:
    rig = Rig(monkeypatch, seed)
    q, k, v = rig.values(3, 4, 64), rig.values(5, 2, 64), rig.values(5, 2, 64)
    given = [rig.give(kind, values) for values in (q, k, v)]
    ends = np.array([0, 3], np.int32), np.array([0, 5], np.int32)
    pending = rig.backend.attend_ragged(RaggedAttend(*given, *ends, False, SCORING))
    for tensor in given:
        rig.spoil(tensor)
    state = pending.result()
    o, lse = attention(q, (k, v))
    assert np.array_equal(state.o, o)
    assert np.array_equal(state.lse, lse)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_calls_in_flight_keep_their_plans(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = Rig(monkeypatch, seed, alone=True)
    waiting = []
    for rows in (1, 8, 2, 5, 1, 8):
        q, k, v = rig.values(rows, 4, 64), rig.values(9, 2, 64), rig.values(9, 2, 64)
        ends = np.array([0, rows], np.int32), np.array([0, 9], np.int32)
        given = [rig.give("device", values) for values in (q, k, v)]
        pending = rig.backend.attend_ragged(RaggedAttend(*given, *ends, False, SCORING))
        waiting.append((pending, attention(q, (k, v))[0]))
        rig.device.run(until=lambda: rig.device.order.random() < 0.1)
    for pending, o in waiting:
        assert np.array_equal(pending.result().o, o)


def test_owners_are_released_only_when_their_work_is_done(rig: Rig) -> None:
    class Owner:
        """The inputs of a piece of work."""

    stream, freed = rig.device.stream(), []
    for _ in range(3 * MOST_INFLIGHT):
        event = stream.record(rig.device.cupy.cuda.Event())
        owner = Owner()
        weakref.finalize(owner, lambda event=event: freed.append(event.done))
        rig.backend.transfers.keep(event, (owner,))
        del owner
    assert len(freed) >= 2 * MOST_INFLIGHT
    assert all(freed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_kind_go_in_and_come_out(
    monkeypatch: pytest.MonkeyPatch, seed: int, kind: str
) -> None:
    rig = Rig(monkeypatch, seed)
    k, v = rig.values(3, 2, 64), rig.values(3, 2, 64)
    slots = np.array([4, 0, 31], np.int32)
    given = [rig.give(kind, values) for values in (k, v)]
    written = rig.backend.append(1, *given, slots)
    for tensor in given:
        rig.spoil(tensor)
    del given, tensor
    places = rig.give(kind, np.zeros_like(k)), rig.give(kind, np.zeros_like(v))
    got = rig.backend.gather(1, slots, "fp16", places).result()
    assert got[0] is places[0]
    assert got[1] is places[1]
    assert np.array_equal(rig.read(got[0]), k)
    assert np.array_equal(rig.read(got[1]), v)
    assert written.done


@pytest.mark.parametrize("where", ["fresh", "into", "out"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_any_kind_are_merged(rig: Rig, kind: str, where: str) -> None:
    ends = np.array([0, 2, 2, 5], np.int32)
    o, lse = rig.values(5, 4, 64), rig.values(5, 4, dtype=FLOAT32)
    first = AttentionState(rig.values(3, 4, 64), rig.values(3, 4, dtype=FLOAT32))
    places: dict[str, Any] = {"out": rig.state(kind, (3, 4, 64))} if where == "out" else {}
    if where == "into":
        places = {"into": AttentionState(rig.give(kind, first.o), rig.give(kind, first.lse))}
    state = rig.backend.merge(rig.give(kind, o), rig.give(kind, lse), ends, **places).result()
    want = merging(o, lse, ends, first if where == "into" else None)
    assert np.array_equal(rig.read(state.o), want.o)
    assert np.array_equal(rig.read(state.lse), want.lse)


def test_appending_pinned_rows_is_done_when_they_have_been_read(rig: Rig) -> None:
    rows, slots = rig.values(3, 2, 64), np.arange(3, dtype=np.int32)
    assert isinstance(rig.backend.append(0, rows, rows, slots), Done)
    written = rig.backend.append(0, rig.pinned(rows), rig.pinned(rows), slots)
    assert not written.done
    assert written.result() is None
    assert written.done


def test_rows_that_the_compute_stream_writes_are_not_read_ahead_of_it(rig: Rig) -> None:
    own = rig.device.of(rig.backend.transfers.compute.ptr)
    rows = [rig.device.tensor(rig.values(2, 2, 64), s) for s in (own, rig.device.stream())]
    slots = np.arange(2, dtype=np.int32)
    for k in rows:
        rig.backend.append(0, k, k, slots)
    assert [overlap for _, overlap in rig.kernels.appended] == [False, True]


def test_done_asks_without_waiting(rig: Rig) -> None:
    pending = rig.backend.attend([attend(rig.values(3, 4, 64))])
    assert not pending.done
    rig.device.run()
    assert pending.done
    assert pending.seconds.kernel > 0
    assert len(pending.result()) == 1


def test_done_raises_what_became_of_the_device(rig: Rig) -> None:
    pending = rig.backend.attend([attend(rig.values(3, 4, 64))])
    rig.device.failed = 700
    with pytest.raises(DeviceLost, match="cannot be trusted"):
        _ = pending.done


@pytest.mark.parametrize("seed", range(8))
def test_a_dropped_answer_frees_nothing_early(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig = Rig(monkeypatch, seed)
    ends = np.array([0, 2], np.int32)
    for kind in KINDS:
        for place in (None, rig.state(kind, (3, 4, 64))):
            rig.backend.attend([attend(rig.give(kind, rig.values(3, 4, 64)), place)])
        o, lse = rig.values(2, 4, 64), rig.values(2, 4, dtype=FLOAT32)
        rig.backend.merge(rig.give(kind, o), lse, ends, into=rig.state(kind, (1, 4, 64)))
        del place
        rig.device.run(until=lambda: rig.device.order.random() < 0.1)
    rig.device.run()


def test_pinned_memory_lives_until_it_has_been_read_and_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, alone=True)

    class Mapping(bytearray):
        """Memory of a session, which may end."""

    lives = []
    for _ in range(2):
        mapping = Mapping(1 << 14)
        lives.append(weakref.ref(mapping))
        whole = np.frombuffer(mapping, np.uint8)
        rig.backend.register(address(whole), len(whole))
        rows = whole[: 3 << 11].view(np.float16).reshape(3, 4, 256).view(PinnedArray)
        lse = whole[-48:].view(np.float32).reshape(3, 4).view(PinnedArray)
        wide = rows[..., :64]
        q = rows.reshape(12, 4, 64)
        place = AttentionState(wide.copy(), lse) if lives[1:] else None
        rig.backend.attend([attend(q if place is None else rig.values(3, 4, 64), place)])
    del mapping, whole, rows, lse, wide, q, place
    assert all(ref() is not None for ref in lives)
    rig.backend.transfers.finish()
    assert all(ref() is None for ref in lives)


def test_what_calls_held_is_released_once_they_are_done(rig: Rig) -> None:
    rig.device.run()
    before = len(rig.device.live["device"])
    for kind in KINDS:
        rig.backend.attend(
            [attend(rig.give(kind, rig.values(3, 4, 64)), rig.state(kind, (3, 4, 64)))]
        )
    rig.settle()
    rig.backend.transfers.finish()
    rig.device.run()
    assert len(rig.device.live["device"]) == before
    assert not rig.device.live["pinned"]


@pytest.mark.parametrize("status", [2, 712, 801])
def test_memory_that_the_device_refuses_to_pin_is_no_failure_of_the_device(
    rig: Rig, status: int
) -> None:
    rig.device.refuses = status
    assert not rig.backend.register(1 << 30, 4096)
    assert rig.backend.attend([attend(rig.values(1, 4, 64))]).result()


def test_a_device_that_fails_while_pinning_is_lost(rig: Rig) -> None:
    rig.device.refuses = 700
    with pytest.raises(DeviceLost):
        rig.backend.register(1 << 30, 4096)


def test_memory_is_unregistered_after_the_copies_that_touch_it(rig: Rig) -> None:
    place = rig.state("pinned", (3, 4, 64))
    rig.backend.attend([attend(rig.pinned(rig.values(3, 4, 64)), place)])
    rig.backend.unregister(rig.begin)
    rig.backend.unregister(rig.begin)
    assert not rig.device.live["registered"]
    assert np.isfinite(np.array(place.o)).all()
    rig.device.run()


def test_a_closed_backend_has_released_of_the_memory(rig: Rig) -> None:
    rig.backend.attend([attend(rig.pinned(rig.values(3, 4, 64)))])
    rig.backend.close()
    assert not rig.device.live["registered"]
    rig.backend.unregister(rig.begin)


def test_unregistering_waits_for_nothing_else(rig: Rig) -> None:
    pending = rig.backend.attend([attend(rig.values(3, 4, 64))])
    rig.backend.unregister(rig.begin)
    assert not pending.done
