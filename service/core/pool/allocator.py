"""The page allocator: which pages are free, and which are held."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, OutOfPages

Int32 = NDArray[np.int32]


class PageAllocator:
    """Hands out page ids `0..num_pages-1`; O(1) per page, never fragments.

    Free pages form a stack. A fresh allocator hands them out in ascending order, so a long sequence
    occupies one run of memory. A released page is the next one handed out, because its bytes are
    the likeliest to be in a CPU or device cache. A page has one holder: sequences share nodes of
    the tree, not pages.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_pages = self.num_free = num_pages
        self._is_held: NDArray[np.bool_] = np.zeros(num_pages, dtype=bool)
        self._scratch: Int32 = np.zeros(num_pages, dtype=np.int32)
        self.num_changes = 0
        """Increases with every allocation and release."""

    def held(self, step: int = 1) -> NDArray[np.bool_]:
        """A copy: whether each `step`-th page, from the first on, has a holder."""
        return self._is_held[::step].copy()

    @property
    def free_pages(self) -> Int32:
        """A copy of the stack of free pages; the last one is handed out next."""
        return self._stack[: self.num_free].copy()

    def allocate(self, count: int) -> Int32:
        """`count` pages, int32 [count]; all or none. Raises `OutOfPages`."""
        if count > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages, {}, self.num_free)
        rest = self.num_free - count
        pages = self._stack[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.num_changes += 1
        self._is_held[pages] = True
        return pages

    def release(self, pages: Int32) -> None:
        """Free the distinct `pages`."""
        if not pages.size:
            return
        self.num_changes += 1
        if pages.size == 1:
            self._release_one(int(pages[0]))
            return
        self._check_held(pages)
        self._is_held[pages] = False
        # Reversed, so that the next allocation returns them in this order.
        self._stack[self.num_free : self.num_free + pages.size] = pages[::-1]
        self.num_free += pages.size

    def _release_one(self, page: int) -> None:
        """`release` for one page, the common case of evictions."""
        if not 0 <= page < self.num_pages:
            raise IntegrityError(f"page {page} of {self.num_pages} released")
        if not self._is_held[page]:
            raise IntegrityError(f"free page {page} released")
        self._is_held[page] = False
        self._stack[self.num_free] = page
        self.num_free += 1

    def _check_held(self, pages: Int32) -> None:
        """Raises `IntegrityError` for pages that are not all held and distinct."""
        if (outside := pages[(pages < 0) | (pages >= self.num_pages)]).size:
            raise IntegrityError(f"page {outside[0]} of {self.num_pages} released")
        if (unheld := pages[~self._is_held[pages]]).size:
            raise IntegrityError(f"free page {unheld[0]} released")
        # Duplicates write the same cell, so the earlier one reads the later one's rank.
        rank = np.arange(pages.size, dtype=np.int32)
        self._scratch[pages] = rank
        if (twice := pages[self._scratch[pages] != rank]).size:
            raise IntegrityError(f"page {twice[0]} released twice at once")
