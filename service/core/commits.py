"""Committing: a sequence's full pages get names, or it moves onto those that have them already."""

from __future__ import annotations

from typing import Final

from service.core.budget import Budget
from service.core.errors import InvalidRequest, KeyMismatch
from service.core.keys import Prefix
from service.core.matching import Match, named_path, walk
from service.core.namespaces import Namespace, Root
from service.core.nodes import Leaf, Links, Node, Retention, named
from service.core.sequences import SequenceBooks

DEFAULT: Final = Retention()
"""What is kept like everything else."""


class Commits:
    """Shares the tree's books, links and pages."""

    __slots__ = ("_books", "_budget", "_links", "_named")

    def __init__(self, books: SequenceBooks, links: Links, budget: Budget) -> None:
        self._books = books
        self._budget = budget
        self._links = links
        self._named = links.named

    def commit(self, name: str, prefix: Prefix, keep: Retention = DEFAULT) -> int:
        """Name a sequence's full pages as far as `prefix` does; how many are named now.

        Where pages of those names are cached, the sequence moves onto them and its own go free:
        not those that it shares with forks, which then stay without names.

        Raises `UnknownSequence`, `InvalidRequest` beyond the sequence's length, `KeyMismatch` where
        a page has another name already.
        """
        leaf = self._books.leaf(name)
        stop = self._num_named(leaf, prefix)
        if stop == 0:
            return 0
        path = named_path(leaf.parent)
        done = path[-1].end if path else 0
        root = self._agreed_root(leaf.owner, path, prefix, min(stop, done))
        if stop > done:
            self._commit_rest(leaf, root, path[-1] if path else None, prefix, stop, keep)
        if keep is not DEFAULT:
            self._keep(leaf, stop, keep)
        return min(stop, named_end(leaf.parent))

    def _num_named(self, leaf: Leaf, prefix: Prefix) -> int:
        """Full pages that the prefix names, all of which the sequence must have."""
        size, length = self._named.page_size, self._books.length(leaf)
        count = prefix.num_pages(size)
        if prefix.token_ids is not None and prefix.token_ids.size > length:
            rule = f"at most {length}, the tokens that the sequence has at every layer"
            raise InvalidRequest("token_ids", f"{prefix.token_ids.size} ids", rule)
        if count > length // size:
            rule = f"at most {length // size}, the full pages that the sequence has at every layer"
            raise InvalidRequest("page_keys", f"{count} keys", rule)
        return count

    def _agreed_root(self, owner: Namespace, path: list[Node], prefix: Prefix, stop: int) -> Root:
        """The root of the prefix, which must be that of the named `path`, as its pages up to `stop`
        must have the names that the prefix gives."""
        if not path:
            return owner.root(prefix.cache_salt)
        root = named(path[0]).root
        if root.cache_salt != prefix.cache_salt:
            raise KeyMismatch(0, "it is committed with another cache_salt")
        for node in path:
            count = min(stop, node.end) - node.start
            if count <= 0:
                break
            same = 0
            if prefix.token_ids is None or named(node).with_ids:
                same = self._named.num_same(node.pages[:count], prefix, node.start)
            if same < count:
                raise KeyMismatch(node.start + same, "it is committed under another name")
        return root

    def _commit_rest(
        self,
        leaf: Leaf,
        root: Root,
        above: Node | None,
        prefix: Prefix,
        stop: int,
        keep: Retention,
    ) -> None:
        """Name the pages between `above`, which is the last that has a name, and `stop`."""
        begin = 0 if above is None else above.end
        found = walk(self._named, root, above, prefix, stop)
        self._refuse_taken(root, found, prefix, stop)
        if found.num_pages > begin:
            if leaf.start > begin:
                return  # forks hold these pages too, and would lose their places below them
            self._move(leaf, found)
        if leaf.start > begin:
            for node in unnamed_path(self._links, leaf, stop):
                self._name(node, root, prefix, keep)
        if leaf.start < stop:
            own = leaf.table[leaf.start : stop].copy()
            self._name(self._links.split_off(leaf, own), root, prefix, keep)

    def _refuse_taken(self, root: Root, found: Match, prefix: Prefix, stop: int) -> None:
        """Raises `KeyMismatch` where the next key stands for a page of other or unknown ids."""
        node, at = found.node, found.num_pages
        if at == stop or found.is_free:
            return
        key = root.key
        if node is not None:
            key = self._named.keys[node.pages[at - node.start - 1]].tobytes()
        key = prefix.key_at(at, key, self._named.page_size)
        taken = key in ((root.kids if node is None else named(node).kids) or ())
        if node is not None and at < node.end:
            taken = self._named.keys[node.pages[at - node.start]].tobytes() == key
        if taken:
            raise KeyMismatch(at, "its key is cached with other token ids, or with none")

    def _move(self, leaf: Leaf, found: Match) -> None:
        """Put a leaf onto cached pages; its own for the same tokens go free."""
        start, old = leaf.start, leaf.parent
        own = leaf.table[start : found.num_pages].copy()
        node = found.cut(self._links)
        leaf.table[start : found.num_pages] = found.table()[start:]
        self._links.attach(leaf, node)
        self._links.detach(leaf, old)
        self._budget.give_back(leaf.owner, own)
        self._books.set_num_pages(leaf, int(self._books.num_pages[leaf.index]))
        self._books.renew(leaf)

    def _name(self, node: Node, root: Root, prefix: Prefix, keep: Retention) -> None:
        names, size = self._named, self._named.page_size
        before = names.key_before(node, root)
        keys = prefix.keys(node.start, node.end, before, size)
        ids = prefix.token_ids
        if ids is not None:
            ids = ids[node.start * size : node.end * size]
        names.give_name(node, root, keys, ids, keep)
        self._links.grow_together(node)

    def _keep(self, leaf: Leaf, stop: int, keep: Retention) -> None:
        """Keep the first `stop` pages of a leaf's path at least like this."""
        node = leaf.parent
        while node is not None and node.start >= stop:
            node = node.parent
        if node is not None and node.name is not None and node.end > stop:
            node = self._links.split(node, stop)
        keep_path(self._links, node, keep)


def keep_path(links: Links, node: Node | None, keep: Retention) -> None:
    """Keep a named node and all above it at least like this."""
    path = named_path(node)
    for node in path:
        links.named.keeping.keep(node, keep)
    for node in path[1:]:
        links.grow_together(node)


def named_end(node: Node | None) -> int:
    """Pages of the path up to `node` that have names."""
    while node is not None and node.name is None:
        node = node.parent
    return 0 if node is None else node.end


def unnamed_path(links: Links, leaf: Leaf, stop: int) -> list[Node]:
    """The nodes without a name above `leaf`, from the root down, the last one cut at `stop`."""
    if stop < leaf.start:
        links.node_ending_at(leaf, stop)
    path = []
    node = leaf.parent
    while node is not None and node.name is None:
        if node.end <= stop:
            path.append(node)
        node = node.parent
    return path[::-1]
