"""A whole sequence becomes a shard in its place: the pages of its rank stay, the others go."""

from __future__ import annotations

import numpy as np

from service.core.budget import Budget
from service.core.nodes import Leaf, Links, Node, named
from service.core.sequences import SequenceBooks
from service.core.shards import Shard, Whole, held
from service.core.values import Int32, RowCopies, row_copies


def make_room(
    budget: Budget, links: Links, leaf: Leaf, count: int, shard: Shard, room: int
) -> None:
    """See that the shard of a sequence with `count` pages could be made, with `room` pages free
    afterwards. Pages that it alone holds lose their names where that is needed.

    Raises `OutOfPages`, having changed nothing.
    """
    owner, start, above, num_lost = leaf.owner, leaf.start, leaf.parent, 0
    wanted = missing(start, count, shard) + room
    while above is not None and wanted > max(0, budget.available(owner)) and is_alone(above):
        start, above, num_lost = above.start, above.parent, num_lost + 1
        wanted = missing(start, count, shard) + room
    if wanted > 0:
        budget.give_back(owner, budget.take(owner, wanted))
    for _ in range(num_lost):
        lose_names(links, leaf)


def missing(start: int, count: int, shard: Shard) -> int:
    """How many pages more it takes to copy the shard's part of what is shared, the first `start`,
    than are set free; negative where some are left."""
    to_copy = len(range(shard.rank, start, shard.ranks))
    kept = len(range(shard.rank, count, shard.ranks)) - to_copy
    return to_copy - (count - start - kept)


def is_alone(node: Node) -> bool:
    """Whether a node is there for the one sequence below it, and for nothing else."""
    if node.name is None:
        return False
    name = node.name
    return len(node.children) == name.refs == 1 and not name.pins and not name.own


def lose_names(links: Links, leaf: Leaf) -> None:
    """The pages of the node above a leaf become its own."""
    node = leaf.parent
    if node is None:
        raise RuntimeError(f"{leaf.id} has no pages with names: this is a bug")
    root = named(node).root
    links.named.lose_name(node)
    links.merge(node, leaf)
    if node.parent is None:
        root.namespace.drop_root(root)


def deal_out(
    books: SequenceBooks, budget: Budget, links: Links, leaf: Leaf, shard: Shard, epoch: int
) -> RowCopies:
    """Make a whole sequence the `shard` of itself, in an epoch. Rows that it shares with others are
    to be copied, as is returned. Raises `OutOfPages`, having changed nothing."""
    count = int(books.num_pages[leaf.index])
    place = np.arange(count)
    is_mine, is_own = place % shard.ranks == shard.rank, place >= leaf.start
    table = leaf.table[:count]
    shared, left = table[is_mine & ~is_own], table[is_own & ~is_mine]
    fresh = np.concatenate(
        (left[: shared.size], budget.take(leaf.owner, max(0, shared.size - left.size)))
    )
    budget.give_back(leaf.owner, left[shared.size :])
    part: Int32 = np.concatenate((fresh, table[is_mine & is_own]))
    copies = [
        (source, page, links.named.page_size)
        for source, page in zip(shared.tolist(), fresh.tolist(), strict=True)
    ]
    above = leaf.parent
    links.attach(leaf, None)
    links.detach(leaf, above)
    leaf.table = part
    books.set_num_pages(leaf, part.size)
    lengths = books.lengths[:, leaf.index].copy()
    books.lengths[:, leaf.index] = held(lengths, shard.rank, shard.ranks, links.named.page_size)
    books.make_shard(leaf, shard, Whole(lengths, epoch))
    return row_copies(copies)
