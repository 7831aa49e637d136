"""Token ids of sequences' rows, and pages that get their names by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.core.errors import InvalidRequest, KeyMismatch
from service.core.keys import Prefix, TokenIds
from service.core.nodes import Chain, Int32, Leaf
from service.core.pool.named_pages import NamedPages
from service.core.prefix.commits import Commits
from service.core.sequences.books import SequenceBooks

MOST_NAMED: Final = 1024
"""Maximum pages that are named at once: a fraction of a millisecond."""
MOST_EXTRA: Final = 16
"""Maximum pages behind the cached ones with further keys: a sequence with more has no chain."""
NO_CHAIN: Final = (
    "has no chain of page keys: create it with a prefix (token_ids = [] for an empty one), fork "
    "at tokens whose ids are known, or commit it with all of its ids"
)


class PageNaming:
    """Learns the ids of rows, and names pages whose ids are known and whose rows are stored at
    every layer.

    Ids are kept in `NamedPages.token_ids`, with the pages. A page that others share is covered by
    the chains of sequences only where all of its ids are known, or by a single one.
    """

    def __init__(self, books: SequenceBooks, names: NamedPages, commits: Commits) -> None:
        self._books, self._named, self._commits = books, names, commits
        self._size = names.page_size
        self.due: dict[Leaf, None] = {}
        """Sequences with a page whose ids are known and that may have no name yet."""

    def num_named(self, leaf: Leaf) -> int:
        """Number of a sequence's pages, from the first on, that have names."""
        node_of, table = self._named.node_of, leaf.table
        low, high = 0, int(self._books.num_pages[leaf.index])
        while low < high:
            middle = (low + high) // 2
            if node_of[table.page(middle)] < 0:
                high = middle
            else:
                low = middle + 1
        return low

    def known(self, leaf: Leaf) -> int:
        """Number of a sequence's tokens, from the first on, whose ids or pages' keys are known."""
        if leaf.chain is None:
            return 0
        if leaf.chain.known < leaf.start * self._size:  # a fork may have committed shared pages
            return max(leaf.chain.known, self.num_named(leaf) * self._size)
        return leaf.chain.known

    def begin(self, leaf: Leaf, prefix: Prefix, num_cached: int) -> None:
        """A sequence starts with `num_cached` pages of a prefix, whose chain it continues."""
        extra = {at: key for at, key in (prefix.extra or {}).items() if at >= num_cached}
        if len(extra) <= MOST_EXTRA:
            leaf.chain = Chain(prefix.cache_salt, extra or None, num_cached * self._size)

    def fork(self, parent: Leaf, leaf: Leaf, length: int) -> None:
        """A fork has its parent's chain, if the ids of all pages that they share are known."""
        known, full = self.known(parent), length // self._size * self._size
        if parent.chain is None or known < full:
            return
        leaf.chain = replace(parent.chain, known=full)
        self._write(leaf, full, self._read(parent, np.arange(full, min(known, length))))

    def learn(
        self,
        leaves: Sequence[Leaf],
        before: Int32,
        lengths: Int32,
        ids: TokenIds,
        sums: Int32,
        *,
        is_exact: bool = False,
    ) -> list[int]:
        """Token ids `sums[b]:sums[b+1]` of each sequence: from its known tokens on, but at most
        from `before` [B] on (`is_exact`: from there), up to `lengths` [B]. All or none; returns
        what was known before.

        Raises `InvalidRequest`, and `KeyMismatch` for ids that contradict earlier ones.
        """
        parts = np.split(ids, sums[1:-1])
        firsts = [
            self._first(leaf, part, first, end, is_exact)
            for leaf, part, first, end in zip(
                leaves, parts, before.tolist(), lengths.tolist(), strict=True
            )
        ]
        known = [0 if leaf.chain is None else leaf.chain.known for leaf in leaves]
        for leaf, part, first in zip(leaves, parts, firsts, strict=True):
            if part.size and first + part.size > (start := self.known(leaf)):
                self._write(leaf, start, part[start - first :])
        return known

    def check_cut(self, leaf: Leaf, length: int, num_kept: int, ids: TokenIds) -> None:
        """Raise the errors of `learn` for ids of the tokens behind a cut that is still to come."""
        known = min(self.known(leaf), length)
        self._check(leaf, ids, (known, known, length + num_kept), ids[:0])

    def kept(self, leaf: Leaf, length: int) -> TokenIds:
        """Known ids of the tokens before `length` in its last page, which a cut may copy. Ids of
        tokens that move are forgotten: behind other tokens they can mean other keys and values."""
        return self._read(
            leaf, np.arange(length // self._size * self._size, min(length, self.known(leaf)))
        )

    def cut(self, leaf: Leaf, length: int, kept: TokenIds) -> None:
        """A sequence was cut within the page behind the first `length` tokens; `kept` ids stay."""
        if leaf.chain is not None:
            leaf.chain.known, leaf.chain.is_stuck = min(self.known(leaf), length), False
            if leaf.chain.known == length:
                self._write(leaf, length, kept)

    def undo(self, leaves: Sequence[Leaf], known: Sequence[int]) -> None:
        """Forget what `learn` has learned."""
        for leaf, count in zip(leaves, known, strict=True):
            if leaf.chain is not None:
                leaf.chain.known = count

    def name(self, leaf: Leaf, length: int) -> bool:
        """Name pages of the first `length` tokens, which are stored at every layer; whether some
        are left. No page table changes: a page stays without a name, with all pages behind it,
        where an equal one is cached."""
        chain = leaf.chain
        if chain is None or chain.is_stuck or not self._books.holds(leaf):
            self.due.pop(leaf, None)
            return False
        done = self.num_named(leaf)
        every = chain.known // self._size
        stop = min(every, length // self._size, self._books.length(leaf) // self._size)
        if every <= done:
            self.due.pop(leaf, None)
        if stop <= done:
            return False
        last = min(stop, done + MOST_NAMED)
        ids = self._named.token_ids[leaf.table.read(done, last)].ravel()
        prefix = Prefix(ids, None, chain.cache_salt, done, extra=chain.extra)
        chain.is_stuck = not self._commits.name_own(leaf, prefix, last)
        if chain.is_stuck or last == every:
            self.due.pop(leaf, None)
        return last < stop and not chain.is_stuck

    def _first(self, leaf: Leaf, ids: TokenIds, begin: int, end: int, is_exact: bool) -> int:
        """The token that the first of the given ids belongs to. Raises as `learn`."""
        if not ids.size:
            return begin
        if leaf.chain is None:
            raise InvalidRequest("token_ids", leaf.id, NO_CHAIN)
        known = self.known(leaf)
        if is_exact and known < begin:
            rule = f"are those of rows from {begin} on, and known are {known}: give with ids_indptr"
            given = [leaf.id, f"{ids.size} ids"]
            raise InvalidRequest("token_ids", given, f"{rule} the ids of all tokens behind these")
        first = min(known, begin)
        held = self._read(leaf, np.arange(first, min(known, first + ids.size)))
        return self._check(leaf, ids, (first, known, end), held)

    def _check(self, leaf: Leaf, ids: TokenIds, span: tuple[int, int, int], held: TokenIds) -> int:
        """Check ids from a token on: `span` is that token, the number of known ones, and the end.
        `held` are the known ids from it on. Returns the token."""
        first, known, end = span
        if leaf.chain is None:
            raise InvalidRequest("token_ids", leaf.id, NO_CHAIN)
        if first + ids.size > end:
            rule = f"at most {end - first}: its ids are known up to {known}, these begin at {first}"
            raise InvalidRequest("token_ids", [leaf.id, f"{ids.size} ids"], f"{rule} of {end}")
        count = min(held.size, ids.size)
        if (differ := np.flatnonzero(held[:count] != ids[:count])).size:
            at = int(differ[0])
            rule = f"token {first + at} has the id {held[at]}, not {ids[at]}"
            raise KeyMismatch((first + at) // self._size, rule, leaf.id)
        return first

    def _read(self, leaf: Leaf, positions: NDArray[np.int64]) -> TokenIds:
        """Ids of known tokens, which ascend; up to the first in a page that was named by a key."""
        if not positions.size:
            return np.empty(0, np.uint32)
        first, names = int(positions[0]) // self._size, self._named
        pages = leaf.table.read(first, int(positions[-1]) // self._size + 1)
        pages = pages[positions // self._size - first]
        numbers = names.node_of[pages]
        nodes = [names.nodes[number] for number in set(numbers.tolist()) - {-1}]
        bare = [one.name.number for one in nodes if one and one.name and not one.name.with_ids]
        if bare:
            pages = pages[: int((numbers[:, np.newaxis] == bare).any(axis=1).argmax())]
        return names.token_ids[pages, positions[: pages.size] % self._size]

    def _write(self, leaf: Leaf, first: int, ids: TokenIds) -> None:
        """Ids of the tokens from `first` on, where the known ones end."""
        chain, size = leaf.chain, self._size
        if chain is None:
            return
        chain.known = first + ids.size
        if ids.size == 1:
            self._named.token_ids[leaf.table.page(first // size), first % size] = ids[0]
        elif ids.size:
            positions = np.arange(first, chain.known)
            pages = leaf.table.read(first // size, (chain.known - 1) // size + 1)
            pages = pages[positions // size - first // size]
            self._named.token_ids[pages, positions % size] = ids
        if chain.known // size > first // size and not chain.is_stuck:
            self.due[leaf] = None
