"""Arguments and results of the prefix tree: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.core.keys import Prefix
from service.core.nodes import Leaf

Int32 = NDArray[np.int32]
Indices = NDArray[np.intp]

DEFAULT_NAMESPACE: Final = "default"
"""The namespace of callers without a key."""


@dataclass(frozen=True, slots=True)
class NewSpec:
    """A sequence to create: empty, a fork of `parent` at `length` (None: its whole length), or
    starting with the longest cached beginning of `prefix` in its `namespace`. `ttl_s`: idle seconds
    before deletion (None: never). `reserve`: tokens behind these that it has pages for.
    """

    id: str
    parent: str | None = None
    length: int | None = None
    prefix: Prefix | None = None
    namespace: str = DEFAULT_NAMESPACE
    ttl_s: float | None = None
    reserve: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RowCopies:
    """Copy the first `num_rows[i]` slots of page `src_pages[i]` to `dst_pages[i]`, every layer.

    int32 [n] each. No page is both source and destination, so the order does not matter.
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
    """The result of `PrefixTree.extend`, with everything that undoing it needs.

    `slots` int32 [sum(counts)]: token slots (`page * page_size + offset`) of the new tokens, in row
    order. `lengths` int32 [B]: kv_len afterwards. For the undo: the `leaves` and their lengths
    `before`; the leaves that got pages (`grown`), how many each got (`num_new_pages`), and how many
    each has now (`num_pages`); and `others`, more layers with the same lengths: all layers share
    one page table, so the slots and pages are theirs, too, but layers of other groups have those of
    `group_slots`, by group. `known`: numbers of tokens with known
    ids before, where the call brought ids.
    """

    slots: Int32
    lengths: Int32
    layer: int
    leaves: list[Leaf]
    before: Int32
    grown: list[Leaf]
    num_new_pages: Int32
    num_pages: Int32
    others: Indices | None = None
    group_slots: tuple[Int32, ...] | None = None
    known: list[int] | None = None

    @property
    def num_stored(self) -> int:
        """Number of new tokens at one layer."""
        return self.slots.size


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence: `length` is the minimum over layers, `lengths` per layer.

    `pages` is the size of its page table and `last_page_len` the tokens in the last page, at the
    longest layer. `parent` is the id of the sequence it was forked from, which may be deleted.
    `ttl_s`: idle seconds before deletion (None: never). `reserved_len`: the length up to which
    pages are kept for it (0: none). `known_len` tokens have known ids, `committed_len` are in
    named pages.
    """

    id: str
    length: int
    lengths: tuple[int, ...]
    pages: int
    last_page_len: int
    parent: str | None
    ttl_s: float | None = None
    reserved_len: int = 0
    known_len: int = 0
    committed_len: int = 0
