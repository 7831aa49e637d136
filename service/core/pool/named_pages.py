"""Named pages: their keys and token ids, and the state of every named node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from service.core.keys import KEY_BYTES, WORDS, Extra, Keys, Prefix, TokenIds, as_keys
from service.core.nodes import (
    CACHED,
    OUT,
    PINNED,
    REFERENCED,
    Int32,
    Name,
    Node,
    Retention,
    Root,
    compact,
    named,
)
from service.core.page_table import NO_PAGES
from service.core.pool.retention import RetentionTimers
from service.core.pool.satellites import Satellites, Window, before_reach

POOL: Final = "GPU"
"""The medium of the pool, on the CPU too."""
WINDOW: Final = "kv_cache_spec_sliding_window"
"""The field of events that only those of layer groups with a window have."""


@dataclass(slots=True, eq=False)
class Stored:
    """Pages were stored: `keys` in the order of their prompt.

    `parent_key` is the key of the page before them (the root's, for a prompt's first pages).
    `token_ids` are uint32, None where unknown. `medium`: where they are, in vLLM's words. `extra`:
    key material beside the ids, by the page's index in `keys`. `group`: the layer group whose pages
    they are; None in a pool of one.
    """

    namespace: str
    keys: bytes
    parent_key: bytes
    token_ids: bytes | None
    medium: str = POOL
    extra: Extra | None = None
    group: int | None = None


@dataclass(slots=True, eq=False)
class Removed:
    """Pages of a layer `group` (None: of the only one) were evicted from `medium`."""

    namespace: str
    keys: bytes
    medium: str = POOL
    group: int | None = None


@dataclass(slots=True, eq=False)
class Cleared:
    """All pages of the namespace that nothing holds were evicted; `has_left`: some are held."""

    namespace: str
    has_left: bool = True


Change = Stored | Removed | Cleared
Listener = Callable[[Change], None]
"""Called during a change of the tree: it may keep the record and must not read the tree."""


class Watcher(Protocol):
    """Follows which pages have names, for copies of them elsewhere."""

    def named(self, node: Node, root: Root, keys: bytes) -> None:
        """A node's pages were committed, with their concatenated `keys`."""
        ...

    def unnamed(self, pages: Int32, name: Name) -> None:
        """Pages lost their names and are about to be free."""
        ...


