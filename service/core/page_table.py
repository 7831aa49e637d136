"""Page tables of sequences: what forks have in common is stored once."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

BLOCK_PAGES: Final = 512
"""Pages of a block: a fork copies fewer than this many entries, and refers to 2 KiB at a time."""
NO_PAGES: Final = np.empty(0, np.int32)


class Blocks:
    """Runs of `BLOCK_PAGES` pages, each at a multiple of that in its path, by their last page.

    A page has one place in the tree, so equal blocks of sequences are one array; it lives as long
    as the table of one of them refers to it.
    """

    def __init__(self) -> None:
        self._by_last: WeakValueDictionary[int, Int32] = WeakValueDictionary()

    def of(self, pages: Int32) -> tuple[Int32, ...]:
        """The blocks of a path's `pages`, the first of which begins a block."""
        blocks = []
        for at in range(0, pages.size - BLOCK_PAGES + 1, BLOCK_PAGES):
            part = pages[at : at + BLOCK_PAGES]
            block = self._by_last.get(last := part.item(-1))
            if block is None or not np.array_equal(block, part):
                block = self._by_last[last] = part.copy()
            blocks.append(block)
        return tuple(blocks)


class PageTable:
    """A sequence's pages: `base` of them in blocks that other tables may have, which are never
    written, then its `own` ones, in a buffer that grows by doubling.

    The books have the number of valid pages.
    """

    __slots__ = ("base", "own", "shared")

    def __init__(self, shared: tuple[Int32, ...] = (), own: Int32 = NO_PAGES) -> None:
        self.shared = shared
        self.own = own
        self.base = len(shared) * BLOCK_PAGES

    @classmethod
    def of(cls, pages: Int32, blocks: Blocks) -> PageTable:
        """The table of a whole path's `pages`, which are copied."""
        shared = blocks.of(pages)
        return cls(shared, pages[len(shared) * BLOCK_PAGES :].copy())

    def fork(self, held: int, full: int, tail: Int32, blocks: Blocks) -> PageTable:
        """The first `full` of the `held` pages, then `tail`. What both have is shared from now
        on."""
        num_blocks = full // BLOCK_PAGES
        if num_blocks > len(self.shared):
            more = num_blocks * BLOCK_PAGES - self.base
            self.shared += blocks.of(self.own[:more])
            self.own = self.own[more : held - self.base].copy()
            self.base += more
        shared = self.shared if num_blocks == len(self.shared) else self.shared[:num_blocks]
        own = self.read(num_blocks * BLOCK_PAGES, full)
        return PageTable(shared, np.concatenate((own, tail)))

    def page(self, index: int) -> int:
        if index >= self.base:
            return self.own.item(index - self.base)
        return self.shared[index // BLOCK_PAGES].item(index % BLOCK_PAGES)

    def read(self, first: int, stop: int) -> Int32:
        """The pages `first:stop`, valid until the table changes; the caller must not write them."""
        if first >= self.base:
            return self.own[first - self.base : stop - self.base]
        begin, end = first // BLOCK_PAGES, -(-min(stop, self.base) // BLOCK_PAGES)
        parts = list(self.shared[begin : max(end, begin + 1)])  # one, even of no pages
        if stop > self.base:
            parts.append(self.own[: stop - self.base])
        pages = parts[0] if len(parts) == 1 else np.concatenate(parts)
        start = begin * BLOCK_PAGES
        return pages[first - start : stop - start]

    def push(self, held: int, pages: Int32) -> None:
        """Append `pages` to the first `held`."""
        first, end = held - self.base, held - self.base + pages.size
        if end > self.own.size:
            self._grow(first, end)
        self.own[first:end] = pages

    def push_one(self, held: int, page: int) -> None:
        """`push` for one page, the common case of a decode."""
        first = held - self.base
        if first == self.own.size:
            self._grow(first, first + 1)
        self.own[first] = page

    def cut(self, keep: int) -> None:
        """Keep the first `keep` pages; a buffer that is mostly unused becomes smaller."""
        if keep < self.base:
            whole, rest = divmod(keep, BLOCK_PAGES)
            self.own = self.shared[whole][:rest].copy()
            self.shared, self.base = self.shared[:whole], whole * BLOCK_PAGES
        elif self.own.size > max(BLOCK_PAGES, 4 * (keep - self.base)):
            self.own = self.own[: keep - self.base].copy()

    def _grow(self, held: int, end: int) -> None:
        grown = np.empty(max(end, 2 * held), dtype=np.int32)
        grown[:held] = self.own[:held]
        self.own = grown
