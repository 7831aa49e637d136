"""Named pages: their keys and token ids, and the state of every node that holds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.pool.eviction_order import OUT
from service.core.pool.namespaces import Root
from service.core.prefix.changes import Listener, Removed, Stored
from service.core.prefix.keys import KEY_BYTES, WORDS, Keys, Prefix, TokenIds, as_keys
from service.core.prefix.nodes import (
    CACHED,
    PINNED,
    REFERENCED,
    Int32,
    Name,
    Node,
    Retention,
    named,
)
from service.core.prefix.retention import Keeping


class NamedPages:
    """One row per page of the pool, valid while the page has a name; `nodes` by their numbers.

    `keeping` says how long they are kept, `num_pages` counts pages with a name, `num_changes` grows
    whenever nodes or their holders change. `states` has each
    node's state by its number once more, for whoever asks about all pages at once. `listener`, if
    there is one, is told what is stored and removed.
    """

    __slots__ = (
        "_free_numbers",
        "_key_bytes",
        "keeping",
        "keys",
        "listener",
        "node_of",
        "nodes",
        "num_cached",
        "num_changes",
        "num_pages",
        "page_size",
        "states",
        "token_ids",
    )

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.keys: Keys = np.zeros((num_pages, WORDS), dtype=np.uint64)
        self._key_bytes = self.keys.data.cast("B")
        self.token_ids: NDArray[np.uint32] = np.zeros((num_pages, page_size), dtype=np.uint32)
        self.node_of: Int32 = np.full(num_pages, -1, dtype=np.int32)
        self.nodes: list[Node | None] = []
        self.states = bytearray()
        self.listener: Listener | None = None
        self.keeping = Keeping()
        self.num_pages = self.num_cached = self.num_changes = 0
        self.page_size = page_size
        self._free_numbers: list[int] = []

    # Names.

    def give_name(
        self, node: Node, root: Root, keys: bytes, ids: TokenIds | None, keep: Retention
    ) -> None:
        """Commit a node's pages, whose `keys` one after another and `ids` uint32 [n * page_size]
        these are. All of its children are held by sequences."""
        name = Name(root, self._number(node), ids is not None, keep, len(node.children))
        name.state = self.states[name.number] = REFERENCED
        name.used = self.keeping.now
        node.name = name
        self._write(node.pages, name.number, keys, ids)
        self.num_pages += node.pages.size
        root.namespace.num_nodes += 1
        self._kids_above(node, root)[keys[:KEY_BYTES]] = node
        self.keeping.watch(node, name)
        if self.listener is not None:
            before = self.key_before(node, root)
            told = None if ids is None else ids.tobytes()
            self.listener(Stored(root.namespace.name, keys, before, told))

    def _write(self, pages: Int32, number: int, keys: bytes, ids: TokenIds | None) -> None:
        """The rows of pages that get names."""
        if pages.size > 1:
            self.keys[pages] = as_keys(keys)
            self.node_of[pages] = number
            if ids is not None:
                self.token_ids[pages] = ids.reshape(-1, self.page_size)
            return
        # One page by its number, which is faster: a commit while decoding has no more.
        page = pages.item()
        self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES] = keys
        self.node_of[page] = number
        if ids is not None:
            self.token_ids[page] = ids

    def split(self, upper: Node, lower: Node, name: Name) -> None:
        """`upper` has taken the front of `lower`: it is named and held likewise."""
        upper.name = Name(name.root, self._number(upper), name.with_ids, name.keep)
        name.root.namespace.num_nodes += 1
        upper.name.kids = {self.first_key(lower): lower}
        upper.name.refs, upper.name.pins = int(name.refs > 0), int(name.pins > 0)
        upper.name.state, upper.name.stamp, upper.name.used = name.state, name.stamp, name.used
        self.states[upper.name.number] = name.state
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
        if self.listener is not None:
            keys = self.key_of(gone.item()) if count == 1 else self.keys[gone].tobytes()
            self.listener(Removed(name.root.namespace.name, keys))
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
        name.state = self.states[name.number] = state
        name.used = self.keeping.now
        self._count(name, size)
        if state == CACHED:
            order.use(node, name, self.keeping.rank(name))

    def _count(self, name: Name, pages: int) -> None:
        """So many pages more in the name's state."""
        self.num_changes += 1
        namespace = name.root.namespace
        if name.state == CACHED:
            namespace.cached += pages
            self.num_cached += pages
        elif name.state == PINNED:
            namespace.pinned += pages

    # Looking them up.

    def key_of(self, page: int) -> bytes:
        return self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES].tobytes()

    def first_key(self, node: Node) -> bytes:
        return self.key_of(node.pages.item(0))

    def key_before(self, node: Node, root: Root) -> bytes:
        """The key of the page before a node's first."""
        return root.key if node.parent is None else self.last_key(node.parent)

    def last_key(self, node: Node) -> bytes:
        return self.key_of(node.pages.item(-1))

    def num_same(self, pages: Int32, prefix: Prefix, first: int) -> int:
        """How many of these pages, whose ids are known if it has some, are those of the prefix from
        page `first` on, none of them skipped."""
        last = first + pages.size
        keys = prefix.keys_of(first, last)
        if keys is not None:
            return equal_rows(self.keys[pages], keys)
        ids = prefix.ids_of(first, last, self.page_size)
        if ids is None:
            return 0
        return equal_rows(self.token_ids[pages], ids.reshape(-1, self.page_size))

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
        self.states.append(0)
        return len(self.nodes) - 1

    def _forget(self, name: Name) -> None:
        if (node := self.nodes[name.number]) is not None:
            self.keeping.forget(node)
        self.nodes[name.number] = None
        name.root.namespace.num_nodes -= 1
        self._free_numbers.append(name.number)


def equal_rows(held: NDArray[np.unsignedinteger], given: NDArray[np.unsignedinteger]) -> int:
    """How many rows are equal before the first that is not."""
    if np.array_equal(held, given):
        return len(held)
    first = int((held != given).ravel().argmax())
    return first // int(given.shape[1])
