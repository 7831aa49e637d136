"""An inventory of a namespace's named pages, made in small parts while the tree changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.core.nodes import Node, named
from service.core.pool.named_pages import NamedPages, Stored

LOOKED_AT: Final = 1024
"""Pages of the pool between two pauses: a fraction of a millisecond."""


def named_in(pages: NamedPages, namespace: str, at_once: int) -> Iterator[Stored | None]:
    """The pages of a namespace that have names, up to `at_once` an event, each page after those
    before it in its prompt; None is a pause.

    Pages that get or lose their names meanwhile may be missing or named in vain: the listener gets
    events of them.
    """
    done = np.zeros(pages.node_of.size, np.bool_)
    for page in range(done.size):
        if page % LOOKED_AT == LOOKED_AT - 1:
            yield None
        while not done.item(page) and (node := node_at(pages, page)) is not None:
            if named(node).root.namespace.name != namespace:
                break
            path = [node]
            while (above := path[-1].parent) and not done.item(above.pages.item(-1)):
                path.append(above)
            while path and is_there(pages, path[-1]):
                if (left := np.flatnonzero(~done[path[-1].pages])).size:
                    yield from part(pages, path[-1], int(left[0]), at_once, done)
                else:
                    path.pop()


def node_at(pages: NamedPages, page: int) -> Node | None:
    number = pages.node_of.item(page)
    return None if number < 0 else pages.nodes[number]


def is_there(pages: NamedPages, node: Node) -> bool:
    """Whether a node still has its name: others may have been evicted, or merged with a child."""
    return node.name is not None and pages.nodes[node.name.number] is node


def part(
    pages: NamedPages, node: Node, first: int, at_once: int, done: NDArray[np.bool_]
) -> Iterator[Stored]:
    """The pages `first:first + at_once` of a node, which are `done` then, by layer group."""
    name, some = named(node), node.pages[first : first + at_once]
    done[some] = True
    if first:
        before = pages.key_of(node.pages.item(first - 1))
    else:
        before = name.root.key if node.parent is None else pages.last_key(node.parent)
    ids = pages.token_ids[some].tobytes() if name.with_ids else None
    marked = np.flatnonzero(pages.has_extra[some]).tolist()
    extra = {at: pages.extra[some.item(at)] for at in marked} or None
    keys = pages.keys[some].tobytes()
    group = None if pages.satellites is None else pages.satellites.leading
    yield Stored(name.root.namespace.name, keys, before, ids, extra=extra, group=group)
    yield from pages.stored_bundles(name.root, some, before)
