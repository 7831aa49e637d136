"""What the prefix tree takes and gives: plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from service.core.prefix.keys import Prefix
from service.core.prefix.nodes import Leaf

if TYPE_CHECKING:
    from service.core.shards.layout import Shard

Int32 = NDArray[np.int32]
Indices = NDArray[np.intp]

DEFAULT_NAMESPACE: Final = "default"
"""Everybody's, where nobody says whose."""


@dataclass(frozen=True, slots=True)
class NewSpec:
    """A sequence to make: empty, a fork of `parent` at `length` (None: all of it), or beginning
    with as much of `prefix` as is cached in its `namespace`. `ttl_s`: seconds it lives unused.

    `shard` says which pages of it come here (None: all); `length` counts the tokens in them.
    """

    id: str
    parent: str | None = None
    length: int | None = None
    prefix: Prefix | None = None
    namespace: str = DEFAULT_NAMESPACE
    ttl_s: float | None = None
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowCopies:
    """Copy the first `num_rows[i]` slots of page `src_pages[i]` to `dst_pages[i]`, every layer.

    int32 [n] each. No page is both a source and a destination, so the order does not matter.
    """

    src_pages: Int32
    dst_pages: Int32
    num_rows: Int32

    def __len__(self) -> int:
        return self.src_pages.size


def row_copies(triples: Sequence[tuple[int, int, int]]) -> RowCopies:
    """From (source page, destination page, rows)."""
    columns = np.array(triples, dtype=np.int32).reshape(-1, 3).T.copy()
    return RowCopies(columns[0], columns[1], columns[2])


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Extension:
    """What `PrefixTree.extend` did: where the new tokens go, and what it takes to undo it.

    `slots` int32 [sum(counts)] are token slots (`page * page_size + offset`) in row order;
    `lengths` int32 [B] is kv_len after. The rest is the tree's own: the leaves of the sequences
    and their lengths before; the leaves that got pages, how many, and how many they have since; and
    what `PrefixTree.undo` calls last.
    """

    slots: Int32
    lengths: Int32
    layer: int
    leaves: list[Leaf]
    before: Int32
    grown: list[Leaf]
    num_new_pages: Int32
    num_pages: Int32
    after_undo: Callable[[], None] | None = None

    @property
    def num_stored(self) -> int:
        """Tokens that have a slot; all of them, unless sequences are shards."""
        return int(np.count_nonzero(self.slots >= 0))


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence: `length` is the least over layers, `lengths` per layer.

    `pages` is the size of its page table and `last_page_len` the tokens in the last one, at the
    longest layer. `parent` is the id it was forked off, which may be gone by now. `ttl_s` is how
    long it lives unused (None: for good). Of a `shard`, numbers are of what is held here.
    """

    id: str
    length: int
    lengths: tuple[int, ...]
    pages: int
    last_page_len: int
    parent: str | None
    ttl_s: float | None = None
    shard: Shard | None = None
