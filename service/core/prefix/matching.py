"""Finds cached pages: walks down the tree by page keys, then compares all pages at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from service.core.keys import Prefix
from service.core.nodes import Int32, Node, Root, named
from service.core.pool.links import Links
from service.core.pool.named_pages import NamedPages

MOST_MATCHED: Final = 1024
"""Maximum nodes that one call matches: some milliseconds. A path only has more where other
sequences or leases end at more places of it."""


@dataclass(slots=True, eq=False)
class Match:
    """The longest cached beginning of a prefix: `num_pages`, the last of them in `node`."""

    node: Node | None
    num_pages: int
    next_key: bytes | None = None
    """The key of the page after them, if no cached page has it."""
    is_cut: bool = False
    """Whether the match may be longer: it stopped after the maximum number of nodes."""

    def table(self) -> Int32:
        """The matched pages in order, int32 [num_pages]."""
        table = np.empty(self.num_pages, dtype=np.int32)
        node = self.node
        while node is not None:
            end = min(node.end, self.num_pages)
            table[node.start : end] = node.pages[: end - node.start]
            node = node.parent
        return table

    def cut(self, links: Links) -> Node | None:
        """The node that ends with the last matched page, split if needed; the caller must hold
        it."""
        if self.node is None or self.node.end == self.num_pages:
            return self.node
        return links.split(self.node, self.num_pages)


def walk(
    names: NamedPages, root: Root, node: Node | None, prefix: Prefix, stop: int, more: int = 0
) -> Match:
    """The longest path below `node` (None: the root) with the prefix's pages up to page `stop`.

    At most `MOST_MATCHED + more` nodes: they are found by the keys of their first pages; then all
    their pages are compared at once.
    """
    begin = at = 0 if node is None else node.end
    most = MOST_MATCHED + more
    key = root.key if node is None else names.last_key(node)
    way: list[Node] = []
    last, next_key = node, None
    while at < stop and len(way) < most:
        kids = root.kids if last is None else named(last).kids
        key = prefix.key_at(at, key, names.page_size)
        kid = kids.get(key) if kids else None
        if kid is None or not (prefix.token_ids is None or named(kid).with_ids):
            next_key = key if kid is None else None
            break
        way.append(kid)
        last = kid
        at, key = kid.end, names.last_key(kid)
    if not way:
        return Match(node, begin, next_key)
    pages = way[0].pages if len(way) == 1 else np.concatenate([one.pages for one in way])
    end = begin + names.num_same(pages[: stop - begin], prefix, begin)
    while way and way[-1].start >= end:
        way.pop()
    is_cut = len(way) == most and end == at < stop
    return Match(way[-1] if way else node, end, next_key if end == at else None, is_cut)


def named_path(node: Node | None) -> list[Node]:
    """The named nodes from the root down to `node`."""
    path = []
    while node is not None:
        if node.name is not None:
            path.append(node)
        node = node.parent
    return path[::-1]
