"""Cuts sequences to a length, optionally keeping chosen later tokens, which move up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from service.core.errors import InvalidRequest
from service.core.keys import TokenIds
from service.core.nodes import Leaf, check_depth, owner_of
from service.core.page_table import NO_PAGES
from service.core.pool.budget import Budget
from service.core.pool.links import Links
from service.core.sequences.books import SequenceBooks
from service.core.sequences.windows import Windows
from service.core.values import Int32, RowCopies, row_copies


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A checked cut of one sequence, with all pages that it needs.

    The first `length` tokens stay in place, then come the tokens `keep`, int32, ascending. The
    first `full` pages are unchanged; pages from `start` on are the sequence's own. In a cut within
    shared pages (`full < start`) the pages after `full` are `tail`: own pages, then `fresh` ones,
    the first `num_reserved` of which are from the sequence's reserve.
    """

    leaf: Leaf
    length: int
    keep: Int32
    full: int
    start: int
    reused: Int32
    fresh: Int32
    num_reserved: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether the cut is within pages shared with other sequences."""
        return self.full < self.start

    @property
    def tail(self) -> Int32:
        return np.concatenate((self.reused, self.fresh))

    @property
    def length_after(self) -> int:
        return self.length + self.keep.size


class ChainKeeper(Protocol):
    """The known ids of sequences' tokens."""

    def kept(self, leaf: Leaf, length: int) -> TokenIds:
        """Those that a cut moves or copies."""
        ...

    def cut(self, leaf: Leaf, length: int, kept: TokenIds) -> None:
        """The cut is done."""
        ...


