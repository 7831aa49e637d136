"""The invariants of the core, counted from the leaves up; messages carry the numbers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import numpy as np

from service.core.errors import IntegrityError
from service.core.integrity.named_nodes import check_named
from service.core.integrity.sums import Sums
from service.core.pool.budget import Budget
from service.core.pool.namespaces import Namespace
from service.core.prefix.named_pages import NamedPages
from service.core.prefix.nodes import Leaf, Links, Node
from service.core.sequences.books import SequenceBooks

Pieces = Generator[None, None, None]
TRIES: Final = 3
"""How often sums are begun anew because something changed."""


def integrity_steps(books: SequenceBooks, links: Links, budget: Budget) -> Pieces:
    """Check every invariant, a small piece at a time.

    Between two steps the tree may change. Sequences and nodes are compared with what is above them,
    each at one moment: what is gone by then is passed over. Sums over all of them hold at one
    moment only, so they are begun anew when something has changed; where that happens `TRIES`
    times, they are not checked. Raises `IntegrityError` at the first invariant that does not hold.
    """
    wrong_sum = yield from sum_up(books, links, budget)
    yield from check_leaves(list(books), books, links.named)
    for number in range(len(links.named.nodes)):
        node = links.named.nodes[number]
        if node is not None:
            check_named(node, links.named)
        yield
    if wrong_sum is not None:
        raise wrong_sum


def own_integrity_steps(books: SequenceBooks, links: Links, owner: Namespace) -> Pieces:
    """As `integrity_steps`, of one namespace's sequences and named nodes, without the sums."""
    yield from check_leaves(list(owner.leaves), books, links.named)
    todo = [node for root in list(owner.roots.values()) for node in root.kids.values()]
    while todo:
        node = todo.pop()
        if node.name is not None and is_linked(node, links.named):
            check_named(node, links.named)
            todo += (node.name.kids or {}).values()
        yield


def sum_up(
    books: SequenceBooks, links: Links, budget: Budget
) -> Generator[None, None, IntegrityError | None]:
    """Count nodes, serials and holders of pages; what is wrong with pages, if anything is.

    Raises `IntegrityError` for nodes and serials.
    """
    for _ in range(TRIES):
        sums = Sums(books, links, budget)
        for _ in sums.collect():
            yield
            if sums.is_stale:
                break
        else:
            sums.check_nodes()
            try:
                sums.check_pages()
            except IntegrityError as error:
                return error
            return None
    return None


def check_leaves(leaves: Sequence[Leaf], books: SequenceBooks, named: NamedPages) -> Pieces:
    """Each leaf that is still there, and before it the nodes above it, each of them once."""
    seen: set[Node] = set()
    for leaf in leaves:
        todo = [leaf.parent]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if is_linked(node, named):
                check_node(node)
                todo.append(node.parent)
            yield
        if books.holds(leaf):
            check_leaf(leaf, books, named.page_size)
        yield


def is_linked(node: Node, named: NamedPages) -> bool:
    """Whether a node is still part of the tree: the children of one that was merged have another
    parent."""
    if node.name is not None:
        return named.nodes[node.name.number] is node
    return not node.children or any(child.parent is node for child in node.children)


def check_node(node: Node) -> None:
    """One node against the one above it and its children."""
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


def check_leaf(leaf: Leaf, books: SequenceBooks, page_size: int) -> None:
    """One leaf against its books and the node above it."""
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
    if leaf.shard is not None:
        leaf.shard.check(where, lengths, page_size)
    if pages and books.last_page[leaf.index] != leaf.table[pages - 1]:
        last = int(books.last_page[leaf.index])
        raise IntegrityError(f"{where} ends in {leaf.table[pages - 1]}, its books say {last}")
    node = leaf.parent
    if node is not None and not np.array_equal(leaf.table[node.start : node.end], node.pages):
        raise IntegrityError(f"{where} differs from its path after page {node.start}")
