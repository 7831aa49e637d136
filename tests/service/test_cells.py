"""Shared cells: one process writes, another reads, a successor continues."""

from __future__ import annotations

import os

import pytest

from service.processes.cells import SIZE, Cells, make_shared
from tests.harness.processes import python

WRITER = """
import os, sys
from service.processes.cells import Cells
cells = Cells(int(sys.argv[1]))
cells.claim()
block = cells.block(("requests", "decode", "ok"), 1)
block[0] += 2.0
cells.block(("spread",), 3)[2] += 0.5
print(os.getpid())
"""


def write_elsewhere(fd: int) -> int:
    """Another process counts in that memory; its pid."""
    return int(python(WRITER, str(fd), pass_fds=[fd]))


@pytest.fixture
def fd() -> int:
    return make_shared()


def values(cells: Cells) -> dict[tuple[str, ...], list[float]]:
    return {key: list(block) for key, block in cells.read().items()}


def test_a_reader_sees_what_another_process_wrote_before_and_after(fd: int) -> None:
    reader = Cells(fd)
    assert (reader.pid, values(reader)) == (0, {})
    pid = write_elsewhere(fd)
    assert reader.pid == pid
    wanted = {("requests", "decode", "ok"): [2.0], ("spread",): [0.0, 0.0, 0.5]}
    assert values(reader) == wanted


def test_a_successor_finds_the_blocks_and_counts_on(fd: int) -> None:
    first, second = write_elsewhere(fd), write_elsewhere(fd)
    reader = Cells(fd)
    assert reader.pid == second != first
    assert values(reader) == {("requests", "decode", "ok"): [4.0], ("spread",): [0.0, 0.0, 1.0]}


def test_blocks_do_not_overlap_whatever_their_names(fd: int) -> None:
    cells = Cells(fd)
    keys = [("x" * length, "é" * length) for length in range(20)]
    for number, key in enumerate(keys):
        block = cells.block(key, number % 3 + 1)
        block[-1] = number
    assert [block[-1] for block in Cells(fd).read().values()] == list(range(20))
    assert list(Cells(fd).read()) == keys


def test_without_shared_memory_two_are_separate() -> None:
    Cells().block(("a",), 1)[0] = 1.0
    assert Cells().read() == {}


def test_too_many_blocks_are_refused_with_the_size(fd: int) -> None:
    cells = Cells(fd)
    with pytest.raises(RuntimeError, match=f"no room for .* in {SIZE} bytes"):
        for number in range(SIZE):
            cells.block((str(number),), 1000)


def test_the_memory_has_no_name_and_is_sparse(fd: int) -> None:
    found = os.fstat(fd)
    assert (found.st_size, found.st_nlink) == (SIZE, 0)
    assert found.st_blocks * 512 <= 8192
