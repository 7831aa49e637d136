"""What is told of one sequence."""

from __future__ import annotations

from service.core.prefix.nodes import FOREVER, Leaf
from service.core.sequences.books import SequenceBooks
from service.core.values import SequenceView


def view(books: SequenceBooks, leaf: Leaf, page_size: int) -> SequenceView:
    """What the books say of a leaf's sequence."""
    lengths = tuple(books.lengths[:, leaf.index].tolist())
    pages = int(books.num_pages[leaf.index])
    last_page_len = max(lengths) - max(pages - 1, 0) * page_size
    ttl_s = float(books.ttl_s[leaf.index])
    ends = None if ttl_s == FOREVER else ttl_s
    return SequenceView(
        leaf.id,
        min(lengths),
        lengths,
        pages,
        last_page_len,
        leaf.origin,
        ends,
        leaf.shard,
    )
