"""Checks the invariants of the core, from the leaves up; messages carry the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from service.core.errors import IntegrityError
from service.core.nodes import (
    CACHED,
    FOREVER,
    OUT,
    PINNED,
    REFERENCED,
    Int32,
    Leaf,
    Name,
    Namespace,
    Node,
    named,
)
from service.core.pool.allocator import PageAllocator
from service.core.pool.budget import Budget
from service.core.pool.links import Links
from service.core.pool.named_pages import NamedPages
from service.core.pool.satellites import Satellites
from service.core.sequences.books import SequenceBooks


class Sums:
    """Counts of nodes, of the holders of each page, and of each namespace's pages.

    `collect` may be interrupted; its sums are invalid once `is_stale`.
    """

    def __init__(self, books: SequenceBooks, links: Links, budget: Budget) -> None:
        self._books, self._links, self._budget = books, links, budget
        self._satellites = links.named.satellites
        self._unnamed: set[Node] = set()
        self._holders: Int32 = np.zeros(budget.allocator.num_pages, np.int32)
        self._used, self._cached, self._pinned = Counter[str](), Counter[str](), Counter[str]()
        self._reserved = Counter[str]()
        self._on_node: Counter[Node] = Counter()
        self._wrong_own = ""
        """A node's wrong count of leases and pins."""
        self._num_changes = self._count_changes()

    @property
    def is_stale(self) -> bool:
        """Whether something has changed since the sums were started."""
        return self._count_changes() != self._num_changes

    def _count_changes(self) -> tuple[int, int, int]:
        named, allocator = self._links.named, self._budget.allocator
        return named.num_changes, allocator.num_changes, self._books.num_changes

    def collect(self) -> Iterator[None]:
        """Sum up, one sequence or node per step."""
        for leaf in list(self._books):
            owner, count = leaf.owner.name, int(self._books.num_pages[leaf.index])
            self._hold(owner, leaf.table.read(leaf.start, count))
            self._hold(owner, leaf.reserve)
            self._reserved[owner] += self._weight(leaf.reserve)
            node = leaf.parent
            while node is not None and node.name is None and node not in self._unnamed:
                self._unnamed.add(node)
                self._hold(owner, node.pages)
                node = node.parent
                yield
            yield
        for page, namespace in list(self._budget.unattached.items()):
            self._hold(namespace.name, np.array([page], np.int32))
        for one in list(self._budget.namespaces.values()):
            self._on_node.update(lease.node for lease in one.leases.values())
            self._on_node.update(one.pins.values())
            yield
        for node in list(self._links.named.nodes):
            if node is not None:
                name = named(node)
                owner, size = name.root.namespace.name, self._weight(node.pages)
                self._hold(owner, node.pages)
                middle = 0 if self._satellites is None else self._satellites.middle(node.pages)
                self._cached[owner] += size if name.state == CACHED else middle
                self._pinned[owner] += size - middle if name.state == PINNED else 0
                if (middle > 0) != (name in name.root.namespace.middles):
                    self._wrong_own = (
                        f"the named node of pages {node.start} to {node.end} of its path has "
                        f"{middle} pages in its middle, unlike its namespace's list"
                    )
                if name.own != self._on_node[node]:
                    self._wrong_own = (
                        f"the named node of pages {node.start} to {node.end} of its path has "
                        f"{name.own} leases and pins, {self._on_node[node]} are on it"
                    )
            yield

    def _hold(self, owner: str, pages: Int32) -> None:
        """Count a holder of distinct pages with their satellites, and the pages for a namespace."""
        if self._satellites is not None:
            pages = self._satellites.with_satellites(pages)
        self._used[owner] += pages.size
        self._holders[pages] += 1

    def _weight(self, pages: Int32) -> int:
        return pages.size if self._satellites is None else self._satellites.weight(pages)

    def check_nodes(self) -> None:
        """Raises `IntegrityError` for wrong counts of nodes or serials."""
        books, links = self._books, self._links
        count = len(self._unnamed) + links.named.num_nodes
        if count != links.count:
            raise IntegrityError(f"the links count {links.count} nodes, there are {count}")
        serials = books.serials[[leaf.index for leaf in books]]
        # np.unique imports a module at its first call, for which no descriptor may be free
        if (distinct := len(set(serials.tolist()))) != len(books):
            raise IntegrityError(f"{len(books)} sequences have {distinct} serials")

    def check_pages(self) -> None:
        """Raises `IntegrityError` for wrong counts of pages, leases or namespaces."""
        pages, budget = self._links.named, self._budget
        check_holders(self._holders, budget.allocator)
        if (satellites := self._satellites) is not None:
            is_free = ~budget.allocator.held()
            if (stray := np.flatnonzero((satellites.of[is_free] >= 0).any(axis=1))).size:
                raise IntegrityError(f"{stray.size} free pages have satellites")
        if self._wrong_own:
            raise IntegrityError(self._wrong_own)
        for one in budget.namespaces.values():
            sums = (self._cached, self._pinned, self._reserved)
            found = (self._used.pop(one.name, 0), *(counts[one.name] for counts in sums))
            if found != (books := (one.used, one.cached, one.pinned, one.reserved)):
                raise IntegrityError(
                    f"namespace {one.name} has {found} pages used, cached, pinned and reserved, "
                    f"its books say {books}"
                )
        counted = self._cached.total(), self._pinned.total(), self._reserved.total()
        if counted != (known := (pages.num_cached, pages.num_pinned, budget.num_reserved)):
            text = f"{counted} pages are cached, pinned and reserved, the books say {known}"
            raise IntegrityError(text)
        if any(self._used.values()):
            raise IntegrityError(f"pages of unknown namespaces: {dict(self._used)}")
        if int(np.count_nonzero(pages.node_of >= 0)) != pages.num_pages:
            raise IntegrityError(f"{pages.num_pages} pages have names, by their books")
        extra = np.flatnonzero(pages.has_extra)
        if set(extra.tolist()) != pages.extra.keys() or (pages.node_of[extra] < 0).any():
            raise IntegrityError(f"{len(pages.extra)} pages have key material beside their ids")


