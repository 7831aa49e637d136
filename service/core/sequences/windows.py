"""Windows return the pages of their layer groups that no later row of a sequence sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from service.core.errors import WindowReturned
from service.core.nodes import Int32, Leaf
from service.core.pool.budget import Budget
from service.core.pool.satellites import Satellites, Window
from service.core.sequences.books import SequenceBooks


class Windows:
    """Returns and checks the bundles of groups with a window; shares the tree's books and pages."""

    def __init__(self, books: SequenceBooks, budget: Budget, satellites: Satellites) -> None:
        self._books, self._budget, self._satellites = books, budget, satellites
        self._size = satellites.page_size

    def is_due(self, leaves: Sequence[Leaf], lengths: Sequence[int]) -> bool:
        """Whether a sequence that has its length at some layer may have pages to return."""
        return any(length >= leaf.due for leaf, length in zip(leaves, lengths, strict=True))

    def settle(
        self,
        leaves: Sequence[Leaf],
        stored: Mapping[Leaf, int] | None = None,
        skipped: Collection[Leaf] = (),
    ) -> None:
        """Return the pages of sequences' own that no row can see behind the tokens that they have
        at every layer. Tokens beyond `stored` may yet be undone; `skipped` sequences are in use.
        """
        for leaf in leaves:
            if leaf in skipped or not self._books.holds(leaf):
                continue
            length = self._books.length(leaf)
            if stored is not None:
                length = min(length, stored.get(leaf, length))
            if length >= leaf.due:
                self._return(leaf, length)

    def _return(self, leaf: Leaf, length: int) -> None:
        satellites, borders = self._satellites, []
        for window in satellites.windows:
            border = self.border(window, length)
            borders.append(border)
            if (begin := max(leaf.start, leaf.seen)) < border:
                pages = leaf.table.read(begin, border)
                self._budget.release_ids(leaf.owner, satellites.take_bundles(window, pages))
        leaf.seen = min(borders)
        leaf.due = min(
            (border + 1) * self._size + window.kept
            for border, window in zip(borders, satellites.windows, strict=True)
        )

    def border(self, window: Window, length: int) -> int:
        """Pages of the path that neither the last of `length` rows nor a later one can see, the
        slack included."""
        return max(0, length - window.kept) // self._size

    def check(
        self, leaf: Leaf, length: int, stop: int | None = None, group: int | None = None
    ) -> None:
        """Raises `WindowReturned` unless the sequence has all pages, of one group or of every one
        (None), that a row behind `length` tokens sees, up to the token `stop` (None: `length`).
        """
        for window in self._satellites.windows:
            if group in (None, window.group):
                first = max(0, length - window.tokens + 1)
                self.check_rows(window, leaf, first, length if stop is None else stop)

    def check_rows(self, window: Window, leaf: Leaf, first: int, stop: int) -> None:
        """Raises `WindowReturned` unless the sequence has the pages of the tokens `first:stop`."""
        page = first // self._size
        pages = leaf.table.read(page, max(page, -(-stop // self._size)))
        missing = np.flatnonzero(~self._satellites.has(window, pages))
        if missing.size:
            kept = (page + int(missing[-1]) + 1) * self._size
            raise WindowReturned(leaf.id, window.group, window.tokens, first, kept)

    def num_torn(self, pages: Int32) -> int:
        """How many of a sequence's own `pages` end with the last one that lacks a bundle."""
        return self._satellites.num_torn(pages)
