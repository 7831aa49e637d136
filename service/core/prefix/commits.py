"""Commits: name a sequence's full pages, or move it onto cached pages of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from service.core.errors import InvalidRequest, KeyMismatch
from service.core.keys import KEY_BYTES, Prefix
from service.core.nodes import Leaf, Node, Retention, Root, check_depth, named
from service.core.page_table import PageTable
from service.core.pool.budget import Budget
from service.core.pool.links import Links
from service.core.pool.named_pages import equal_rows
from service.core.prefix.matching import MOST_MATCHED, Match, named_path, walk
from service.core.sequences.books import SequenceBooks

BATCHED: Final = {"offset": "offsets"}
"""Fields with another name in a call for many sequences."""
DEFAULT: Final = Retention()
"""The retention of pages committed without one."""


class Commits:
    """Commits sequences of a tree, whose books, links and pages it shares."""

    def __init__(self, books: SequenceBooks, links: Links, budget: Budget) -> None:
        self._books = books
        self._budget = budget
        self._links = links
        self._named = links.named

    def commit(self, name: str, prefix: Prefix, keep: Retention = DEFAULT) -> int:
        """Name a sequence's full pages as `prefix` does; returns the number of named pages.

        If pages of those names are cached, the sequence moves onto them and its own become free;
        pages that it shares with forks stay, without names.

        Raises `UnknownSequence`; `InvalidRequest` beyond the sequence's length, and if skipped
        pages are not committed; `KeyMismatch` if a page has another name already.
        """
        leaf = self._books.leaf(name)
        return self._commit(leaf, prefix, self._num_named(leaf, prefix), keep)

    def commit_all(
        self, names: Sequence[str], prefixes: Sequence[Prefix], keep: Retention = DEFAULT
    ) -> list[int]:
        """`commit` for many sequences; all or none.

        Raises `InvalidRequest` also if their pages are in too many nodes for one turn.
        """
        leaves = self._books.leaves(self._books.look_up_distinct(names).indices)
        check_depth(leaves)
        claims: dict[Node, Prefix] = {}
        plans = []
        for leaf, prefix in zip(leaves, prefixes, strict=True):
            try:
                stop = self._num_named(leaf, prefix)
                self._check(leaf, prefix, stop)
                self._claim(leaf, prefix, stop, claims)
            except KeyMismatch as error:
                raise KeyMismatch(error.args[0], error.args[1], leaf.id) from None
            except InvalidRequest as error:
                field = BATCHED.get(error.field, error.field)
                raise InvalidRequest(field, [leaf.id, error.value], error.rule) from None
            plans.append((leaf, prefix, stop))
        more = 2 * len(plans)  # a commit may split one node of a path, and add one
        return [self._commit(leaf, prefix, stop, keep, more) for leaf, prefix, stop in plans]

    def name_own(self, leaf: Leaf, prefix: Prefix, stop: int) -> bool:
        """Name a sequence's pages behind the skipped ones, all of which have names, up to page
        `stop`; its page table stays as it is. False where the first is cached, or its name
        contradicts."""
        above, names = None, self._named
        if prefix.skipped:
            above = names.nodes[names.node_of[leaf.table.page(prefix.skipped - 1)]]
        root = leaf.owner.root(prefix.cache_salt) if above is None else named(above).root
        if root.cache_salt != prefix.cache_salt:
            return False
        found = walk(names, root, above, prefix, stop)
        if found.num_pages > prefix.skipped:
            return False
        try:
            return self._commit_rest(leaf, root, found, prefix, prefix.skipped, stop, DEFAULT)
        except KeyMismatch:
            return False

    def _check(self, leaf: Leaf, prefix: Prefix, stop: int) -> None:
        """Raise the errors of `_commit` without changing anything."""
        path = self._named_path(leaf, prefix)
        above = path[-1] if path else None
        done = 0 if above is None else above.end
        if above is not None:
            root = self._agreed_root(path, prefix, min(stop, done))
        elif (known := leaf.owner.roots.get(prefix.cache_salt)) is not None:
            root = known
        else:
            return  # nothing is cached under the salt
        if stop > done:
            found = self._walk(root, above, prefix, stop)
            if found.num_pages < stop and found.next_key is None:
                self._free_key(root, found, prefix)

    def _claim(self, leaf: Leaf, prefix: Prefix, stop: int, claims: dict[Node, Prefix]) -> None:
        """Raise `KeyMismatch` if two sequences of a batch name a shared page differently."""
        size, node = self._named.page_size, leaf.parent
        last: Prefix | None = None
        while node is not None and node.name is None:
            other = prefix if node.start >= stop else claims.setdefault(node, prefix)
            if other is not prefix:
                end = min(node.end, stop)
                known = min(end, other.num_pages(size))
                if other is not last and known > prefix.skipped:
                    count = known - prefix.skipped
                    same = num_equal(prefix, other, prefix.skipped, known, size)
                    if same < count:
                        rule = "another sequence of the call gives it another name"
                        raise KeyMismatch(prefix.skipped + same, rule)
                last = other
                if known < end:
                    claims[node] = prefix
            node = node.parent

    def _named_path(self, leaf: Leaf, prefix: Prefix) -> list[Node]:
        """The named nodes of a sequence. Raises `InvalidRequest` if skipped pages have no name."""
        path = named_path(leaf.parent)
        done = path[-1].end if path else 0
        if prefix.skipped > done:
            size = self._named.page_size
            rule = f"at most {done * size}, the sequence's committed tokens"
            raise InvalidRequest("offset", prefix.skipped * size, rule)
        return path

    def _commit(self, leaf: Leaf, prefix: Prefix, stop: int, keep: Retention, more: int = 0) -> int:
        if stop == 0:
            return 0
        path = self._named_path(leaf, prefix)
        above = path[-1] if path else None
        done = 0 if above is None else above.end
        if above is None:
            root = leaf.owner.root(prefix.cache_salt)
        else:
            root = self._agreed_root(path, prefix, min(stop, done))
        if stop > done:
            found = self._walk(root, above, prefix, stop, more)
            if not self._commit_rest(leaf, root, found, prefix, done, stop, keep):
                stop = done
        if keep is not DEFAULT:
            self._keep(leaf, stop, keep)
        return stop

    def _num_named(self, leaf: Leaf, prefix: Prefix) -> int:
        """Full pages that the prefix names. Raises `InvalidRequest` if the sequence has fewer."""
        size, length = self._named.page_size, self._books.length(leaf)
        count = prefix.num_pages(size)
        if prefix.num_tokens(size) > length:
            rule = f"at most {length}, the tokens that the sequence has at every layer"
            raise InvalidRequest("token_ids", f"{prefix.num_tokens(size)} ids", rule)
        if count > length // size:
            rule = f"at most {length // size}, the full pages that the sequence has at every layer"
            raise InvalidRequest("page_keys", f"{count} keys", rule)
        return count

    def _agreed_root(self, path: list[Node], prefix: Prefix, stop: int) -> Root:
        """The root of the named `path`. Raises `KeyMismatch` unless it has the prefix's salt and
        its pages up to `stop` have the prefix's names."""
        root = named(path[0]).root
        if root.cache_salt != prefix.cache_salt:
            raise KeyMismatch(0, "it is committed with another cache_salt")
        for node in path:
            first, last = max(node.start, prefix.skipped), min(stop, node.end)
            if last <= first:
                continue
            same = 0
            if prefix.token_ids is None or named(node).with_ids:
                pages = node.pages[first - node.start : last - node.start]
                same = self._named.num_same(pages, prefix, first)
            if same < last - first:
                raise KeyMismatch(first + same, "it is committed under another name")
        return root

    def _commit_rest(
        self,
        leaf: Leaf,
        root: Root,
        found: Match,
        prefix: Prefix,
        begin: int,
        stop: int,
        keep: Retention,
    ) -> bool:
        """Name the pages `begin:stop`, which follow the named ones, and of which `found` are
        cached; returns False if forks that share them prevent it."""
        first = found.num_pages
        key = b"" if first == stop else found.next_key or self._free_key(root, found, prefix)
        if first > begin:
            if leaf.start > begin:
                return False  # forks share these pages and would lose their parent node
            self._move(leaf, found)
        if first == stop:
            return True
        nodes = unnamed_path(self._links, leaf, stop) if leaf.start > first else []
        if leaf.start < stop:
            nodes.append(self._links.split_off(leaf, leaf.table.read(leaf.start, stop).copy()))
        size = self._named.page_size
        keys = prefix.keys_from(first, key, stop, size)
        for node in nodes:
            start = node.start
            end = start + node.pages.size
            own = keys[(start - first) * KEY_BYTES : (end - first) * KEY_BYTES]
            ids = prefix.ids_of(start, end, size)
            self._named.give_name(node, root, own, ids, keep, prefix.extra)
            self._links.merge_up(node)
        return True

    def _walk(
        self, root: Root, above: Node | None, prefix: Prefix, stop: int, more: int = 0
    ) -> Match:
        """Match the prefix below `above`. Raises `InvalidRequest` for a match of more nodes than
        one call finds; a call that has made some itself finds `more`."""
        found = walk(self._named, root, above, prefix, stop, more)
        if found.is_cut:
            count = found.num_pages * self._named.page_size
            rule = (
                f"the first {count} tokens are cached in {MOST_MATCHED} nodes: commit those first"
            )
            raise InvalidRequest("token_ids", f"{stop * self._named.page_size} tokens", rule)
        return found

    def _free_key(self, root: Root, found: Match, prefix: Prefix) -> bytes:
        """The key of the first page that is not cached. Raises `KeyMismatch` if a cached page of
        other or unknown token ids has that key."""
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
        """Move a leaf onto cached pages and free its own for the same tokens."""
        start, old = leaf.start, leaf.parent
        own, count = leaf.table.read(start, found.num_pages), int(self._books.num_pages[leaf.index])
        node = found.cut(self._links)
        pages = np.concatenate((found.table(), leaf.table.read(found.num_pages, count)))
        leaf.table = PageTable.of(pages, self._books.blocks)
        self._links.attach(leaf, node)
        self._links.detach(leaf, old)
        self._named.give_bundles(own, pages[: found.num_pages])
        self._budget.release(leaf.owner, own)
        self._books.set_num_pages(leaf, count)
        self._books.renew(leaf)

    def _keep(self, leaf: Leaf, stop: int, keep: Retention) -> None:
        """Raise the retention of the first `stop` pages of a leaf's path."""
        node = leaf.parent
        while node is not None and node.start >= stop:
            node = node.parent
        if node is not None and node.name is not None and node.end > stop:
            node = self._links.split(node, stop)
        keep_path(self._links, node, keep)