def check_holders(holders: Int32, allocator: PageAllocator) -> None:
    """Every page is free or has exactly one holder, and the allocator knows which."""
    total, held = allocator.num_pages, allocator.held()
    if (wrong := np.flatnonzero(holders != held)).size:
        page = int(wrong[0])
        raise IntegrityError(
            f"page {page} has {holders[page]} holders and refcount {int(held[page])}"
            f" ({wrong.size} such pages)"
        )
    is_free = np.zeros(total, dtype=bool)
    is_free[allocator.free_pages] = True
    free, used = int(is_free.sum()), int(held.sum())
    if free != allocator.num_free or free + used != total or held[is_free].any():
        raise IntegrityError(
            f"{allocator.num_free} pages free ({free} distinct) + {used} referenced"
            f" != {total} in total"
        )


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
                check_bundles(node.pages, names.satellites)
                todo.append(node.parent)
            yield
        if books.holds(leaf):
            check_leaf(leaf, books, names.page_size)
            if names.satellites is not None:
                check_leaf_bundles(leaf, books, names.satellites)
        yield


def check_leaf_bundles(leaf: Leaf, books: SequenceBooks, satellites: Satellites) -> None:
    """A sequence has all satellites that its rows need, and its reserve has all."""
    lengths, size = books.lengths[:, leaf.index], satellites.page_size
    num_pages = int(books.num_pages[leaf.index])
    check_bundles(leaf.table.read(leaf.start, num_pages), satellites)
    if satellites.num_torn(leaf.reserve):
        raise IntegrityError(f"{leaf.id} reserves pages without satellites")
    for window in satellites.windows:
        first = max(0, int(lengths.min()) - window.tokens + 1) // size
        if not satellites.has(window, leaf.table.read(first, num_pages)).all():
            rule = f"lacks pages of group {window.group} that its window of {window.tokens} needs"
            raise IntegrityError(f"{leaf.id} with lengths {lengths.tolist()} {rule}")


def check_bundles(pages: Int32, satellites: Satellites | None) -> None:
    """Each leading page has whole bundles, in groups without a window all of them."""
    if satellites is None:
        return
    for shape, columns in zip(satellites.shapes, satellites.columns, strict=True):
        held = satellites.of[pages, columns] >= 0
        wanted = held.any(axis=1) if shape.window is not None else True
        if (held.all(axis=1) != wanted).any():
            raise IntegrityError(f"leading pages lack a part of their bundles in {shape}")


