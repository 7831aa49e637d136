"""Exports and imports of sequences: generation, names, lengths and slots."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from service.core.errors import SequenceExists
from service.core.plans.ragged import token_slots
from service.core.prefix.keys import Prefix
from service.core.prefix.matching import named_path
from service.core.prefix.nodes import FOREVER, Leaf, named
from service.core.tree import PrefixTree
from service.core.values import Int32


def generation(tree: PrefixTree, leaf: Leaf, instance_id: str) -> str:
    """32 hex digits that change when a sequence's tokens change, and when the pool restarts."""
    books = tree.books
    state = [books.serials[leaf.index].tobytes(), books.lengths[:, leaf.index].tobytes()]
    if leaf.shard is not None:
        state.append(leaf.shard.lengths.tobytes())
    return sha256(b"".join((instance_id.encode(), *state))).hexdigest()[:32]


def names_of(tree: PrefixTree, leaf: Leaf) -> Prefix | None:
    """The names of a sequence's committed pages: token ids if all are known, else keys."""
    path = named_path(leaf.parent)
    if not path:
        return None
    pages = np.concatenate([node.pages for node in path])
    names = tree.cache.named
    salt = named(path[0]).root.cache_salt
    if all(named(node).with_ids for node in path):
        return Prefix(names.token_ids[pages].ravel(), None, salt)
    return Prefix(None, names.keys[pages], salt)


def fill(tree: PrefixTree, name: str, lengths: Sequence[int]) -> None:
    """Extend a sequence to `lengths`, one per layer, none below the present one.

    Allocates pages for the longest; the caller writes the rows. Raises `OutOfPages`.
    """
    leaf = tree.books.leaf(name)
    wanted = np.array(lengths, np.int32)
    longest = int(wanted.argmax())
    count = wanted[longest] - tree.books.lengths[longest, leaf.index]
    tree.extend(longest, (name,), np.array([count], np.int32))
    tree.books.lengths[:, leaf.index] = wanted


def slots_of(tree: PrefixTree, table: Int32, start: int, stop: int) -> Int32:
    """Token slots of tokens `start:stop` of a page table."""
    span = np.array([start], np.int32), np.array([stop - start], np.int32)
    return token_slots((table,), *span, tree.page_size)


def rename(tree: PrefixTree, name: str, new: str, ttl_s: float | None) -> None:
    """Change a sequence's id and time to live. Raises `SequenceExists`."""
    books = tree.books
    if new in books:
        raise SequenceExists([new])
    leaf = books.leaf(name)
    books.rename(leaf, new)
    books.set_ttl(leaf, FOREVER if ttl_s is None else ttl_s)
