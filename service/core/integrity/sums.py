"""Sums over all sequences and nodes, which hold at one moment only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from service.core.errors import IntegrityError
from service.core.pool.allocator import PageAllocator
from service.core.pool.budget import Budget
from service.core.prefix.nodes import CACHED, PINNED, Int32, Links, Node, named
from service.core.sequences.books import SequenceBooks


class Sums:
    """Counts of nodes, of the holders of each page, and of each namespace's pages.

    `collect` may be interrupted; its sums are invalid once `is_stale`.
    """

    def __init__(self, books: SequenceBooks, links: Links, budget: Budget) -> None:
        self._books, self._links, self._budget = books, links, budget
        self._unnamed: set[Node] = set()
        self._holders: Int32 = np.zeros(budget.allocator.num_pages, np.int32)
        self._used, self._cached, self._pinned = Counter[str](), Counter[str](), Counter[str]()
        self._on_node: Counter[Node] = Counter()
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
            self._hold(owner, leaf.table[leaf.start : count])
            node = leaf.parent
            while node is not None and node.name is None and node not in self._unnamed:
                self._unnamed.add(node)
                self._hold(owner, node.pages)
                node = node.parent
                yield
            yield
        for one in list(self._budget.namespaces.values()):
            for node in one.held_nodes:
                self._on_node[node] += 1
            yield
        for node in list(self._links.named.nodes):
            if node is not None:
                name = named(node)
                owner, size = name.root.namespace.name, node.pages.size
                self._hold(owner, node.pages)
                self._cached[owner] += size if name.state == CACHED else 0
                self._pinned[owner] += size if name.state == PINNED else 0
            yield

    def _hold(self, owner: str, pages: Int32) -> None:
        """Count a holder of distinct pages, and the pages for a namespace."""
        self._used[owner] += pages.size
        self._holders[pages] += 1

    def check_nodes(self) -> None:
        """Raises `IntegrityError` for wrong counts of nodes or serials."""
        books, links = self._books, self._links
        count = len(self._unnamed) + links.named.num_nodes
        if count != links.count:
            raise IntegrityError(f"the links count {links.count} nodes, there are {count}")
        serials = books.serials[[leaf.index for leaf in books]]
        if (distinct := np.unique(serials).size) != len(books):
            raise IntegrityError(f"{len(books)} sequences have {distinct} serials")

    def check_pages(self) -> None:
        """Raises `IntegrityError` for wrong counts of pages, leases or namespaces."""
        pages, budget = self._links.named, self._budget
        check_holders(self._holders, budget.allocator)
        for node in pages.nodes:
            if node is not None and named(node).own != self._on_node[node]:
                raise IntegrityError(
                    f"the named node of pages {node.start} to {node.end} of its path has "
                    f"{named(node).own} leases and pins, {self._on_node[node]} are on it"
                )
        for one in budget.namespaces.values():
            found = (self._used.pop(one.name, 0), self._cached[one.name], self._pinned[one.name])
            if found != (one.used, one.cached, one.pinned):
                raise IntegrityError(
                    f"namespace {one.name} has {found} pages used, cached and pinned, its books "
                    f"say {(one.used, one.cached, one.pinned)}"
                )
        if self._cached.total() != pages.num_cached:
            raise IntegrityError(f"{pages.num_cached} pages are cached, by their books")
        if any(self._used.values()):
            raise IntegrityError(f"pages of unknown namespaces: {dict(self._used)}")
        if int(np.count_nonzero(pages.node_of >= 0)) != pages.num_pages:
            raise IntegrityError(f"{pages.num_pages} pages have names, by their books")


def check_holders(holders: Int32, allocator: PageAllocator) -> None:
    """Every page is free or has exactly one holder, and the allocator knows which."""
    total, refcounts = allocator.num_pages, allocator.refcounts
    if (wrong := np.flatnonzero(holders != refcounts)).size:
        page = int(wrong[0])
        raise IntegrityError(
            f"page {page} has {holders[page]} holders and refcount {refcounts[page]}"
            f" ({wrong.size} such pages)"
        )
    if (twice := np.flatnonzero(holders > 1)).size:
        raise IntegrityError(f"page {twice[0]} can be written by {holders[twice[0]]} leaves")
    is_free = np.zeros(total, dtype=bool)
    is_free[allocator.free_pages] = True
    free, used = int(is_free.sum()), int((refcounts > 0).sum())
    if free != allocator.num_free or free + used != total or refcounts[is_free].any():
        raise IntegrityError(
            f"{allocator.num_free} pages free ({free} distinct) + {used} referenced"
            f" != {total} in total"
        )