def is_linked(node: Node, names: NamedPages) -> bool:
    """Whether a node is part of the tree: a merged node's children have another parent."""
    if node.name is not None:
        return names.nodes[node.name.number] is node
    return not node.children or any(child.parent is node for child in node.children)


def check_node(node: Node) -> None:
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
    lengths = books.lengths[:, leaf.index]
    pages = int(books.num_pages[leaf.index])
    where = f"{leaf.id} with {pages} pages of {page_size}"
    if pages != -(-int(lengths.max()) // page_size):
        raise IntegrityError(f"{where} has lengths {lengths.tolist()}")
    if leaf.reserve.size > max(0, -(-leaf.reserved_len // page_size) - pages):
        raise IntegrityError(f"{where} reserves {leaf.reserve.size} for {leaf.reserved_len} tokens")
    if leaf.chain is not None and leaf.chain.known > lengths.max():
        raise IntegrityError(f"{where} knows {leaf.chain.known} ids of {lengths.tolist()} tokens")
    above = 0 if leaf.parent is None else leaf.parent.end
    if leaf.start != above or leaf.start * page_size > lengths.min():
        raise IntegrityError(
            f"{where} and lengths {lengths.tolist()} owns them from {leaf.start}, shares {above}"
        )
    if leaf.parent is not None and leaf not in leaf.parent.children:
        raise IntegrityError(f"{where} is not among its parent's children")
    used, ttl_s = float(books.used[leaf.index]), float(books.ttl_s[leaf.index])
    latest, due = max(used + ttl_s, math.nextafter(used, math.inf)), books.expiry.due(leaf)
    if due > latest or (ttl_s == FOREVER and due < FOREVER):
        raise IntegrityError(f"{where} is looked at at {due}, its life ends at {latest}")
    last = int(books.last_page[leaf.index])
    if pages and (found := leaf.table.page(pages - 1)) != last:
        raise IntegrityError(f"{where} ends in page {found}, the books say {last}")
    node = leaf.parent
    if node is not None and not np.array_equal(leaf.table.read(node.start, node.end), node.pages):
        raise IntegrityError(f"{where} differs from its parent after page {node.start}")


def check_named(node: Node, books: NamedPages) -> None:
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
    kept, due = books.retention, books.retention.ends.due(node)
    ends = [one for one in (name.keep.priority_ends, name.keep.soft_ends) if one > kept.now]
    if due > min(ends, default=FOREVER):
        raise IntegrityError(f"{where} is kept until {min(ends)}, and looked at at {due}")
    if state == CACHED and due > kept.now and name.rank != (rank := kept.rank(name)):
        raise IntegrityError(f"{where} has rank {name.rank} among those to evict, not {rank}")


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


LEAVES_AT_ONCE: Final = 64


class Sharing(NamedTuple):
    """Unnamed nodes that sequences share, and tokens seen / tokens stored (1: nothing shared)."""

    num_unnamed: int = 0
    ratio: float = 1.0


def sharing_steps(
    books: SequenceBooks, leaves: Sequence[Leaf], page_size: int
) -> Generator[None, None, Sharing]:
    """Count the sequences, each by its minimum kv_len, and every node above them.

    A change between two steps may or may not be counted.
    """
    seen = shared = num_unnamed = 0
    nodes: set[Node] = set()
    for begin in range(0, len(leaves), LEAVES_AT_ONCE):
        some = [leaf for leaf in leaves[begin : begin + LEAVES_AT_ONCE] if books.holds(leaf)]
        columns = np.array([leaf.index for leaf in some], np.intp)
        seen += int(books.lengths[:, columns].min(axis=0).sum(dtype=np.int64))
        shared += sum(leaf.start for leaf in some)
        for leaf in some:
            node = leaf.parent
            while node is not None and node not in nodes:
                nodes.add(node)
                num_unnamed += node.name is None
                shared -= node.pages.size
                node = node.parent
                yield
        yield
    stored = seen - shared * page_size
    return Sharing(num_unnamed, seen / stored if stored > 0 else 1.0)
