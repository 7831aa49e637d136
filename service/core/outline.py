"""An outline of pool and tree: the state of every page, and the largest parts of the tree.

The work is bounded for any size of pool and tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.core.nodes import REFERENCED, Leaf, Namespace, Node
from service.core.pool.named_pages import NamedPages
from service.core.tree import PrefixTree

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]

MOST_CELLS: Final = 2**17
"""Maximum pages with a state; a larger pool is sampled at a fixed step."""
MOST_PARTS: Final = 512
MOST_CANDIDATES: Final = 1024
"""The parts are chosen from this many sequences and named nodes with the most pages."""
MOST_ROWS: Final = 8192
"""Maximum parts examined before the largest are chosen: some 10 ms."""
MOST_NAMESPACES: Final = 64


def page_states(tree: PrefixTree, most: int = MOST_CELLS) -> tuple[UInt8, int]:
    """The states of pages 0, s, 2s, ... (0: free, else a named node's state), and s."""
    named, num_pages = tree.cache.named, tree.allocator.num_pages
    step = -(-num_pages // most)
    states = tree.allocator.held(step).astype(np.uint8)
    numbers = named.node_of[::step]
    have = np.flatnonzero(numbers >= 0)
    if have.size:
        states[have] = np.frombuffer(named.states, np.uint8)[numbers[have]]
    if named.satellites is not None:
        leading = np.flatnonzero(named.node_of >= 0)
        held = named.satellites.of[leading]
        owns = np.frombuffer(named.states, np.uint8)[named.node_of[leading]]
        shown = (held >= 0) & (held % step == 0)
        states[held[shown] // step] = np.broadcast_to(owns[:, np.newaxis], held.shape)[shown]
    return states, step


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """The largest parts of the tree, [n] each, every part after its parent.

    The first rows are the `namespaces`, then nodes and private ends of sequences. `parents` is the
    parent's row, -1 for a namespace; `pages` are a part's own, `totals` include everything below
    it, with or without a row; `sequences` counts the sequences that share it; `used` is the time of
    its last use; `states` are states of pages.
    """

    namespaces: list[str]
    parents: Int32
    pages: Int32
    totals: Int32
    sequences: Int32
    used: NDArray[np.float64]
    states: UInt8


@dataclass(slots=True)
class Rows:
    """Parts in order of discovery; `places` maps nodes and namespaces to their rows."""

    places: dict[Node | Namespace, int] = field(default_factory=dict)
    above: list[Node | Namespace | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def add(
        self, above: Node | Namespace | None, start: int, pages: int, used: float, state: int
    ) -> None:
        self.above.append(above)
        self.starts.append(start)
        self.pages.append(pages)
        self.sequences.append(0)
        self.used.append(used)
        self.states.append(state)

    def add_path(self, node: Node | None, owner: Namespace) -> None:
        """Add a node and all above it that have no row; after `MOST_ROWS` the node goes directly
        under its namespace."""
        while node is not None and node not in self.places:
            self.places[node] = len(self.above)
            name = node.name
            used, state = (0.0, REFERENCED) if name is None else (name.used, name.state)
            above = node.parent if len(self.above) < MOST_ROWS else None
            self.add(above or owner, node.start, node.pages.size, used, state)
            node = above

    def add_leaf(self, leaf: Leaf, num_pages: int, used: float) -> None:
        self.add_path(leaf.parent, leaf.owner)
        pages = num_pages - leaf.start + leaf.reserve.size
        self.add(leaf.parent or leaf.owner, leaf.start, pages, used, REFERENCED)
        self.sequences[-1] = 1


def outline(tree: PrefixTree, most: int = MOST_PARTS) -> Outline:
    """The largest parts of the tree, at most `most`."""
    books, rows = tree.books, Rows()
    used = [one for one in tree.budget.namespaces.values() if one.used]
    namespaces = sorted(used, key=lambda one: -one.used)[:MOST_NAMESPACES]
    for namespace in namespaces:
        rows.places[namespace] = len(rows.above)
        rows.add(None, -1, 0, 0.0, 0)
    columns = largest(books.num_pages, MOST_CANDIDATES)
    held = zip(books.num_pages[columns].tolist(), books.used[columns].tolist(), strict=True)
    for leaf, (num_pages, used) in zip(books.leaves(columns), held, strict=True):
        if leaf.owner in rows.places:
            rows.add_leaf(leaf, num_pages, used)
    for node, owner in largest_named(tree.cache.named):
        if owner in rows.places:
            rows.add_path(node, owner)
    return summed_up(rows, [one.name for one in namespaces], most)


def summed_up(rows: Rows, namespaces: list[str], most: int) -> Outline:
    """The largest parts, with the totals of everything below each."""
    order = np.argsort(np.array(rows.starts, np.int32), kind="stable")
    above = [-1 if one is None else rows.places[one] for one in rows.above]
    totals, sequences, used = rows.pages.copy(), rows.sequences, rows.used
    for row in order[::-1].tolist():
        parent = above[row]
        if parent >= 0:
            totals[parent] += totals[row]
            sequences[parent] += sequences[row]
            used[parent] = max(used[parent], used[row])
    sizes = np.array(totals, np.int32)
    order = order[sizes[order] > 0]
    if order.size > most:  # a parent is larger than its children
        order = order[largest(sizes[order], most)]
    new = np.full(sizes.size + 1, -1, np.int32)
    new[order] = np.arange(order.size, dtype=np.int32)
    chosen = [name for name, row in zip(namespaces, new.tolist(), strict=False) if row >= 0]
    return Outline(
        chosen,
        new[np.array(above, np.intp)[order]],
        np.array(rows.pages, np.int32)[order],
        sizes[order],
        np.array(sequences, np.int32)[order],
        np.array(used, np.float64)[order],
        np.array(rows.states, np.uint8)[order],
    )


def largest_named(named: NamedPages) -> list[tuple[Node, Namespace]]:
    """Named nodes with their namespaces: all, or by sampling those with the most pages."""
    numbers = range(len(named.nodes))
    if len(numbers) > MOST_CANDIDATES:
        sample = named.node_of[:: -(-named.node_of.size // MOST_CELLS)]
        sizes = np.bincount(sample[sample >= 0], minlength=1)
        found: Iterable[int] = largest(sizes, MOST_CANDIDATES).tolist()
    else:
        found = numbers
    nodes = [named.nodes[number] for number in found]
    return [(one, one.name.root.namespace) for one in nodes if one is not None and one.name]


def largest(sizes: NDArray[np.integer], most: int) -> NDArray[np.intp]:
    """Indices of the `most` largest nonzero numbers, ascending."""
    places = np.flatnonzero(sizes)
    if places.size > most:
        places = np.sort(places[np.argpartition(sizes[places], places.size - most)[-most:]])
    return places
