"""Slots: a caller's arena cut into pieces, and when a piece may be used again."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from service.road.caller_end.slots import TRIMMED_AT_ONCE, ArenaFull, Mapping, Slot, Slots

SIZE = 2**16


@pytest.fixture
def slots() -> Iterator[Slots]:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, SIZE)
    mapping = Mapping(fd, SIZE)
    yield Slots(mapping)
    mapping.close()


def test_slots_begin_at_multiples_of_64_and_have_the_requested_size(slots: Slots) -> None:
    for size, length in ((0, 64), (1, 64), (64, 64), (65, 128), (4096, 4096)):
        slot = slots.take(size)
        assert slot.offset % 64 == 0 and slot.size == length, f"asked for {size}"
        assert len(slot.view()) == length and len(slot.view(1)) == 1


def test_writes_are_at_the_slots_offset(slots: Slots) -> None:
    slots.take(100)
    slot = slots.take(64)
    np.ndarray((2, 3), np.float32, slot.array, 8)[...] = 7
    begin = slot.offset + 8
    found = np.frombuffer(slots.mapping.memory[begin : begin + 24], np.float32)
    assert found.tolist() == [7.0] * 6
    with pytest.raises(TypeError):
        np.ndarray((15,), np.float32, slot.array, 8)


def test_a_slot_comes_back_when_it_is_freed(slots: Slots) -> None:
    whole = slots.take(SIZE)
    with pytest.raises(ArenaFull, match="a slot of 64 bytes, 0 of 65536 are free"):
        slots.take(1)
    whole.free()
    assert slots.free() == SIZE
    assert slots.take(SIZE).offset == 0


def test_a_slot_that_the_engine_holds_comes_back_when_both_are_done(slots: Slots) -> None:
    slot = slots.take(SIZE)
    slot.hold()
    slot.free()
    assert slots.free() == 0
    slot.free()
    assert slots.free() == SIZE


def test_a_slot_comes_back_with_the_last_view_of_its_bytes(slots: Slots) -> None:
    slot: Slot | None = slots.take(1024)
    assert slot is not None
    views: list[object] = [slot.view(10), slot.view(20)[2:4], slot.array[5:]]
    views.append(np.ndarray((3,), np.int32, slot.array)[1:])
    slot = None
    while views:
        gc.collect()
        assert slots.free() == SIZE - 1024, f"{len(views)} views are left"
        views.pop()
    assert slots.free() == SIZE


def test_a_freed_slot_does_not_come_back_twice(slots: Slots) -> None:
    slot = slots.take(1024)
    slot.free()
    other = slots.take(1024)
    del slot
    gc.collect()
    assert slots.free() == SIZE - 1024
    other.free()


def test_free_stretches_join_whatever_the_order(slots: Slots) -> None:
    taken = [slots.take(1024) for _ in range(64)]
    random.Random(3).shuffle(taken)
    for slot in taken:
        slot.free()
    assert slots.take(SIZE).size == SIZE


def test_slots_never_overlap_over_thousands_of_takes_and_frees(slots: Slots) -> None:
    rng = random.Random(5)
    held: list[Slot] = []
    for step in range(5000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).free()
        else:
            try:
                held.append(slots.take(rng.randrange(1, 4096)))
            except ArenaFull:
                continue
        spans = sorted((slot.offset, slot.offset + slot.size) for slot in held)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), f"step {step}"
        assert slots.free() == SIZE - sum(slot.size for slot in held), f"step {step}"
    for slot in held:
        slot.free()
    assert slots.free() == SIZE and slots.stretches.begins == [0]


def test_threads_may_take_and_free_at_once(slots: Slots) -> None:
    def work() -> None:
        for size in range(1, 800):
            slot = slots.take(size)
            slot.array[:] = size % 256
            assert (slot.array == size % 256).all()
            slot.free()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slots.free() == SIZE


def test_a_larger_mapping_adds_room_and_old_views_show_the_same_memory(slots: Slots) -> None:
    first = slots.take(SIZE)
    os.ftruncate(slots.mapping.fd, 2 * SIZE)
    slots.mapping.grow(2 * SIZE)
    slots.grow(2 * SIZE)
    second = slots.take(SIZE)
    assert second.offset == SIZE
    first.array[:4] = 9
    assert bytes(slots.mapping.memory[:4]) == bytes([9] * 4)
    first.free()
    second.free()
    assert slots.take(2 * SIZE).offset == 0


def test_trimming_takes_a_piece_at_a_time() -> None:
    """A gigabyte at once would stall a door's loop for a quarter of a second."""
    fd, size = os.memfd_create("slots"), 8 * TRIMMED_AT_ONCE
    os.ftruncate(fd, size)
    mapping = Mapping(fd, size)
    slots = Slots(mapping)
    slot = slots.take(size)
    slot.array[:] = 1
    slot.free()
    blocks, begin = [os.fstat(fd).st_blocks], slots.trim()
    while begin is not None:
        blocks.append(os.fstat(fd).st_blocks)
        begin = slots.trim(begin)
    assert [a - b for a, b in pairwise(blocks)] == [TRIMMED_AT_ONCE // 512] * 8
    mapping.close()


def test_trimming_returns_only_free_memory() -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 2**22)
    mapping = Mapping(fd, 2**22)
    slots = Slots(mapping)
    kept, freed = slots.take(2**20), slots.take(2**21)
    kept.array[:] = 1
    freed.array[:] = 2
    before = os.fstat(fd).st_blocks
    freed.free()
    slots.trim()
    assert os.fstat(fd).st_blocks <= before - 2**21 // 512
    assert kept.array.all()
    assert not slots.take(2**21).array.any()
    mapping.close()