def num_equal(one: Prefix, other: Prefix, page: int, stop: int, page_size: int) -> int:
    """Leading pages of `page:stop` that two prefixes name alike."""
    first, second = (
        names.ids_of(page, stop, page_size)
        if names.page_keys is None
        else names.keys_of(page, stop)
        for names in (one, other)
    )
    if first is None or second is None:
        return 0
    same = equal_rows(first.reshape(stop - page, -1), second.reshape(stop - page, -1))
    if one.extra is None and other.extra is None:
        return same
    return next(
        (at for at in range(same) if one.extra_at(page + at) != other.extra_at(page + at)), same
    )


def keep_path(links: Links, node: Node | None, keep: Retention) -> None:
    """Raise the retention of a named node and all above it."""
    path = named_path(node)
    for node in path:
        links.named.retention.keep(node, keep)
    for node in path[1:]:
        links.merge_up(node)


def unnamed_path(links: Links, leaf: Leaf, stop: int) -> list[Node]:
    """The unnamed nodes above `leaf`, from the root down, the last one split at `stop`."""
    if stop < leaf.start:
        links.node_ending_at(leaf, stop)
    path = []
    node = leaf.parent
    while node is not None and node.name is None:
        if node.end <= stop:
            path.append(node)
        node = node.parent
    return path[::-1]