class NamedPages:
    """One row per page of the pool, valid while the page has a name; named `nodes` by number.

    `extra` is the key material of pages that have some beside their token ids, by page.
    `satellites` are the pages of other layer groups (None: there is one group). `retention` keeps
    their priorities, `num_pages` counts pages with names, `num_changes` increases
    whenever nodes or their holders change. `states` repeats each node's state by its number, for
    queries over all pages at once. `listener` and `watcher`, if set, receive stored and removed
    pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, satellites: Satellites | None = None
    ) -> None:
        self.satellites = satellites
        self.keys: Keys = np.zeros((num_pages, WORDS), dtype=np.uint64)
        self._key_bytes = self.keys.data.cast("B")
        self.token_ids: NDArray[np.uint32] = np.zeros((num_pages, page_size), dtype=np.uint32)
        self.extra: dict[int, bytes] = {}
        self.has_extra: NDArray[np.bool_] = np.zeros(num_pages, dtype=np.bool_)
        self.node_of: Int32 = np.full(num_pages, -1, dtype=np.int32)
        self.nodes: list[Node | None] = []
        self.states = bytearray()
        self.listener: Listener | None = None
        self.watcher: Watcher | None = None
        self.retention = RetentionTimers()
        self.num_pages = self.num_cached = self.num_pinned = self.num_changes = 0
        self.page_size = page_size
        self._free_numbers: list[int] = []

    # Names.

    def give_name(
        self,
        node: Node,
        root: Root,
        keys: bytes,
        ids: TokenIds | None,
        keep: Retention,
        extra: Extra | None = None,
    ) -> None:
        """Commit a node's pages, with their concatenated `keys`, `ids` uint32 [n * page_size], and
        the key material beside the ids, by the page's place in the prompt.

        All of the node's children must be held by sequences.
        """
        name = Name(root, self._number(node), ids is not None, keep, len(node.children))
        name.state = self.states[name.number] = REFERENCED
        name.used = self.retention.now
        node.name = name
        self._write(node.pages, name.number, keys, ids)
        if self.satellites is not None:
            self.count(node.pages, name, 1)
        own = None if extra is None else self._write_extra(node, extra)
        self.num_pages += node.pages.size
        root.namespace.num_nodes += 1
        self._kids_above(node, root)[keys[:KEY_BYTES]] = node
        self.retention.watch(node, name)
        if self.watcher is not None:
            self.watcher.named(node, root, keys)
        if self.listener is not None:
            before = root.key if node.parent is None else self.last_key(node.parent)
            token_ids = None if ids is None else ids.tobytes()
            group = None if self.satellites is None else self.satellites.leading
            self.listener(
                Stored(root.namespace.name, keys, before, token_ids, extra=own, group=group)
            )
            for change in self.stored_bundles(root, node.pages, before):
                self.listener(change)

    def _write(self, pages: Int32, number: int, keys: bytes, ids: TokenIds | None) -> None:
        if pages.size > 1:
            self.keys[pages] = as_keys(keys)
            self.node_of[pages] = number
            if ids is not None:
                self.token_ids[pages] = ids.reshape(-1, self.page_size)
            return
        # One page by its number is faster: a commit while decoding has no more.
        page = pages.item()
        self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES] = keys
        self.node_of[page] = number
        if ids is not None:
            self.token_ids[page] = ids

    def _write_extra(self, node: Node, extra: Extra) -> Extra | None:
        """Keep the key material of a node's pages; returns it by the page's index in the node."""
        own = {
            at: extra[node.start + at] for at in range(node.pages.size) if node.start + at in extra
        }
        for at, material in own.items():
            self.extra[node.pages.item(at)] = material
            self.has_extra[node.pages.item(at)] = True
        return own or None

    def split(self, upper: Node, lower: Node, name: Name) -> None:
        """Name `upper`, which has taken the front of `lower`, with the same holders; count both."""
        upper.name = Name(name.root, self._number(upper), name.with_ids, name.keep)
        name.root.namespace.num_nodes += 1
        upper.name.kids = {self.first_key(lower): lower}
        upper.name.refs, upper.name.pins = int(name.refs > 0), int(name.pins > 0)
        upper.name.state, upper.name.stamp, upper.name.used = name.state, name.stamp, name.used
        self.states[upper.name.number] = name.state
        upper.name.place = OUT
        self.node_of[upper.pages] = upper.name.number
        self._kids_above(upper, name.root)[self.first_key(upper)] = upper
        self.retention.watch(upper, upper.name)
        self.count(upper.pages, upper.name, 1)
        self.count(lower.pages, name, 1)
        if name.state == CACHED:
            name.root.namespace.order.rank_again(upper, upper.name, self.retention.rank(upper.name))

    def absorb(self, parent: Node, child: Node) -> None:
        """Transfer the names of `parent`'s pages to `child`, which is about to replace it, and is
        counted then."""
        above, name = named(parent), named(child)
        self.count(parent.pages, above, -1)
        self.count(child.pages, name, -1)
        self.node_of[parent.pages] = name.number
        self._kids_above(parent, above.root)[self.first_key(parent)] = child
        self._forget(above)

    def shorten(self, node: Node, count: int) -> Int32:
        """Remove and return a cached node's last `count` pages, which lose their names."""
        name = named(node)
        keep = node.pages.size - count
        removed = node.pages[keep:]
        self.count(removed, name, -1)  # without a middle: what could go before is gone
        self.node_of[removed] = -1
        self.num_pages -= count
        if self.extra:
            for page in removed[self.has_extra[removed]].tolist():
                del self.extra[page]
            self.has_extra[removed] = False
        if self.watcher is not None:
            self.watcher.unnamed(removed, name)
        if self.listener is not None:
            keys = self.key_of(removed.item()) if count == 1 else self.keys[removed].tobytes()
            group = None if self.satellites is None else self.satellites.leading
            self.listener(Removed(name.root.namespace.name, keys, group=group))
            for window in () if self.satellites is None else self.satellites.windows:
                held = removed[self.satellites.has(window, removed)] if self.satellites else removed
                self._report_removed(name, window, held)
        if keep == 0:
            name.root.namespace.order.take_out(node, name)
            del self._kids_above(node, name.root)[self.first_key(node)]
            self._forget(name)
        else:
            node.pages = compact(node.pages[:keep])
        return removed

    def take_middle(self, name: Name, most: int) -> Int32:
        """Remove and return about `most` pages of groups with a window from a node's middle."""
        node, satellites, taken = self.nodes[name.number], self.satellites, [NO_PAGES]
        if node is None or satellites is None:
            return NO_PAGES
        self.count(node.pages, name, -1)
        for window in satellites.windows:
            pages = before_reach(window, node.pages)
            pages = pages[satellites.has(window, pages)][: -(-max(0, most) // window.width)]
            self._report_removed(name, window, pages)
            taken.append(satellites.take_bundles(window, pages))
            most -= taken[-1].size
        self.count(node.pages, name, 1)
        return np.concatenate(taken)

    def give_bundles(self, own: Int32, path: Int32) -> None:
        """Give the bundles of a sequence's `own` pages to the last pages of a named `path`, which
        will replace them, where these lack some."""
        if self.satellites is None or not own.size:
            return
        held = path[path.size - own.size :]
        nodes = [self.nodes[number] for number in set(self.node_of[held].tolist())]
        for node in filter(None, nodes):
            self.count(node.pages, named(node), -1)
        given = self.satellites.transfer(own, held)
        for node in filter(None, nodes):
            self.count(node.pages, named(node), 1)
        if self.listener is not None and (last := nodes[0]) is not None:
            root, before = named(last).root, held.size < path.size
            key = self.key_of(path.item(-held.size - 1)) if before else root.key
            for window, pages in given:
                has = np.isin(held, pages)
                for change in self._stored_runs(window, root, held, has, key):
                    self.listener(change)

    def stored_bundles(self, root: Root, pages: Int32, before: bytes) -> Iterator[Stored]:
        """The pages that groups with a window have of the leading `pages`, which have names and
        follow the page with the key `before`."""
        for window in () if self.satellites is None else self.satellites.windows:
            if self.satellites is not None:
                has = self.satellites.has(window, pages)
                yield from self._stored_runs(window, root, pages, has, before)

    def _stored_runs(
        self, window: Window, root: Root, pages: Int32, has: NDArray[np.bool_], before: bytes
    ) -> Iterator[Stored]:
        bounds = np.flatnonzero(np.diff(has, prepend=False, append=False))
        for begin, end in bounds.reshape(-1, 2).tolist():
            key = self.key_of(pages.item(begin - 1)) if begin else before
            keys = self.keys[pages[begin:end]].tobytes()
            yield Stored(root.namespace.name, keys, key, None, group=window.group)

    def _report_removed(self, name: Name, window: Window, pages: Int32) -> None:
        if self.listener is not None and pages.size:
            keys = self.keys[pages].tobytes()
            self.listener(Removed(name.root.namespace.name, keys, group=window.group))

    # Holders and states.

    def hold(self, node: Node | None) -> None:
        """Add a holder to a node, and so to all above it."""
        while node is not None:
            name = named(node)
            name.refs += 1
            if name.refs > 1:
                return
            self._settle(node, name)
            node = node.parent

    def unhold(self, node: Node) -> bool:
        """Remove a holder; returns True for the last one: then the parent has one fewer as well."""
        name = named(node)
        name.refs -= 1
        if name.refs:
            return False
        self._settle(node, name)
        return True

    def pin(self, node: Node | None, by: int) -> None:
        """Add (`by` 1) or remove (-1) a hard pin on a node, and so on all above it."""
        while node is not None:
            name = named(node)
            had = name.pins > 0
            name.pins += by
            if had == (name.pins > 0):
                return
            self._settle(node, name)
            node = node.parent

    def count_own(self, node: Node, by: int) -> None:
        """Count a lease or pin that is on the node itself (-1: not any more)."""
        named(node).own += by
        self.num_changes += 1

    def is_last_holder(self, parent: Node, child: Node) -> bool:
        """Whether `child`, just cached, was the only holder of `parent`, with equal retention."""
        above, name = named(parent), named(child)
        return (
            above.refs == 1
            and name.state == CACHED
            and above.own == above.pins == 0
            and self._is_like(parent, above, name)
        )

    def are_alike(self, parent: Node, child: Node) -> bool:
        """Whether `parent` and its only child are held alike, with equal retention."""
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
        """Update the state from the holders; a node that becomes cached counts as just used."""
        state = REFERENCED if name.refs else PINNED if name.pins else CACHED
        if state == name.state:
            return
        self.count(node.pages, name, -1)
        order = name.root.namespace.order
        if name.state == CACHED:
            order.take_out(node, name)
        name.state = self.states[name.number] = state
        name.used = self.retention.now
        self.count(node.pages, name, 1)
        if state == CACHED:
            order.use(node, name, self.retention.rank(name))

    def count(self, pages: Int32, name: Name, sign: int) -> None:
        """Count a node's `pages` in the name's state (`sign` -1: not any more). The middle of a
        node can be evicted in every state."""
        self.num_changes += 1
        namespace, size, middle = name.root.namespace, pages.size, 0
        if self.satellites is not None:
            size, middle = self.satellites.weight(pages), self.satellites.middle(pages)
            namespace.middles.pop(name, None)
            if middle and sign > 0:
                namespace.middles[name] = None
        cached = size if name.state == CACHED else middle
        namespace.cached += sign * cached
        self.num_cached += sign * cached
        if name.state == PINNED:
            namespace.pinned += sign * (size - middle)
            self.num_pinned += sign * (size - middle)

    # Lookup.

    def key_of(self, page: int) -> bytes:
        return self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES].tobytes()

    def first_key(self, node: Node) -> bytes:
        return self.key_of(node.pages.item(0))

    def last_key(self, node: Node) -> bytes:
        return self.key_of(node.pages.item(-1))

    def num_same(self, pages: Int32, prefix: Prefix, first: int) -> int:
        """Leading `pages` that equal the prefix's pages from page `first` on.

        None of those may be skipped. If the prefix has token ids, the pages' ids must be known, and
        the key material beside them must be equal too.
        """
        last = first + pages.size
        keys = prefix.keys_of(first, last)
        if keys is not None:
            return equal_rows(self.keys[pages], keys)
        ids = prefix.ids_of(first, last, self.page_size)
        if ids is None:
            return 0
        same = equal_rows(self.token_ids[pages], ids.reshape(-1, self.page_size))
        if not self.extra and prefix.extra is None:
            return same
        marked = np.flatnonzero(self.has_extra[pages[:same]]).tolist()
        if prefix.extra is not None:
            marked = sorted({*marked, *(at for at in range(same) if first + at in prefix.extra)})
        for at in marked:
            if self.extra.get(pages.item(at), b"") != prefix.extra_at(first + at):
                return int(at)
        return same

    def find(self, root: Root, key: bytes) -> tuple[Node, int] | None:
        """The node that has the page of `key`, and the page's index in it; scans every page."""
        first, last = np.frombuffer(key, dtype=np.uint64)
        pages = np.flatnonzero(self.keys[:, 0] == first)
        same = (self.keys[pages, 1] == last) & (self.node_of[pages] >= 0)
        for page in pages[same].tolist():
            node = self.nodes[self.node_of.item(page)]
            if node is not None and named(node).root is root:
                return node, int(np.flatnonzero(node.pages == page)[0])
        return None

    @property
    def num_nodes(self) -> int:
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
            self.retention.ends.cancel(node)
        self.nodes[name.number] = None
        name.root.namespace.num_nodes -= 1
        self._free_numbers.append(name.number)


def equal_rows(held: NDArray[np.unsignedinteger], given: NDArray[np.unsignedinteger]) -> int:
    """Number of leading equal rows."""
    if np.array_equal(held, given):
        return len(held)
    first = int((held != given).ravel().argmax())
    return first // int(given.shape[1])
