"""The invariants of the core, counted from the leaves up; messages carry the numbers."""

from __future__ import annotations

import numpy as np

from service.core.allocator import PageAllocator
from service.core.errors import IntegrityError
from service.core.nodes import Int32, Leaf, Node
from service.core.sequences import SequenceBooks


def nodes_of(books: SequenceBooks) -> set[Node]:
    """Every shared node, found from the leaves up."""
    found: set[Node] = set()
    for leaf in books:
        node = leaf.parent
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def sharing_ratio(books: SequenceBooks, page_size: int) -> float:
    """Tokens seen by sequences / tokens stored, by each sequence's least kv_len; 1 for none."""
    seen = int(books.lengths.min(axis=0).sum(dtype=np.int64))
    shared = sum(leaf.start for leaf in books) - sum(node.pages.size for node in nodes_of(books))
    stored = seen - shared * page_size
    return seen / stored if stored else 1.0


def check_integrity(
    books: SequenceBooks, num_nodes: int, allocator: PageAllocator, page_size: int
) -> None:
    """Raises `IntegrityError` at the first invariant that does not hold."""
    nodes = nodes_of(books)
    if len(nodes) != num_nodes:
        raise IntegrityError(f"{num_nodes} nodes were counted, {len(nodes)} hold sequences")
    for node in nodes:
        _check_node(node, nodes)
    for leaf in books:
        _check_leaf(leaf, books, page_size)
    serials = books.serials[[leaf.index for leaf in books]]
    if np.unique(serials).size != len(books):
        raise IntegrityError(f"{len(books)} sequences have {np.unique(serials).size} serials")
    held = [node.pages for node in nodes]
    held += [leaf.table[leaf.start : books.num_pages[leaf.index]] for leaf in books]
    _check_pages(held, allocator)


def _check_node(node: Node, nodes: set[Node]) -> None:
    where = f"the node of pages {node.start} to {node.end} of its path"
    above = 0 if node.parent is None else node.parent.end
    if node.pages.size == 0 or node.start != above:
        raise IntegrityError(f"{where} has {node.pages.size} pages and starts after {above}")
    if len(node.children) < 2:
        raise IntegrityError(f"{where} has {len(node.children)} children, at least 2 share a node")
    if node.parent is not None and node not in node.parent.children:
        raise IntegrityError(f"{where} is unknown to its parent")
    for child in node.children:
        if child.parent is not node:
            raise IntegrityError(f"{where} has a child that hangs elsewhere")
        if isinstance(child, Node) and child not in nodes:
            raise IntegrityError(f"{where} has a child without sequences")


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
    if pages and books.last_page[leaf.index] != leaf.table[pages - 1]:
        last = int(books.last_page[leaf.index])
        raise IntegrityError(f"{where} ends in {leaf.table[pages - 1]}, its books say {last}")
    node = leaf.parent
    while node is not None:
        if not np.array_equal(leaf.table[node.start : node.end], node.pages):
            raise IntegrityError(f"{where} differs from its path after page {node.start}")
        node = node.parent


def _check_pages(held: list[Int32], allocator: PageAllocator) -> None:
    """Every page is free or has exactly one holder, and the allocator knows which."""
    total = allocator.num_pages
    every = np.concatenate([np.empty(0, dtype=np.int32), *held])
    holders = np.bincount(every, minlength=total)
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
