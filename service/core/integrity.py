"""The invariants of the core, counted from the leaves up; messages carry the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from service.core.allocator import PageAllocator
from service.core.budget import Budget
from service.core.errors import IntegrityError
from service.core.named_integrity import check_counts, check_named
from service.core.nodes import Int32, Leaf, Links, Node
from service.core.sequences import SequenceBooks
from service.core.shards import held
from service.core.values import Indices

LEAVES_PER_STEP: Final = 512
"""Sequences checked at a time: some 5 ms."""


def nodes_of(leaves: Iterable[Leaf]) -> set[Node]:
    """Every node on the path of a sequence, found from the leaves up."""
    found: set[Node] = set()
    for leaf in leaves:
        node = leaf.parent
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def num_unnamed(leaves: Iterable[Leaf]) -> int:
    """Nodes that are there only because these sequences share them."""
    return sum(node.name is None for node in nodes_of(leaves))


def sharing_ratio(books: SequenceBooks, leaves: Sequence[Leaf], page_size: int) -> float:
    """Tokens seen by sequences / tokens stored, by each sequence's least kv_len; 1 for none."""
    columns = np.array([leaf.index for leaf in leaves], dtype=np.intp)
    seen = int(books.lengths[:, columns].min(axis=0).sum(dtype=np.int64))
    shared = sum(leaf.start for leaf in leaves)
    shared -= sum(node.pages.size for node in nodes_of(leaves))
    stored = seen - shared * page_size
    return seen / stored if stored else 1.0


def integrity_steps(books: SequenceBooks, links: Links, budget: Budget) -> Iterator[None]:
    """Check every invariant, a bounded piece of the sequences and of the named nodes at a time.

    Nodes are counted at the first step and pages at the last, each at one moment. Between two steps
    the sequences may change: one that is gone by its turn is passed over. Raises `IntegrityError`
    at the first invariant that does not hold.
    """
    named = links.named
    unnamed = [node for node in nodes_of(books) if node.name is None]
    count = len(unnamed) + named.num_nodes
    if count != links.count:
        raise IntegrityError(f"{links.count} nodes were counted, {count} are there")
    serials = books.serials[[leaf.index for leaf in books]]
    if np.unique(serials).size != len(books):
        raise IntegrityError(f"{len(books)} sequences have {np.unique(serials).size} serials")
    leaves, checked = list(books), set[Node]()
    for begin in range(0, len(leaves), LEAVES_PER_STEP):
        for leaf in leaves[begin : begin + LEAVES_PER_STEP]:
            if books.holds(leaf):
                _check_path(leaf, books, named.page_size, checked)
        yield
    held = count_holds(budget)
    for begin in range(0, len(named.nodes), LEAVES_PER_STEP):
        for node in named.nodes[begin : begin + LEAVES_PER_STEP]:
            if node is not None:
                check_named(node, named, held)
        yield
        held = count_holds(budget)
    pages = [node.pages for node in nodes_of(books) if node.name is None]
    pages += [leaf.table[leaf.start : books.num_pages[leaf.index]] for leaf in books]
    _check_pages(pages, np.flatnonzero(named.node_of >= 0), budget.allocator)
    check_counts(books, budget, named)


def count_holds(budget: Budget) -> Counter[Node]:
    """How many leases and hard pins are on each node."""
    return Counter(node for one in budget.namespaces.values() for node in one.held_nodes)


def _check_path(leaf: Leaf, books: SequenceBooks, page_size: int, checked: set[Node]) -> None:
    """A leaf, and the nodes above it that were not checked before."""
    node = leaf.parent
    while node is not None and node not in checked:
        _check_node(node)
        checked.add(node)
        node = node.parent
    _check_leaf(leaf, books, page_size)


def _check_node(node: Node) -> None:
    where = f"the node of pages {node.start} to {node.end} of its path"
    above = 0 if node.parent is None else node.parent.end
    if node.pages.size == 0 or node.start != above:
        raise IntegrityError(f"{where} has {node.pages.size} pages and starts after {above}")
    if node.name is None and len(node.children) < 2:
        raise IntegrityError(f"{where} has {len(node.children)} children, at least 2 share a node")
    if node.name is not None and node.parent is not None and node.parent.name is None:
        raise IntegrityError(f"{where} has a name, and none before it")
    if node.parent is not None and node not in node.parent.children:
        raise IntegrityError(f"{where} is unknown to its parent")
    if any(child.parent is not node for child in node.children):
        raise IntegrityError(f"{where} has a child that hangs elsewhere")


def _check_leaf(leaf: Leaf, books: SequenceBooks, page_size: int) -> None:
    lengths = books.lengths[:, leaf.index]
    pages = int(books.num_pages[leaf.index])
    where = f"{leaf.id} with {pages} pages of {page_size}"
    if pages != -(-int(lengths.max()) // page_size):
        raise IntegrityError(f"{where} has lengths {lengths.tolist()}")
    above = 0 if leaf.parent is None else leaf.parent.end
    if leaf.start != above or leaf.start * page_size > lengths.min():
        raise IntegrityError(
            f"{where} and lengths {lengths.tolist()} owns them from {leaf.start}, shares {above}"
        )
    if leaf.parent is not None and leaf not in leaf.parent.children:
        raise IntegrityError(f"{where} is unknown to its parent")
    if leaf.whole is not None:
        rank, ranks = leaf.shard.rank, leaf.shard.ranks
        if not np.array_equal(held(leaf.whole.lengths, rank, ranks, page_size), lengths):
            known = leaf.whole.lengths.tolist()
            raise IntegrityError(f"{where}, rank {rank}, has {lengths.tolist()} of {known} tokens")
    if pages and books.last_page[leaf.index] != leaf.table[pages - 1]:
        last = int(books.last_page[leaf.index])
        raise IntegrityError(f"{where} ends in {leaf.table[pages - 1]}, its books say {last}")
    node = leaf.parent
    while node is not None:
        if not np.array_equal(leaf.table[node.start : node.end], node.pages):
            raise IntegrityError(f"{where} differs from its path after page {node.start}")
        node = node.parent


def _check_pages(held: list[Int32], named: Indices, allocator: PageAllocator) -> None:
    """Every page is free or has exactly one holder, and the allocator knows which."""
    total = allocator.num_pages
    every = np.concatenate([np.empty(0, dtype=np.int32), *held])
    holders = np.bincount(every, minlength=total)
    holders[named] += 1
    refcounts = allocator.refcounts
    if (wrong := np.flatnonzero(holders != refcounts)).size:
        page = int(wrong[0])
        raise IntegrityError(
            f"page {page} has {holders[page]} holders and refcount {refcounts[page]}"
            f" ({wrong.size} such pages)"
        )
    if (twice := np.flatnonzero(holders > 1)).size:
        raise IntegrityError(f"page {twice[0]} can be written by {holders[twice[0]]} leaves")
    is_free = np.zeros(total, dtype=bool)
    is_free[allocator.free_pages] = True
    free, used = int(is_free.sum()), int((refcounts > 0).sum())
    if free != allocator.num_free or free + used != total or refcounts[is_free].any():
        raise IntegrityError(
            f"{allocator.num_free} pages free ({free} distinct) + {used} referenced"
            f" != {total} in total"
        )
