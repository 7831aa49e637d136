"""Satellites: the pages of all layer groups but the leading one.

The leading group is the first without a window. Its pages make up tables, nodes and the cache. A
leading page has a bundle of pages in each other group, for the same tokens; they follow it from its
allocation to its release. A bundle of a group with a window can be released before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest
from service.core.values import RowCopies

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A layer group: its `layers`, the tokens of its pages, and how many keys a row sees at most,
    its own included (`window` None: all)."""

    layers: tuple[int, ...]
    page_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A group with a window of `tokens`: the columns of its bundles; `kept`, the tokens at the end
    of a path that are kept for the last row and later ones, the slack included; and `reach`, the
    pages of them."""

    group: int
    tokens: int
    columns: slice
    kept: int
    reach: int

    @property
    def width(self) -> int:
        """Pages of a bundle."""
        return int(self.columns.stop - self.columns.start)


class Satellites:
    """`of` int32 [num_pages, width]: the satellites of each leading page, group after group; -1 for
    those that are released, and in the rows of other pages.

    `page_size` is that of the leading group. `per_page` counts the ids of a leading page with all
    its satellites.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        shapes: Sequence[GroupShape],
        slack: int = 0,
    ) -> None:
        """Raises `InvalidRequest` for groups that do not make up the layers, none without a window,
        or a page size that does not divide the leading group's."""
        check_shapes(page_size, num_layers, shapes)
        self.shapes, self.page_size = tuple(shapes), page_size
        self.leading = next(at for at, one in enumerate(shapes) if one.window is None)
        group_by_layer = {layer: at for at, one in enumerate(shapes) for layer in one.layers}
        self.group_by_layer = tuple(group_by_layer[layer] for layer in range(num_layers))
        self.columns: list[slice] = []
        self.windows: list[Window] = []
        width = 0
        for at, one in enumerate(shapes):
            size = 0 if at == self.leading else page_size // one.page_size
            self.columns.append(slice(width, width + size))
            if one.window is not None:
                kept = one.window + slack
                reach = -(-kept // page_size)
                self.windows.append(Window(at, one.window, self.columns[-1], kept, reach))
            width += size
        self.per_page = 1 + width
        self.of: Int32 = np.full((num_pages, width), -1, np.int32)

    def window_at(self, layer: int) -> Window | None:
        """The window of a layer's group, if it has one."""
        return next((w for w in self.windows if w.group == self.group_by_layer[layer]), None)

    # Ownership.

    def attach(self, ids: Int32, count: int) -> Int32:
        """Make the first `count` of fresh `ids` leading pages, the others their satellites; returns
        the leading ones."""
        pages = ids[:count]
        self.of[pages] = ids[count:].reshape(count, self.per_page - 1)
        return pages

    def detach(self, pages: Int32) -> Int32:
        """Leading `pages` and all their satellites, which are no longer theirs."""
        ids = self.with_satellites(pages)
        self.of[pages] = -1
        return ids

    def take_bundles(self, window: Window, pages: Int32) -> Int32:
        """The satellites of leading `pages` in one group, which are no longer theirs."""
        held = self.of[pages, window.columns]
        self.of[pages, window.columns] = -1
        return held[held >= 0]

    def num_usable(self, pages: Int32) -> int:
        """The largest number of a path's first `pages` behind which a row sees all that its windows
        reach."""
        usable, place = np.ones(pages.size, bool), np.arange(pages.size, dtype=np.int32)
        for window in self.windows:
            missing = np.maximum.accumulate(np.where(self.has(window, pages), -1, place))
            needed = -(-(window.tokens - 1) // self.page_size)
            usable &= place - missing >= np.minimum(needed, place + 1)
        return int(np.flatnonzero(usable)[-1]) + 1 if usable.any() else 0

    def transfer(self, source: Int32, target: Int32) -> list[tuple[Window, Int32]]:
        """Give bundles of leading pages to `target` pages that lack them; those that got some, by
        group."""
        given = []
        for window in self.windows:
            lacks = self.has(window, source) & ~self.has(window, target)
            if lacks.any():
                to, columns = target[lacks], window.columns
                self.of[to, columns] = self.of[source[lacks], columns]
                self.of[source[lacks], columns] = -1
                given.append((window, to))
        return given

    def with_satellites(self, pages: Int32) -> Int32:
        """Leading `pages`, then all satellites that they have."""
        held = self.of[pages].ravel()
        return np.concatenate((pages, held[held >= 0]))

    def has(self, window: Window, pages: Int32) -> NDArray[np.bool_]:
        """Which of the leading `pages` have their bundle in a group."""
        held: NDArray[np.bool_] = self.of[pages, window.columns.start] >= 0
        return held

    def num_torn(self, pages: Int32) -> int:
        """How many of the leading `pages` end with the last one that lacks a bundle."""
        torn = np.flatnonzero((self.of[pages] < 0).any(axis=1))
        return int(torn[-1]) + 1 if torn.size else 0

    # Counts of ids.

    def weights(self, pages: Int32) -> Int32:
        """The ids of each leading page, its own included."""
        weights: Int32 = 1 + (self.of[pages] >= 0).sum(axis=1, dtype=np.int32)
        return weights

    def weight(self, pages: Int32) -> int:
        return pages.size + int(np.count_nonzero(self.of[pages] >= 0))

    def middle(self, pages: Int32) -> int:
        """Ids of the bundles in the middle of a node of `pages`, beyond the reach of its end."""
        return sum(
            int(np.count_nonzero(self.of[before_reach(one, pages), one.columns] >= 0))
            for one in self.windows
        )

    # Translation from leading pages and slots.

    def slots(self, group: int, slots: Int32) -> Int32:
        """Token slots of a group for slots of the leading one; negative without a page."""
        if group == self.leading:
            return slots
        size, first = self.shapes[group].page_size, self.columns[group].start
        page, offset = np.divmod(slots, np.int32(self.page_size))
        held = self.of[page, first + offset // size]
        found: Int32 = held * np.int32(size) + offset % size
        return np.where(held < 0, np.int32(-1), found)

    def copies(self, group: int, copies: RowCopies) -> RowCopies:
        """Copies of rows of leading pages, as those of a group's pages."""
        if group == self.leading:
            return copies
        size, columns = np.int32(self.shapes[group].page_size), self.columns[group]
        begins = size * np.arange(columns.stop - columns.start, dtype=np.int32)
        rows = np.clip(copies.num_rows[:, np.newaxis] - begins, 0, size)
        some = rows > 0
        return RowCopies(
            self.of[copies.src_pages, columns][some],
            self.of[copies.dst_pages, columns][some],
            rows[some],
        )


def before_reach(window: Window, pages: Int32) -> Int32:
    """Those of a node's `pages` that no row behind its end can see."""
    return pages[: max(0, pages.size - window.reach)]


def check_shapes(page_size: int, num_layers: int, shapes: Sequence[GroupShape]) -> None:
    layers = sorted(layer for one in shapes for layer in one.layers)
    if layers != list(range(num_layers)):
        rule = f"each layer of 0 to {num_layers - 1} must be in one group"
        raise InvalidRequest("groups", layers, rule)
    leading = [one for one in shapes if one.window is None]
    if not leading:
        rule = "a group without a window must lead, whose pages have the names"
        raise InvalidRequest("groups", [one.window for one in shapes], rule)
    if leading[0].page_size != page_size:
        raise InvalidRequest("page_size", page_size, f"{leading[0].page_size}, the leading group's")
    for one in shapes:
        if one.page_size < 1 or page_size % one.page_size:
            rule = f"must divide {page_size}, the tokens of a leading page"
            raise InvalidRequest("groups.page_size", one.page_size, rule)
        if one.window is not None and one.window < 1:
            raise InvalidRequest("groups.window", one.window, "at least 1")
