"""Arenas: memory that the engine can always touch, whatever its caller does to the file."""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from service.errors import InvalidRequest
from service.road.arena import PAGEABLE, UNMAPPED_AT_ONCE, Arena, Pinning

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make(2 * PAGE, 8 * PAGE, PAGEABLE)
    yield made
    made.close()


def test_sizes_are_whole_pages_between_one_and_the_limit() -> None:
    for asked, limit, size in ((0, 8, 1), (1, 8, 1), (PAGE + 1, 8, 2), (99 * PAGE, 8, 8)):
        made = Arena.make(asked, limit * PAGE, PAGEABLE)
        assert (made.size, made.limit) == (size * PAGE, limit * PAGE), f"asked for {asked}"
        assert os.fstat(made.fd).st_size == made.size
        made.close()


def test_a_callers_writes_are_visible(arena: Arena) -> None:
    theirs = mmap.mmap(arena.fd, arena.size)
    theirs[64:68] = np.float32(1.5).tobytes()
    assert bytes(arena.view(64, 4)) == np.float32(1.5).tobytes()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 2 * PAGE + 1), (2 * PAGE, 1), (2**64, 0), (64, 2**64), (-64, 1), (0, -1), (2 * PAGE, 64)],
)
def test_a_slot_outside_the_arena_is_refused(arena: Arena, offset: int, length: int) -> None:
    with pytest.raises(InvalidRequest, match="inside the arena of 8192 bytes"):
        arena.view(offset, length)


def test_a_slot_begins_at_a_multiple_of_64(arena: Arena) -> None:
    with pytest.raises(InvalidRequest, match="slot_offset = 8: a multiple of 64"):
        arena.view(8, 8)


def test_the_last_bytes_and_an_empty_slot_at_the_end_are_inside(arena: Arena) -> None:
    assert len(arena.view(arena.size - 64, 64)) == 64
    assert len(arena.view(arena.size, 0)) == 0


def test_a_caller_cannot_shrink_the_file_or_break_its_seals(arena: Arena) -> None:
    for size in (0, arena.size - PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.view(0, arena.size)[:] = bytes(arena.size)


def test_holes_that_a_caller_punches_read_as_zeros(arena: Arena) -> None:
    arena.view(0, 4)[:] = b"data"
    theirs = mmap.mmap(arena.fd, arena.size)
    theirs.madvise(mmap.MADV_REMOVE, 0, PAGE)
    assert bytes(arena.view(0, 4)) == bytes(4)


def test_growth_keeps_views_and_stops_at_the_limit(arena: Arena) -> None:
    before = arena.view(0, 4)
    arena.grow(3 * PAGE + 1)
    assert arena.size == 4 * PAGE == os.fstat(arena.fd).st_size
    arena.view(3 * PAGE, PAGE)[:] = bytes(PAGE)
    before[:] = b"same"
    assert bytes(arena.view(0, 4)) == b"same"
    arena.grow(PAGE)
    assert arena.size == 4 * PAGE, "an arena never shrinks"
    arena.grow(2**62)
    assert arena.size == 8 * PAGE


def test_growth_works_when_the_caller_has_made_the_file_longer(arena: Arena) -> None:
    os.ftruncate(arena.fd, 100 * PAGE)
    arena.grow(4 * PAGE)
    assert arena.size == 4 * PAGE
    assert len(arena.view(3 * PAGE, PAGE)) == PAGE
    with pytest.raises(InvalidRequest):
        arena.view(4 * PAGE, 1)


def test_views_outlive_the_arena() -> None:
    made = Arena.make(PAGE, PAGE, PAGEABLE)
    view = made.view(0, PAGE)
    made.close()
    view[:] = b"x" * PAGE
    with pytest.raises(InvalidRequest):
        made.view(0, 1)
    made.close()


def test_pinning_follows_the_arena_from_its_making_to_its_end() -> None:
    reply: list[tuple[str, int]] = []

    def pin(memory: memoryview) -> bool:
        reply.append(("pin", len(memory)))
        return len(memory) <= 2 * PAGE

    made = Arena.make(
        PAGE, 8 * PAGE, Pinning(pin, lambda memory: reply.append(("unpin", len(memory))))
    )
    made.grow(2 * PAGE)
    assert len(made.pinned) == 2 * PAGE
    made.grow(4 * PAGE)
    assert len(made.pinned) == 0
    made.close()
    assert reply == [
        ("pin", PAGE),
        ("unpin", PAGE),
        ("pin", 2 * PAGE),
        ("unpin", 2 * PAGE),
        ("pin", 4 * PAGE),
    ]


def test_where_there_is_no_memfd_a_temporary_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    made = Arena.make(PAGE, 4 * PAGE, PAGEABLE)
    theirs = mmap.mmap(made.fd, made.size)
    theirs[:4] = b"file"
    assert bytes(made.view(0, 4)) == b"file"
    made.grow(2 * PAGE)
    made.view(PAGE, PAGE)[:] = bytes(PAGE)
    made.close()


def test_an_arena_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OSError, match="no memory"):
        Arena.make(PAGE, PAGE, PAGEABLE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_large_arena_is_unmapped_in_a_thread_of_its_own() -> None:
    """A gigabyte would keep the engine's thread for a quarter of a second."""
    threads: queue.SimpleQueue[int] = queue.SimpleQueue()
    arena = Arena.make(2 * UNMAPPED_AT_ONCE, 2 * UNMAPPED_AT_ONCE, PAGEABLE)
    weakref.finalize(arena.memory.obj, lambda: threads.put(threading.get_ident()))
    arena.close()
    assert threads.get(timeout=60) != threading.get_ident()
