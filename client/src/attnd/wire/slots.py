"""`FreeList`: first-fit allocation of stretches of an arena, the same at every caller's end."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

ALIGNMENT: Final = 64
"""Every slot begins at a multiple of this: a cache line, and enough for every dtype."""


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines, at least one."""
    return max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)


class FreeList:
    """The free stretches of an arena of `size` bytes. Not locked: its owner does that.

    A change of both lists is one statement without a call, which no signal's handler interrupts.
    """

    __slots__ = ("begins", "free", "lengths", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        """Bytes in all free stretches."""
        self.begins = [0] if size else []
        """First bytes of the free stretches, ascending; no two touch."""
        self.lengths = [size] if size else []

    def take(self, length: int) -> int | None:
        """Take `length` bytes of the first free stretch that has them; their offset, or None."""
        lengths = self.lengths
        for i, room in enumerate(lengths):
            if room < length:
                continue
            offset = self.begins[i]
            if room == length:
                del self.begins[i], lengths[i]
            else:
                self.begins[i], lengths[i] = offset + length, room - length
            self.free -= length
            return offset
        return None

    def take_at(self, offset: int, length: int) -> bool:
        """Take the `length` bytes at `offset`, if a free stretch begins there and has them."""
        begins, lengths = self.begins, self.lengths
        i = bisect_left(begins, offset)
        if i == len(begins) or begins[i] != offset or lengths[i] < length:
            return False
        if lengths[i] == length:
            del begins[i], lengths[i]
        else:
            begins[i], lengths[i] = offset + length, lengths[i] - length
        self.free -= length
        return True

    def put(self, offset: int, length: int) -> None:
        """Free a stretch and join it with the free stretches that touch it."""
        begins, lengths = self.begins, self.lengths
        i = bisect_left(begins, offset)
        self.free += length
        if i < len(begins) and begins[i] == offset + length:
            length += lengths[i]
            del begins[i], lengths[i]
        if i and begins[i - 1] + lengths[i - 1] == offset:
            lengths[i - 1] += length
        else:
            begins[i:i], lengths[i:i] = [offset], [length]

    def grow(self, size: int) -> None:
        if size > self.size:
            self.put(self.size, size - self.size)
            self.size = size
