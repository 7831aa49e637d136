"""The page allocator: which pages are free, and how many holders each of the others has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, OutOfPages

Int32 = NDArray[np.int32]


class PageAllocator:
    """Hands out page ids `0..num_pages-1`; O(1) per page, never fragments.

    Free pages form a stack. A fresh allocator hands them out in ascending order, so a long sequence
    occupies one run of memory. A released page is the next one handed out, because its bytes are
    the likeliest to be in a CPU or device cache.
    """

    __slots__ = ("_refcounts", "_scratch", "_stack", "num_changes", "num_free")

    def __init__(self, num_pages: int) -> None:
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages
        self._refcounts: Int32 = np.zeros(num_pages, dtype=np.int32)
        self._scratch: Int32 = np.zeros(num_pages, dtype=np.int32)
        self.num_changes = 0
        """Increases with every allocation and release."""

    @property
    def num_pages(self) -> int:
        return self._stack.size

    @property
    def num_referenced(self) -> int:
        return self._stack.size - self.num_free

    @property
    def refcounts(self) -> Int32:
        """A copy: holders of each page, int32 [num_pages]."""
        return self._refcounts.copy()

    def held(self, step: int) -> NDArray[np.bool_]:
        """Whether each `step`-th page, from the first on, has a holder."""
        return self._refcounts[::step] > 0

    @property
    def free_pages(self) -> Int32:
        """A copy of the stack of free pages; the last one is handed out next."""
        return self._stack[: self.num_free].copy()

    def allocate(self, count: int) -> Int32:
        """`count` pages with one holder each, int32 [count]; all or none.

        Raises `OutOfPages`.
        """
        if count > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages, self.num_free)
        rest = self.num_free - count
        pages = self._stack[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.num_changes += 1
        self._refcounts[pages] = 1
        return pages

    def retain(self, pages: Int32) -> None:
        """Add a holder to each of the distinct `pages`."""
        self._check_held(pages, "retained")
        self.num_changes += 1
        self._refcounts[pages] += 1

    def release(self, pages: Int32) -> None:
        """Remove a holder from each of the distinct `pages`; pages without holders become free."""
        self.num_changes += 1
        if pages.size == 1:
            self._release_one(int(pages[0]))
            return
        self._check_held(pages, "released")
        left = self._refcounts[pages] - 1
        self._refcounts[pages] = left
        # Reversed, so that the next allocation returns them in this order.
        freed = pages[left == 0][::-1]
        self._stack[self.num_free : self.num_free + freed.size] = freed
        self.num_free += freed.size

    def _release_one(self, page: int) -> None:
        """`release` for one page, the common case of evictions."""
        if not 0 <= page < self.num_pages:
            raise IntegrityError(f"page {page} of {self.num_pages} released")
        left = int(self._refcounts[page]) - 1
        if left < 0:
            raise IntegrityError(f"free page {page} released")
        self._refcounts[page] = left
        if left == 0:
            self._stack[self.num_free] = page
            self.num_free += 1

    def _check_held(self, pages: Int32, verb: str) -> None:
        if pages.size == 0:
            return
        if (outside := pages[(pages < 0) | (pages >= self.num_pages)]).size:
            raise IntegrityError(f"page {outside[0]} of {self.num_pages} {verb}")
        unheld = pages[self._refcounts[pages] == 0]
        if unheld.size:
            raise IntegrityError(f"free page {unheld[0]} {verb}")
        # Duplicates write the same cell, so the earlier one reads the later one's rank.
        rank = np.arange(pages.size, dtype=np.int32)
        self._scratch[pages] = rank
        if (twice := pages[self._scratch[pages] != rank]).size:
            raise IntegrityError(f"page {twice[0]} {verb} twice at once")
