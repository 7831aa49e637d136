"""Segments: the ranges of pages that sequences of a batch share, from the prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from service.core.nodes import Node

SEGMENT_TOKENS: Final = 64
STATE_TOKENS: Final = 8
"""Cost of a shared segment, in tokens of KV read: only segments that save more are cut.

Each sequence of the segment has one more attention state to write, read and merge: with float32
states, fp16 KV and 32 query heads on 8 KV heads 2 * 32 * 129 * 4 bytes against 4 KiB per token,
so 8 tokens. Starting one more piece of work takes a device about a microsecond, in which one of
its workers reads 64 tokens.
"""
MOST_NODES: Final = 4096
"""Maximum nodes of the tree that one plan visits: some milliseconds. Sharing above further nodes is
not used."""
MOST_LEVELS: Final = 128
"""Maximum levels of a plan, since each costs work. Sharing below them is not used."""


class SharedSegment(NamedTuple):
    """Pages `begin:end` of the path, seen by the sequences `first:last` in plan order."""

    level: int
    first: int
    last: int
    begin: int
    end: int


class OwnSegments(NamedTuple):
    """The next `num` sequences in plan order read their own pages from `begin` on."""

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
    """Segments of a batch; `parents` are the parents of its leaves.

    Nodes seen by the same sequences form one segment. The plan order makes each segment's sequences
    neighbours, and is the batch's own order where possible. With `fold`, a segment that saves less
    than it costs is added to the segments below it; only sequences with `reads` count as savings.
    """
    tree = _batch_tree(parents)
    all_read = all(reads)
    members = _count(tree)
    readers = members if all_read else _count(tree, reads)
    segments = Segments([], [], [])
    # Still to visit, the next one last: part of the tree, first page and level of its segment.
    stack: list[tuple[Node | int | None, int, int]] = [(None, 0, 0)]
    while stack:
        part, begin, level = stack.pop()
        if isinstance(part, int):
            segments.order.append(part)
            segments.own.append(OwnSegments(level, 1, begin))
            continue
        kids = tree.below[part]
        if part is not None and len(kids) > 1 and level < MOST_LEVELS - 1:
            # If folded, each reading part below reads these pages itself.
            parts = len(kids)
            if not all_read:
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
    """The part of the tree that a batch uses.

    `below` has the children of each node (None: the root) in the batch's order: nodes, and indices
    of sequences in the batch. `branching` are the nodes with a node among their children.
    """

    below: dict[Node | None, list[Any]]
    branching: set[Node | None]


def _batch_tree(parents: Sequence[Node | None]) -> _BatchTree:
    tree = _BatchTree({None: []}, set())
    last, kids = None, tree.below[None]
    for place, parent in enumerate(parents):
        if parent is not last:  # neighbours are often siblings
            last = parent
            kids = tree.below[parent] if parent in tree.below else _add_path(tree, parent)
        kids.append(place)
    return tree


def _add_path(tree: _BatchTree, node: Node | None) -> list[Any]:
    """Add a node and its missing ancestors; returns the node's children.

    After `MOST_NODES` a node is added under the root, as if it shared nothing.
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
    """Number of the batch's sequences below each node: all, or those with `reads`."""
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
