"""Named pages: their keys and token ids, and the state of every node that holds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.changes import Changes, Removed, Stored
from service.core.eviction_order import OUT
from service.core.keeping import Keeping
from service.core.keys import WORDS, Keys, Prefix, TokenIds
from service.core.namespaces import Root
from service.core.nodes import CACHED, PINNED, REFERENCED, Int32, Name, Node, Retention, named


class NamedPages:
    """One row per page of the pool, valid while the page has a name; `nodes` by their numbers.

    `keeping` says how long they are kept, `num_pages` counts pages with a name.
    """

    __slots__ = (
        "_free_numbers",
        "changes",
        "keeping",
        "keys",
        "node_of",
        "nodes",
        "num_pages",
        "page_size",
        "token_ids",
    )

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.keys: Keys = np.zeros((num_pages, WORDS), dtype=np.uint64)
        self.token_ids: NDArray[np.uint32] = np.zeros((num_pages, page_size), dtype=np.uint32)
        self.node_of: Int32 = np.full(num_pages, -1, dtype=np.int32)
        self.nodes: list[Node | None] = []
        self.changes = Changes()
        self.keeping = Keeping()
        self.num_pages = 0
        self.page_size = page_size
        self._free_numbers: list[int] = []

    # Names.

    def give_name(
        self, node: Node, root: Root, keys: Keys, ids: TokenIds | None, keep: Retention
    ) -> None:
        """Commit a node's pages, whose `keys` uint64 [n, 2] and `ids` uint32 [n * page_size] these
        are. All of its children are held by sequences."""
        name = Name(root, self._number(node), ids is not None, keep, len(node.children))
        node.name = name
        # One page by its number: a commit while decoding has no more, and that is faster.
        rows = node.pages if node.pages.size > 1 else int(node.pages[0])
        self.keys[rows] = keys
        self.node_of[rows] = name.number
        if ids is not None:
            self.token_ids[rows] = ids.reshape(-1, self.page_size)
        self.num_pages += node.pages.size
        root.namespace.num_nodes += 1
        name.state = REFERENCED
        self._kids_above(node, root)[keys[0].tobytes()] = node
        self.keeping.watch(node, name)
        if self.changes.listened:
            before = self.key_before(node, root)
            self.changes.add(Stored(root.namespace.name, keys, before, ids))

    def split(self, upper: Node, lower: Node, name: Name) -> None:
        """`upper` has taken the front of `lower`: it is named and held likewise."""
        upper.name = Name(name.root, self._number(upper), name.with_ids, name.keep)
        name.root.namespace.num_nodes += 1
        upper.name.kids = {self.first_key(lower): lower}
        upper.name.refs, upper.name.pins = int(name.refs > 0), int(name.pins > 0)
        upper.name.state, upper.name.stamp = name.state, name.stamp
        upper.name.place = OUT
        self.node_of[upper.pages] = upper.name.number
        self._kids_above(upper, name.root)[self.first_key(upper)] = upper
        self.keeping.watch(upper, upper.name)
        if name.state == CACHED:
            name.root.namespace.order.rank_again(upper, upper.name, self.keeping.rank(upper.name))

    def absorb(self, parent: Node, child: Node) -> None:
        """`child` is about to take the pages of `parent`, and its place."""
        above, name = named(parent), named(child)
        self._count(above, -parent.pages.size)
        self.node_of[parent.pages] = name.number
        self._kids_above(parent, above.root)[self.first_key(parent)] = child
        self._count(name, parent.pages.size)
        self._forget(above)

    def shorten(self, node: Node, count: int) -> Int32:
        """Take the names of a cached node's last `count` pages, which are returned."""
        name = named(node)
        keep = node.pages.size - count
        gone = node.pages[keep:]
        self._count(name, -count)
        self.node_of[gone] = -1
        self.num_pages -= count
        if self.changes.listened:
            self.changes.add(Removed(name.root.namespace.name, self.keys[gone]))
        if keep == 0:
            name.root.namespace.order.take_out(node, name)
            del self._kids_above(node, name.root)[self.first_key(node)]
            self._forget(name)
        else:
            node.pages = node.pages[:keep]
        return gone

    # Who holds them.

    def hold(self, node: Node | None) -> None:
        """One more holder of a node, and so of all above it."""
        while node is not None:
            name = named(node)
            name.refs += 1
            if name.refs > 1:
                return
            self._settle(node, name)
            node = node.parent

    def let_go(self, node: Node) -> bool:
        """One holder less; whether it was the last, so that the parent has one less as well."""
        name = named(node)
        name.refs -= 1
        if name.refs:
            return False
        self._settle(node, name)
        return True

    def pin(self, node: Node | None, by: int) -> None:
        """One hard pin more (`by` 1) or less (-1) on a node, and so on all above it."""
        while node is not None:
            name = named(node)
            had = name.pins > 0
            name.pins += by
            if had == (name.pins > 0):
                return
            self._settle(node, name)
            node = node.parent

    def is_last_holder(self, parent: Node, child: Node) -> bool:
        """Whether `child`, cached just now, is all that held `parent`, and is kept as long."""
        above, name = named(parent), named(child)
        return (
            above.refs == 1
            and name.state == CACHED
            and above.own == above.pins == 0
            and self._is_like(parent, above, name)
        )

    def are_alike(self, parent: Node, child: Node) -> bool:
        """Whether nothing tells `parent` from its only child, both of which are held."""
        above, name = named(parent), named(child)
        held = above.state == name.state == REFERENCED and above.pins == name.pins == 0
        return held and above.own == 0 and self._is_like(parent, above, name)

    def _is_like(self, parent: Node, above: Name, name: Name) -> bool:
        return (
            len(parent.children) == 1
            and above.with_ids == name.with_ids
            and above.keep == name.keep
        )

    def _settle(self, node: Node, name: Name) -> None:
        """The state that follows from the holders; what becomes cached was used just now."""
        state = REFERENCED if name.refs else PINNED if name.pins else CACHED
        if state == name.state:
            return
        size = node.pages.size
        self._count(name, -size)
        order = name.root.namespace.order
        if name.state == CACHED:
            order.take_out(node, name)
        name.state = state
        self._count(name, size)
        if state == CACHED:
            order.use(node, name, self.keeping.rank(name))

    def _count(self, name: Name, pages: int) -> None:
        """So many pages more in the name's state."""
        namespace = name.root.namespace
        if name.state == CACHED:
            namespace.cached += pages
        elif name.state == PINNED:
            namespace.pinned += pages

    # Looking them up.

    def first_key(self, node: Node) -> bytes:
        key: bytes = self.keys[node.pages[0]].tobytes()
        return key

    def key_before(self, node: Node, root: Root) -> bytes:
        """The key of the page before a node's first."""
        return root.key if node.parent is None else self.last_key(node.parent)

    def last_key(self, node: Node) -> bytes:
        key: bytes = self.keys[node.pages[-1]].tobytes()
        return key

    def num_same(self, pages: Int32, prefix: Prefix, first: int) -> int:
        """How many of these pages, whose ids are known if it has some, are those of the prefix from
        page `first` on."""
        last = first + pages.size
        if prefix.page_keys is not None:
            return equal_rows(self.keys[pages], prefix.page_keys[first:last])
        if prefix.token_ids is None:
            return 0
        given = prefix.token_ids[first * self.page_size : last * self.page_size]
        return equal_rows(self.token_ids[pages], given.reshape(-1, self.page_size))

    def find(self, root: Root, key: bytes) -> tuple[Node, int] | None:
        """The node with the page of that key, and the page's place in it; looks at every page."""
        words = np.frombuffer(key, dtype=np.uint64)
        for page in np.flatnonzero(self.keys[:, 0] == words[0]).tolist():
            number = int(self.node_of[page])
            node = self.nodes[number] if number >= 0 else None
            same = self.keys[page].tobytes() == key
            if same and node is not None and named(node).root is root:
                return node, int(np.flatnonzero(node.pages == page)[0])
        return None

    @property
    def num_nodes(self) -> int:
        """Nodes with a name."""
        return len(self.nodes) - len(self._free_numbers)

    def _kids_above(self, node: Node, root: Root) -> dict[bytes, Node]:
        if node.parent is None:
            return root.kids
        above = named(node.parent)
        if above.kids is None:
            above.kids = {}
        return above.kids

    def _number(self, node: Node) -> int:
        if self._free_numbers:
            number = self._free_numbers.pop()
            self.nodes[number] = node
            return number
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _forget(self, name: Name) -> None:
        self.nodes[name.number] = None
        self.keeping.forget(name)
        name.root.namespace.num_nodes -= 1
        self._free_numbers.append(name.number)


def equal_rows(held: NDArray[np.unsignedinteger], given: NDArray[np.unsignedinteger]) -> int:
    """How many rows are equal before the first that is not."""
    if np.array_equal(held, given):
        return len(held)
    first = int((held != given).ravel().argmax())
    return first // int(given.shape[1])
