"""Which stretches of pages a batch has in common: the prefix tree cut down to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from service.core.prefix.nodes import Node

SEGMENT_TOKENS: Final = 64
STATE_TOKENS: Final = 8
"""What a shared segment costs, in tokens of KV read, so that one that saves less is not cut out.

Every sequence that sees the segment gets one more attention state to write, read and merge: with
float32 states, fp16 KV and 32 query heads on 8 KV heads that is 2 * 32 * 129 * 4 bytes against
4 KiB per token, 8 tokens. The segment itself is one more piece of work to start, whatever its
length: the 64 tokens are what a worker of a device reads in the microsecond or so that takes.
"""


MOST_NODES: Final = 4096
"""Nodes of the tree that one plan looks at: some milliseconds. What is above more of them is not
shared in the plan."""
MOST_LEVELS: Final = 128
"""Levels of a plan, of which each is work of its own. What is shared below them is read apart."""


class SharedSegment(NamedTuple):
    """Pages `begin:end` of the path, seen by the sequences `first:last` in plan order."""

    level: int
    first: int
    last: int
    begin: int
    end: int


class OwnSegments(NamedTuple):
    """The next `num` sequences in plan order have their own pages from `begin` on."""

    level: int
    num: int
    begin: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Plan place i is sequence `order[i]` of the batch; `own` covers all places, in order."""

    order: list[int]
    own: list[OwnSegments]
    shared: list[SharedSegment]


def cut_segments(
    parents: Sequence[Node | None], reads: Sequence[bool], page_size: int, fold: bool
) -> Segments:
    """Segments of a batch whose leaves hang under `parents`.

    Nodes seen by the same sequences make one segment. Sequences are put in an order where each
    segment's are neighbours: the batch's own order where that does. With `fold`, a segment that
    saves less than it costs goes to the segments below it; only sequences with `reads` count.
    """
    tree = _batch_tree(parents)
    everybody = all(reads)
    members = _count(tree)
    readers = members if everybody else _count(tree, reads)
    segments = Segments([], [], [])
    # What is still to visit, next one last: a part of the tree, the page its segment begins
    # with, the segment's level.
    stack: list[tuple[Node | int | None, int, int]] = [(None, 0, 0)]
    while stack:
        part, begin, level = stack.pop()
        if isinstance(part, int):
            segments.order.append(part)
            segments.own.append(OwnSegments(level, 1, begin))
            continue
        kids = tree.below[part]
        if part is not None and len(kids) > 1 and level < MOST_LEVELS - 1:
            # Folded, each reading part below would read these pages by itself.
            parts = len(kids)
            if not everybody:
                parts = sum([(reads[k] if isinstance(k, int) else readers[k] > 0) for k in kids])
            saved = (parts - 1) * (part.end - begin) * page_size
            if not fold or saved >= SEGMENT_TOKENS + STATE_TOKENS * readers[part]:
                first = len(segments.order)
                last = first + members[part]
                segments.shared.append(SharedSegment(level, first, last, begin, part.end))
                begin, level = part.end, level + 1
        if part in tree.branching:
            stack.extend([(kid, begin, level) for kid in reversed(kids)])
        else:
            segments.order.extend(kids)
            segments.own.append(OwnSegments(level, len(kids), begin))
    return segments


@dataclass(frozen=True, slots=True)
class _BatchTree:
    """What a batch has `below` each node (None: the root): nodes, and places in the batch.

    In the batch's order. `branching` are the nodes that have a node below.
    """

    below: dict[Node | None, list[Any]]
    branching: set[Node | None]


def _batch_tree(parents: Sequence[Node | None]) -> _BatchTree:
    tree = _BatchTree({None: []}, set())
    last, kids = None, tree.below[None]
    for place, parent in enumerate(parents):
        if parent is not last:  # neighbours are often siblings
            last = parent
            kids = tree.below[parent] if parent in tree.below else _hang(tree, parent)
        kids.append(place)
    return tree


def _hang(tree: _BatchTree, node: Node | None) -> list[Any]:
    """Put a node in its place, with those above it that are not there yet; what is below it.

    With `MOST_NODES` in the tree it hangs under the root, as if it shared nothing.
    """
    made = tree.below[node] = []
    while node is not None:
        above = node.parent if len(tree.below) < MOST_NODES else None
        tree.branching.add(above)
        kids = tree.below.setdefault(above, [])
        kids.append(node)
        if len(kids) > 1:
            break
        node = above
    return made


def _count(tree: _BatchTree, reads: Sequence[bool] | None = None) -> dict[Node, int]:
    """Sequences of the batch under each node: all, or those with `reads`."""
    counts: dict[Node, int] = {}
    nodes = [node for node in tree.below if node is not None]
    for node in sorted(nodes, key=lambda node: node.start, reverse=True):
        kids = tree.below[node]
        if node in tree.branching:
            places = [kid for kid in kids if isinstance(kid, int)]
            counts[node] = sum([counts[kid] for kid in kids if not isinstance(kid, int)])
        else:
            places = kids
            counts[node] = 0
        counts[node] += len(places) if reads is None else sum([reads[place] for place in places])
    return counts
