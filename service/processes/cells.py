"""Numbers that one process writes and every process of the service may read: named blocks of
float64 cells in memory they share.

The first cell is the writer's pid. Records follow: one word (number of cells in its upper half,
bytes of the key in its lower), the key padded to whole words, the cells; a word of zero ends them.
That word is written last, so that a reader never sees half a record, and cells are read and written
whole. The memory outlives its writer: a process started in its place finds the blocks again and
counts on.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from service.processes.handed_files import anonymous_memory

SIZE: Final = 2**20
"""Bytes of one process's numbers; memory is taken only for those in use."""

WORD: Final = 8

Key = tuple[str, ...]


def make_shared() -> int:
    """A file descriptor of empty shared memory, to be handed to processes; it has no name, so
    nothing is left behind when the last of them ends."""
    fd = anonymous_memory("attnd-metrics")
    os.truncate(fd, SIZE)
    return fd


class Cells:
    """The blocks of one process; other processes' blocks may only be read."""

    def __init__(self, fd: int | None = None) -> None:
        """In shared memory, or without it in memory of its own."""
        self._bytes = memoryview(mmap.mmap(-1 if fd is None else fd, SIZE))
        self._words = self._bytes.cast("Q")
        self._floats = self._bytes.cast("d")
        self._found: dict[Key, memoryview[float]] = {}
        self._end = 1

    @property
    def pid(self) -> int:
        """The process that writes here, or wrote; 0 before the first."""
        return int(self._floats[0])

    def claim(self) -> None:
        """From now on this process writes here."""
        self._floats[0] = float(os.getpid())

    def block(self, key: Key, size: int) -> memoryview[float]:
        """The block of that key: `size` cells, zeros when it is new."""
        found = self.read().get(key)
        return self._add(key, size) if found is None else found

    def read(self) -> dict[Key, memoryview[float]]:
        """Every block so far; the views also show later writes."""
        for key, begin, size in self._records():
            self._found[key] = self._floats[begin : begin + size]
            self._end = begin + size
        return self._found

    def _records(self) -> Iterator[tuple[Key, int, int]]:
        """(key, index of its first cell, number of cells) of the records not seen before."""
        at = self._end
        while at < len(self._words) and self._words[at]:
            size, length = divmod(self._words[at], 2**32)
            name = bytes(self._bytes[(at + 1) * WORD :][:length])
            begin = at + 1 + num_words(length)
            yield tuple(name.decode().split("\0")), begin, size
            at = begin + size

    def _add(self, key: Key, size: int) -> memoryview[float]:
        name = "\0".join(key).encode()
        at = self._end
        if at + 1 + num_words(len(name)) + size > len(self._words):
            raise RuntimeError(f"no room for {key} in {SIZE} bytes of metrics: this is a bug")
        self._bytes[(at + 1) * WORD :][: len(name)] = name
        self._words[at] = size << 32 | len(name)
        return self.read()[key]


def num_words(length: int) -> int:
    return -(-length // WORD)


BETWEEN: Final = "/"
"""Separates a metric's name and its labels."""
MOST_LOST: Final = 256
"""Beyond this, the counts of the engines that were lost first are added up."""
Counts = Mapping[str, Sequence[float]]


def as_reported(blocks: Mapping[Key, Sequence[float]]) -> dict[str, list[float]]:
    """Counts as an engine reports them, without zeros."""
    counted = {key: block for key, block in blocks.items() if any(block)}
    return {BETWEEN.join(key): list(map(short, block)) for key, block in counted.items()}


def add_block(sums: dict[Key, list[float]], key: Key, block: Sequence[float]) -> None:
    """Add the cells of a block to the sums of its key, or begin with them."""
    before = sums.get(key)
    sums[key] = (
        list(block) if before is None else [a + b for a, b in zip(before, block, strict=True)]
    )


def short(value: float) -> float:
    return int(value) if value.is_integer() else value


class RemoteCounts:
    """Counts by the tag of each engine; a restarted engine has another tag. When an engine is lost,
    its counters stay, and its gauges are dropped."""

    def __init__(self, size_of: Callable[[str], int], is_gauge: Callable[[str], bool]) -> None:
        """`size_of`: cells of a metric's series, by its name; 0 for an unknown metric."""
        self._size_of = size_of
        self._is_gauge = is_gauge
        self._engines: dict[str, dict[Key, Sequence[float]]] = {}
        self._lost: OrderedDict[str, dict[Key, Sequence[float]]] = OrderedDict()
        self._folded: dict[Key, list[float]] = {}

    def take(self, tag: str, counts: Counts) -> None:
        """An engine has reported its counts since its start."""
        found = {tuple(name.split(BETWEEN)): block for name, block in counts.items()}
        self._lost.pop(tag, None)
        self._engines[tag] = {
            key: block for key, block in found.items() if self._size_of(key[0]) == len(block)
        }

    def lose(self, tag: str) -> None:
        """An engine can no longer be called."""
        if (blocks := self._engines.pop(tag, None)) is None:
            return
        self._lost[tag] = {key: one for key, one in blocks.items() if not self._is_gauge(key[0])}
        if len(self._lost) > MOST_LOST:
            for key, block in self._lost.popitem(last=False)[1].items():
                add_block(self._folded, key, block)

    def __iter__(self) -> Iterator[Mapping[Key, Sequence[float]]]:
        """The blocks of each engine, and the sums of dropped ones."""
        yield from self._engines.values()
        yield from self._lost.values()
        yield self._folded
