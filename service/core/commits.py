"""Committing: a sequence's full pages get names, or it moves onto those that have them already."""

from __future__ import annotations

from typing import Final

from service.core.budget import Budget
from service.core.errors import InvalidRequest, KeyMismatch
from service.core.keys import KEY_BYTES, Prefix
from service.core.matching import Match, named_path, walk
from service.core.namespaces import Root
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
        above = path[-1] if path else None
        done = 0 if above is None else above.end
        if above is None:
            root = leaf.owner.root(prefix.cache_salt)
        else:
            root = self._agreed_root(path, prefix, min(stop, done))
        if stop > done and not self._commit_rest(leaf, root, above, prefix, stop, keep):
            stop = done
        if keep is not DEFAULT:
            self._keep(leaf, stop, keep)
        return stop

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

    def _agreed_root(self, path: list[Node], prefix: Prefix, stop: int) -> Root:
        """The root of the named `path`, which must be that of the prefix, as its pages up to `stop`
        must have the names that the prefix gives."""
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
    ) -> bool:
        """Name the pages between `above`, which is the last that has a name, and `stop`; False
        where that cannot be."""
        begin = 0 if above is None else above.end
        found = walk(self._named, root, above, prefix, stop)
        first = found.num_pages
        key = b"" if first == stop else found.next_key or self._free_key(root, found, prefix)
        if first > begin:
            if leaf.start > begin:
                return False  # forks hold these too, and would lose their places below them
            self._move(leaf, found)
        if first == stop:
            return True
        nodes = unnamed_path(self._links, leaf, stop) if leaf.start > first else []
        if leaf.start < stop:
            nodes.append(self._links.split_off(leaf, leaf.table[leaf.start : stop].copy()))
        ids, size = prefix.token_ids, self._named.page_size
        keys = prefix.keys_from(first, key, stop, size)
        for node in nodes:
            start = node.start
            end = start + node.pages.size
            own = keys[(start - first) * KEY_BYTES : (end - first) * KEY_BYTES]
            its_ids = None if ids is None else ids[start * size : end * size]
            self._named.give_name(node, root, own, its_ids, keep)
            self._links.grow_together(node)
        return True

    def _free_key(self, root: Root, found: Match, prefix: Prefix) -> bytes:
        """The key of the first page that is not found. Raises `KeyMismatch` where it stands for a
        page of other or unknown ids."""
        names, node, at = self._named, found.node, found.num_pages
        key = root.key
        if node is not None:
            key = names.key_of(node.pages.item(at - node.start - 1))
        key = prefix.key_at(at, key, names.page_size)
        taken = key in ((root.kids if node is None else named(node).kids) or ())
        if node is not None and at < node.end:
            taken = names.key_of(node.pages.item(at - node.start)) == key
        if taken:
            raise KeyMismatch(at, "its key is cached with other token ids, or with none")
        return key

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
