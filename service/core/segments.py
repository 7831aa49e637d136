"""Which stretches of pages a batch has in common: the prefix tree cut down to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.core.nodes import Node

SEGMENT_TOKENS: Final = 64
STATE_TOKENS: Final = 8
"""What a shared segment costs, in tokens of KV read, so that one that saves less is not cut out.

Every sequence that sees the segment gets one more attention state to write, read and merge: with
float32 states, fp16 KV and 32 query heads on 8 KV heads that is 2 * 32 * 129 * 4 bytes against
4 KiB per token, 8 tokens. The segment itself is one more piece of work to start, whatever its
length: the 64 tokens are what a worker of a device reads in the microsecond or so that takes.
"""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Pages `begin:end` of the path, seen by the sequences `first:last` in plan order."""

    level: int
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Plan place i is sequence `order[i]` of the batch.

    Its own segment, after the shared ones, is at level `own_level[i]` from page `own_begin[i]` on.
    """

    order: list[int]
    own_level: list[int]
    own_begin: list[int]
    shared: list[SharedSegment]


def cut_segments(
    parents: Sequence[Node | None], reads: Sequence[bool], page_size: int, fold: bool
) -> Segments:
    """Segments of a batch whose leaves hang under `parents`.

    Nodes seen by the same sequences make one segment. Sequences are put in an order where each
    segment's are neighbours: the batch's own order where that does. With `fold`, a segment that
    saves less than it costs goes to the segments below it; only sequences with `reads` count.
    """
    below = _batch_tree(parents)
    members, readers = _count(below, reads)
    segments = Segments([], [], [], [])
    # What is still to visit, next one last: a part of the tree, the page its segment begins
    # with, the segment's level.
    stack: list[tuple[Node | int | None, int, int]] = [(None, 0, 0)]
    while stack:
        part, begin, level = stack.pop()
        if isinstance(part, int):
            segments.order.append(part)
            segments.own_begin.append(begin)
            segments.own_level.append(level)
            continue
        kids = below[part]
        if part is not None and len(kids) > 1:
            saved = (readers[part] - 1) * (part.end - begin) * page_size
            if not fold or saved >= SEGMENT_TOKENS + STATE_TOKENS * readers[part]:
                first = len(segments.order)
                last = first + members[part]
                segments.shared.append(SharedSegment(level, first, last, begin, part.end))
                begin, level = part.end, level + 1
        stack.extend([(kid, begin, level) for kid in reversed(kids)])
    return segments


def _batch_tree(parents: Sequence[Node | None]) -> dict[Node | None, list[Node | int]]:
    """What the batch has below each node (None: the root), in the batch's order."""
    below: dict[Node | None, list[Node | int]] = {None: []}
    for place, parent in enumerate(parents):
        part: Node | int = place
        node = parent
        while (kids := below.get(node)) is None:
            below[node] = [part]
            # Only the root, which is there from the start, has no parent.
            part, node = (node, node.parent) if node is not None else (part, None)
        kids.append(part)
    return below


def _count(
    below: dict[Node | None, list[Node | int]], reads: Sequence[bool]
) -> tuple[dict[Node, int], dict[Node, int]]:
    """Sequences of the batch under each node: all, and those with `reads`."""
    members: dict[Node, int] = {}
    readers: dict[Node, int] = {}
    nodes = [node for node in below if node is not None]
    for node in sorted(nodes, key=lambda node: node.start, reverse=True):
        all_here = reading = 0
        for kid in below[node]:
            if isinstance(kid, int):
                all_here += 1
                reading += reads[kid]
            else:
                all_here += members[kid]
                reading += readers[kid]
        members[node], readers[node] = all_here, reading
    return members, readers