class Cuts:
    """Cuts sequences of a tree, whose books, links and pages it shares.

    `prepare` checks and allocates, then the caller moves rows (`moves`) and copies others
    (`copies`), then `finish` updates the books, which may free the pages that were read.
    """

    def __init__(
        self,
        books: SequenceBooks,
        budget: Budget,
        links: Links,
        chains: ChainKeeper,
        page_size: int,
        windows: Windows | None,
    ) -> None:
        self._windows = windows
        self._books = books
        self._budget = budget
        self._links = links
        self._chains = chains
        self._page_size = page_size

    def prepare(
        self,
        ids: Sequence[str],
        lengths: Sequence[int],
        keeps: Sequence[Int32] | None = None,
        *,
        batch: bool = False,
    ) -> list[Cut]:
        """Check every cut and allocate the pages that they need; all or none.

        `batch`: errors name the sequence. Raises `UnknownSequence`, `InvalidRequest`, `OutOfPages`,
        and `WindowReturned` where pages that the cut sequence needs were returned.
        """
        leaves = self._books.leaves(self._books.look_up_distinct(ids).indices)
        cuts, wanted = [], []
        for at, (leaf, length) in enumerate(zip(leaves, lengths, strict=True)):
            keep = NO_PAGES if keeps is None else keeps[at]
            try:
                check_cut(length, keep, self._books.length(leaf))
            except InvalidRequest as error:
                if not batch:
                    raise
                field = "lengths" if error.field == "length" else error.field
                raise InvalidRequest(field, [leaf.id, error.value], error.rule) from None
            if keep.size:
                moved = keep != np.arange(length, length + keep.size, dtype=np.int32)
                stays = int(moved.argmax()) if moved.any() else keep.size  # without a gap before
                length, keep = length + stays, keep[stays:]
            if (self._books.lengths[:, leaf.index] == length + keep.size).all():
                continue  # nothing to cut
            if self._windows is not None:
                self._windows.check(leaf, length, keep.item(-1) + 1 if keep.size else None)
            cut, num_fresh = self._planned(leaf, length, keep)
            cuts.append(cut)
            wanted.append(num_fresh)
        if len(cuts) > 1:
            check_depth(cut.leaf for cut in cuts if cut.is_shared)
        if not sum(wanted):
            return cuts
        cut_leaves = [cut.leaf for cut in cuts]
        own = [min(leaf.reserve.size, num) for leaf, num in zip(cut_leaves, wanted, strict=True)]
        taken = self._budget.take_for(cut_leaves, np.array(wanted, np.int32))
        self._budget.unattached.update(dict.fromkeys(taken.tolist(), owner_of(leaves)))
        pages = np.split(taken, np.cumsum(wanted)[:-1])
        return [
            replace(cut, fresh=fresh, num_reserved=num)
            for cut, fresh, num in zip(cuts, pages, own, strict=True)
        ]

    def release(self, cuts: Sequence[Cut]) -> None:
        """Release the pages of cuts that are cancelled."""
        for cut in cuts:
            self._forget(cut)
            own, leaf = cut.fresh[: cut.num_reserved], cut.leaf
            self._budget.set_reserve(leaf, np.concatenate((own, leaf.reserve)))
            self._budget.release(leaf.owner, cut.fresh[cut.num_reserved :])

    def _forget(self, cut: Cut) -> None:
        """The cut's fresh pages are released, or its leaf's, from now on."""
        for page in cut.fresh.tolist():
            del self._budget.unattached[page]

    def moves(self, cuts: Sequence[Cut]) -> tuple[Int32, Int32]:
        """Source and destination slots of the rows to move, in this order; int32 [n] each.

        No row's destination is a later row's source.
        """
        size = self._page_size
        sources, targets = [NO_PAGES], [NO_PAGES]
        for cut in cuts:
            if cut.keep.size:
                to, at = np.arange(cut.length, cut.length_after, dtype=np.int32), cut.full
                table = cut.leaf.table.read(at, cut.keep.item(-1) // size + 1)
                pages = cut.fresh[to // size - at] if cut.is_shared else table[to // size - at]
                sources.append(table[cut.keep // size - at] * np.int32(size) + cut.keep % size)
                targets.append(pages * np.int32(size) + to % size)
        return np.concatenate(sources), np.concatenate(targets)

    def copies(self, cuts: Sequence[Cut]) -> RowCopies:
        """Rows before a cut within a shared page, at every layer."""
        size = self._page_size
        return row_copies(
            [
                (cut.leaf.table.page(cut.full), int(cut.tail[0]), cut.length % size)
                for cut in cuts
                if cut.is_shared and cut.length % size
            ]
        )

    def finish(self, cuts: Sequence[Cut]) -> None:
        """Cut every layer."""
        for cut in cuts:
            leaf, length = cut.leaf, cut.length_after
            kept = None
            if leaf.chain is not None:
                kept = self._chains.kept(leaf, cut.length)
            self._forget(cut)
            if cut.is_shared:
                self._leave_shared(cut)
            else:
                self.drop_pages(leaf, -(-length // self._page_size))
            self._books.lengths[:, leaf.index] = length
            self._books.renew(leaf)
            if kept is not None:
                self._chains.cut(leaf, cut.length // self._page_size * self._page_size, kept)

    def _planned(self, leaf: Leaf, length: int, keep: Int32) -> tuple[Cut, int]:
        """A cut without its fresh pages, and how many it needs.

        In a shared cut kept rows move to fresh pages only, since they may come from the sequence's
        own. A shared cut without kept rows reuses one of the sequence's own pages.
        """
        full, start = length // self._page_size, leaf.start
        behind = -(-(length + keep.size) // self._page_size) - full if full < start else 0
        own = leaf.table.read(start, int(self._books.num_pages[leaf.index]))
        is_torn = self._windows is not None and self._windows.num_torn(own[:behind]) > 0
        reused = NO_PAGES if keep.size or is_torn else own[:behind].copy()
        return Cut(leaf, length, keep, full, start, reused, NO_PAGES), behind - reused.size

    def _leave_shared(self, cut: Cut) -> None:
        """Reduce a leaf to its first `full` pages, followed by its tail.

        Pages that it shared with sequences of the same batch may have become its own.
        """
        leaf, tail = cut.leaf, cut.tail
        count = int(self._books.num_pages[leaf.index])
        own = max(leaf.start, cut.full)
        behind = leaf.table.read(cut.start + cut.reused.size, count)
        left = np.concatenate((leaf.table.read(own, cut.start), behind))
        self._release(leaf, cut.full + tail.size, left)
        # Of pages that others share, none come back: less may be reserved than before.
        held = cut.full + tail.size + leaf.reserve.size
        leaf.reserved_len = min(leaf.reserved_len, held * self._page_size)
        if cut.full < leaf.start:
            lower, upper = leaf.parent, self._links.node_ending_at(leaf, cut.full)
            self._links.attach(leaf, upper)
            self._links.detach(leaf, lower)
        leaf.table.cut(cut.full)
        leaf.table.push(cut.full, tail)
        leaf.seen, leaf.due = min(leaf.seen, cut.full), 0
        self._books.set_num_pages(leaf, cut.full + tail.size)

    def drop_pages(self, leaf: Leaf, keep: int) -> None:
        """Release the leaf's own pages after the first `keep` of its table."""
        count = int(self._books.num_pages[leaf.index])
        self._release(leaf, keep, leaf.table.read(keep, count))
        leaf.table.cut(keep)
        leaf.seen, leaf.due = min(leaf.seen, keep), 0
        self._books.set_num_pages(leaf, keep)

    def _release(self, leaf: Leaf, keep: int, pages: Int32) -> None:
        """Release pages that a leaf no longer has behind its first `keep`, but those which its
        reserve is missing then."""
        if leaf.reserved_len:
            wanted = -(-leaf.reserved_len // self._page_size) - keep
            torn = 0 if self._windows is None else self._windows.num_torn(pages)
            back = pages[torn : torn + max(0, wanted - leaf.reserve.size)]
            self._budget.set_reserve(leaf, np.concatenate((back, leaf.reserve)))
            pages = np.concatenate((pages[:torn], pages[torn + back.size :]))
            if torn:  # windows have returned a part of them, so less may be reserved than before
                held = keep + leaf.reserve.size
                leaf.reserved_len = min(leaf.reserved_len, held * self._page_size)
        self._budget.release(leaf.owner, pages)

    def reserve(self, leaves: Sequence[Leaf], counts: Sequence[int]) -> None:
        """Take pages for `counts` more tokens of each sequence. Raises `OutOfPages`."""
        size, books = self._page_size, self._books
        lens = [books.length(leaf) + count for leaf, count in zip(leaves, counts, strict=True)]
        held = [int(books.num_pages[leaf.index]) for leaf in leaves]
        wanted = [-(-end // size) - pages for end, pages in zip(lens, held, strict=True)]
        taken, at = self._budget.take(owner_of(leaves), sum(wanted)), 0
        for leaf, end, num in zip(leaves, lens, wanted, strict=True):
            leaf.reserved_len = end
            self._budget.set_reserve(leaf, taken[at : (at := at + num)].copy())

    def lower_reserve(self, leaf: Leaf, count: int) -> None:
        """Keep pages for at most `count` tokens behind a sequence's length; release the others."""
        if not leaf.reserved_len:
            return
        length, num_pages = self._books.length(leaf), int(self._books.num_pages[leaf.index])
        end = length + count if count else 0
        if end < leaf.reserved_len:
            leaf.reserved_len = end
            keep = max(0, -(-end // self._page_size) - num_pages)
            pages, freed = leaf.reserve[:keep].copy(), leaf.reserve[keep:]
            self._budget.set_reserve(leaf, pages)
            self._budget.release(leaf.owner, freed)


def check_cut(length: int, keep: Int32, longest: int) -> None:
    """Raises `InvalidRequest` unless the sequence has that length, and `keep` ascends after it."""
    if not 0 <= length <= longest:
        raise InvalidRequest("length", length, f"0 to {longest}, the sequence's length")
    if not keep.size:
        return
    if (keep[1:] <= keep[:-1]).any():
        at = int((keep[1:] <= keep[:-1]).argmax()) + 1
        raise InvalidRequest("keep", int(keep[at]), "must be strictly ascending")
    first, last = int(keep[0]), int(keep[-1])
    if first < length:
        rule = f"must be at least {length}: tokens before the length are kept in any case"
        raise InvalidRequest("keep", first, rule)
    if last >= longest:
        rule = f"must be below {longest}, the sequence's length"
        raise InvalidRequest("keep", last, rule)
