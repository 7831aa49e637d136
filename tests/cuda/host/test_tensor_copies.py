"""What copies tensors of every kind cost on CUDA: which, from where and to where."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from fake_device import ON_DEVICE, TO_DEVICE, TO_HOST
from faked_backend import FLOAT32, attention, mask_of, merging
from tensor_rig import HALF, ROOM, Rig, address, attend

from kernels.backend import AttentionState


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Copies are counted: no others."""
    return Rig(monkeypatch, alone=True)


def test_a_pinned_q_is_copied_without_staging(rig: Rig) -> None:
    q = rig.pinned(rig.values(3, 4, 64))
    rig.backend.attend([attend(q)])
    (copy,) = rig.of_kind(TO_DEVICE)
    assert (copy.source, copy.size) == (address(q), q.nbytes)
    assert copy.stream == rig.backend.transfers.copy_in.ptr
    assert rig.kernels.attended[0][0] == copy.to


def test_pinned_qs_of_one_launch_go_each_to_its_own_rows(rig: Rig) -> None:
    given = [rig.pinned(rig.values(rows, 4, 64)) for rows in (2, 3, 1)]
    rig.backend.attend([attend(q) for q in given])
    base = rig.kernels.attended[0][0]
    row = 4 * 64 * 2
    assert [(c.source, c.to - base, c.size) for c in rig.of_kind(TO_DEVICE)] == [
        (address(q), first * row, len(q) * row) for q, first in zip(given, (0, 2, 5), strict=True)
    ]


def test_pageable_qs_and_masks_of_one_launch_go_in_one_copy(rig: Rig) -> None:
    given = [attend(rig.values(rows, 4, 64), mask=mask_of(rows)) for rows in (2, 3)]
    rig.backend.attend(given)
    assert len(rig.of_kind(TO_DEVICE)) == 1


def test_a_q_of_another_dtype_is_rounded_once_on_its_way_to_pinned_memory(rig: Rig) -> None:
    values = rig.values(3, 4, 64, dtype=np.float32)
    want = attention(values.astype(HALF))
    for q in (values.copy(), rig.pinned(values)):
        rig.device.copies.clear()
        state = rig.backend.attend([attend(q)]).result()[0]
        (copy,) = rig.of_kind(TO_DEVICE)
        assert copy.size == values.size * 2
        assert copy.source != address(q)
        assert state.o.dtype == np.float32
        assert np.array_equal(state.o, want[0].astype(np.float32))


def test_a_pinned_array_with_room_between_its_rows_is_staged(rig: Rig) -> None:
    wide = rig.pinned(rig.values(3, 4, 80))
    state = rig.backend.attend([attend(wide[:, :, :64])]).result()[0]
    assert np.array_equal(state.o, attention(np.array(wide[:, :, :64]))[0])


def test_pinned_memory_in_two_registered_ranges_goes_in_two_copies(rig: Rig) -> None:
    values = rig.values(4, 4, 64)
    rig.used = ROOM // 2 - values.nbytes // 2
    rig.backend.unregister(rig.begin)
    for first in (0, ROOM // 2):
        assert rig.backend.register(rig.begin + first, ROOM // 2)
    q, place = rig.pinned(values), rig.state("pinned", (4, 4, 64))
    got = rig.backend.attend([attend(q, place)]).result()[0]
    assert [copy.size for copy in rig.of_kind(TO_DEVICE)] == [q.nbytes // 2] * 2
    assert np.array_equal(got.o, attention(values)[0])


def test_a_device_q_is_read_in_place_in_its_streams_order(rig: Rig) -> None:
    values = rig.values(3, 4, 64)
    q = rig.give("device", values)
    pending = rig.backend.attend([attend(q)])
    rig.spoil(q)
    assert rig.of_kind(TO_DEVICE) == rig.of_kind(ON_DEVICE) == []
    assert rig.kernels.attended[0][0] == q.address
    assert np.array_equal(pending.result()[0].o, attention(values)[0])


def test_device_qs_of_one_launch_are_laid_side_by_side_on_the_device(rig: Rig) -> None:
    given = [rig.give("device", rig.values(rows, 4, 64)) for rows in (2, 3)]
    rig.backend.attend([attend(q) for q in given])
    base = rig.kernels.attended[0][0]
    assert [(c.source, c.to - base, c.size) for c in rig.of_kind(ON_DEVICE)] == [
        (given[0].address, 0, 1024),
        (given[1].address, 1024, 1536),
    ]
    assert rig.of_kind(TO_DEVICE) == []


def test_a_pinned_place_is_written_by_the_device(rig: Rig) -> None:
    place = rig.state("pinned", (3, 4, 64))
    q = rig.values(3, 4, 64)
    got = rig.backend.attend([attend(q, place)]).result()[0]
    assert got is place
    assert [copy.to for copy in rig.of_kind(TO_HOST)] == [address(place.o), address(place.lse)]
    assert np.array_equal(place.o, attention(q)[0])


def test_an_answer_without_a_place_comes_in_one_copy(rig: Rig) -> None:
    rig.backend.attend([attend(rig.values(rows, 4, 64)) for rows in (3, 2)])
    assert len(rig.of_kind(TO_HOST)) == 1


def test_a_device_place_of_the_only_request_is_written_by_the_kernel(rig: Rig) -> None:
    q, place = rig.values(3, 4, 64), rig.state("device", (3, 4, 64))
    rig.backend.attend([attend(q, place)])
    assert rig.kernels.attended[0][1:] == (place.o.address, place.lse.address)
    assert rig.of_kind(TO_HOST) == rig.of_kind(ON_DEVICE) == []
    assert np.array_equal(rig.read(place.o), attention(q)[0])


def test_states_merged_into_device_memory_stay_there(rig: Rig) -> None:
    o, lse, ends = rig.values(4, 4, 64), rig.values(4, 4, dtype=FLOAT32), np.array([0, 1, 4])
    first = rig.values(2, 4, 64), rig.values(2, 4, dtype=FLOAT32)
    into = AttentionState(*(rig.give("device", values) for values in first))
    got = rig.backend.merge(o, lse, ends.astype(np.int32), into).result()
    assert got is into
    assert rig.kernels.merged[0][1] == [into.o.address, into.lse.address]
    assert rig.of_kind(TO_HOST) == []
    want = merging(o, lse, ends.astype(np.int32), AttentionState(*first))
    assert np.array_equal(rig.read(into.o), want.o)
