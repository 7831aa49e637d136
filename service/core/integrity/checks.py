"""Checks the invariants of the core, from the leaves up; messages carry the numbers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import numpy as np

from service.core.errors import IntegrityError
from service.core.integrity.sums import Sums
from service.core.pool.budget import Budget
from service.core.pool.eviction_order import OUT
from service.core.pool.namespaces import Namespace
from service.core.prefix.named_pages import NamedPages
from service.core.prefix.nodes import (
    CACHED,
    PINNED,
    REFERENCED,
    Leaf,
    Links,
    Name,
    Node,
    named,
)
from service.core.sequences.books import SequenceBooks

Pieces = Generator[None, None, None]
TRIES: Final = 3
"""Attempts to compute the sums without a change in between."""


def integrity_steps(books: SequenceBooks, links: Links, budget: Budget) -> Pieces:
    """Check every invariant, a small piece at a time.

    The tree may change between two steps. Sequences and nodes are compared with their parents, each
    at one moment, deleted ones skipped. Sums over all of them hold at one moment only: after a
    change they are restarted, and after `TRIES` changes not checked. Raises `IntegrityError` at the
    first invariant that does not hold.
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
    """`integrity_steps` for one namespace's sequences and named nodes, without the sums."""
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
    """Count nodes, serials and holders of pages; returns the error in the pages' sums, if any.

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


def check_leaves(leaves: Sequence[Leaf], books: SequenceBooks, names: NamedPages) -> Pieces:
    """Check each leaf that still exists, and before it the nodes above it, each once."""
    seen: set[Node] = set()
    for leaf in leaves:
        todo = [leaf.parent]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if is_linked(node, names):
                check_node(node)
                todo.append(node.parent)
            yield
        if books.holds(leaf):
            check_leaf(leaf, books, names.page_size)
        yield


def is_linked(node: Node, names: NamedPages) -> bool:
    """Whether a node is part of the tree: a merged node's children have another parent."""
    if node.name is not None:
        return names.nodes[node.name.number] is node
    return not node.children or any(child.parent is node for child in node.children)


def check_node(node: Node) -> None:
    """Check one node against its parent and children."""
    where = f"the node of pages {node.start} to {node.end} of its path"
    above = 0 if node.parent is None else node.parent.end
    if node.pages.size == 0 or node.start != above:
        raise IntegrityError(f"{where} has {node.pages.size} pages and starts after {above}")
    if node.name is None and len(node.children) < 2:
        raise IntegrityError(f"{where} has {len(node.children)} children, at least 2 share a node")
    if node.name is not None and node.parent is not None and node.parent.name is None:
        raise IntegrityError(f"{where} has a name, its parent has none")
    if node.parent is not None and node not in node.parent.children:
        raise IntegrityError(f"{where} is not among its parent's children")
    if any(child.parent is not node for child in node.children):
        raise IntegrityError(f"{where} has a child with another parent")


def check_leaf(leaf: Leaf, books: SequenceBooks, page_size: int) -> None:
    """Check one leaf against its books and its parent."""
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
        raise IntegrityError(f"{where} is not among its parent's children")
    if leaf.shard is not None:
        leaf.shard.check(where, lengths, page_size)
    if pages and books.last_page[leaf.index] != leaf.table[pages - 1]:
        last = int(books.last_page[leaf.index])
        raise IntegrityError(f"{where} ends in page {leaf.table[pages - 1]}, the books say {last}")
    node = leaf.parent
    if node is not None and not np.array_equal(leaf.table[node.start : node.end], node.pages):
        raise IntegrityError(f"{where} differs from its parent after page {node.start}")


def check_named(node: Node, books: NamedPages) -> None:
    """Check one named node against its books, children and parent."""
    name = named(node)
    where = f"the named node of pages {node.start} to {node.end} of its path"
    if node.pages.size == 0 or (books.node_of[node.pages] != name.number).any():
        raise IntegrityError(f"{where} has pages that the books give to another node")
    _check_place(node, name, books, where)
    live = [child for child in node.children if _is_live(child)]
    pinned = [child for child in (name.kids or {}).values() if named(child).pins]
    if name.refs + name.pins != len(live) + len(pinned) + name.own or name.refs < len(live):
        raise IntegrityError(
            f"{where} has {name.refs} holders and {name.pins} pins, with {len(live)} children "
            f"held, {len(pinned)} pinned, and {name.own} of its own"
        )
    state = REFERENCED if name.refs else PINNED if name.pins else CACHED
    if books.states[name.number] != name.state:
        raise IntegrityError(f"{where} is in state {name.state}, the books have another")
    if name.state != state or (name.place != OUT) != (state == CACHED):
        raise IntegrityError(f"{where} is in state {name.state}, place {name.place}, not {state}")


def _is_live(child: object) -> bool:
    return not isinstance(child, Node) or child.name is None or child.name.refs > 0


def _check_place(node: Node, name: Name, books: NamedPages, where: str) -> None:
    """Check that the node is where its key leads, below named nodes."""
    above = 0 if node.parent is None else node.parent.end
    if node.start != above or books.nodes[name.number] is not node:
        raise IntegrityError(f"{where} starts not after {above}, or another node has its number")
    if node.parent is not None and (node.parent.name is None or node not in node.parent.children):
        raise IntegrityError(f"{where} is not among its parent's children, or that has no name")
    kids = name.root.kids if node.parent is None else named(node.parent).kids
    if kids is None or kids.get(books.first_key(node)) is not node:
        raise IntegrityError(f"{where} cannot be found by its key")
    if name.root.namespace.roots.get(name.root.cache_salt) is not name.root:
        raise IntegrityError(f"{where} is below a deleted root")
    if any(child not in node.children for child in (name.kids or {}).values()):
        raise IntegrityError(f"{where} finds a child of another node")
