"""The view of one sequence, for callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.core.prefix.nodes import FOREVER, Leaf
from service.core.sequences.books import SequenceBooks

if TYPE_CHECKING:
    from service.core.shards.layout import Shard


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence: `length` is the minimum over layers, `lengths` per layer.

    `pages` is the size of its page table and `last_page_len` the tokens in the last page, at the
    longest layer. `parent` is the id of the sequence it was forked from, which may be deleted.
    `ttl_s`: idle seconds before deletion (None: never). For a `shard` all numbers count this pool's
    part.
    """

    id: str
    length: int
    lengths: tuple[int, ...]
    pages: int
    last_page_len: int
    parent: str | None
    ttl_s: float | None = None
    shard: Shard | None = None


def view(books: SequenceBooks, leaf: Leaf, page_size: int) -> SequenceView:
    lengths = tuple(books.lengths[:, leaf.index].tolist())
    pages = int(books.num_pages[leaf.index])
    ttl_s = float(books.ttl_s[leaf.index])
    return SequenceView(
        leaf.id,
        min(lengths),
        lengths,
        pages,
        max(lengths) - max(pages - 1, 0) * page_size,
        leaf.origin,
        None if ttl_s == FOREVER else ttl_s,
        leaf.shard,
    )
