"""Numbers by name in shared cells, for a bounded number of names that change: slots.

The first cell is the version, odd while a name changes. Each slot has a name, padded with zeros,
and its cells. One process writes; others read a copy, again where the version changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from service.processes.cells import WORD

NAME_WORDS: Final = 8
TRIES: Final = 3


def size_of_slots(count: int, width: int) -> int:
    """Cells of a block with `count` slots of `width` cells."""
    return 1 + count * (NAME_WORDS + width)


class NamedSlots:
    """The writer's view of a block; a successor finds the names again."""

    def __init__(self, block: memoryview[float], width: int) -> None:
        self._block, self._width = block, width
        self._bytes = block.cast("B")
        if block[0] % 2:  # the process before ended while it changed a name
            self._bytes[:] = bytes(block.nbytes)
        self.by_name = {name: self._cells(at) for name, at in self._names() if name}
        """The cells of each name."""

    def claim(self, name: str, instead_of: str = "") -> memoryview[float] | None:
        """Cells, all 0, of a new name of 1 to 64 ASCII characters: in a free slot or in another
        name's. None where there is no free one."""
        begin = next((at for other, at in self._names() if other == instead_of), None)
        if begin is None:
            return None
        size = (NAME_WORDS + self._width) * WORD
        self._block[0] += 1.0
        self._bytes[begin * WORD : begin * WORD + size] = name.encode().ljust(size, b"\0")
        self._block[0] += 1.0
        self.by_name.pop(instead_of, None)
        cells = self.by_name[name] = self._cells(begin)
        return cells

    def _names(self) -> Iterator[tuple[str, int]]:
        return names_in(self._bytes.tobytes(), self._width)

    def _cells(self, begin: int) -> memoryview[float]:
        return self._block[begin + NAME_WORDS : begin + NAME_WORDS + self._width]


def names_in(raw: bytes, width: int) -> Iterator[tuple[str, int]]:
    """(name, index of its first cell) of each slot; a free one has no name."""
    whole = NAME_WORDS + width
    for begin in range(1, len(raw) // WORD - whole + 1, whole):
        name = raw[begin * WORD : (begin + NAME_WORDS) * WORD]
        yield name.rstrip(b"\0").decode(), begin


def read_slots(block: memoryview[float], width: int) -> dict[str, list[float]]:
    """The cells of each name, of one moment; none while a writer is stopped within a change."""
    for _ in range(TRIES):
        version, raw = block[0], block.tobytes()
        if version % 2 or version != block[0]:
            continue
        cells: memoryview[float] = memoryview(raw).cast("d")
        return {
            name: list(cells[begin + NAME_WORDS : begin + NAME_WORDS + width])
            for name, begin in names_in(raw, width)
            if name
        }
    return {}
