"""Sequences are deleted, one or many."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from service.core.shards.rows import check_epochs, epoch_of
from service.engine.handlers.sequences import MADE_AT_ONCE, VIEW_BYTES
from service.engine.loop.job import Answered, Seconds, Sliced, Steps, Work, in_slices
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.engine.store.unfinished_imports import HIDDEN
from service.operations.sequences import MAX_LISTED

ID_BYTES: Final = 4
"""Of an id in an answer, beside its letters."""


def delete_sequence(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(0)
    check_epochs(store.tree, (request.fields.id,), None)
    store.tree.free((request.fields.id,))
    request.place.lay({})
    return Answered()


def delete_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """Those there are of many, some at a time."""
    names, skipped = chosen(store, request)
    told = {} if skipped is None else {"skipped": [request.tenant.shown(one) for one in skipped]}
    request.place.require(VIEW_BYTES + sum(len(one) + ID_BYTES for one in skipped or ()))
    if len(names) <= MADE_AT_ONCE:
        deleted = num_whole(store, names)
        store.tree.free(names)
        request.place.lay({"num_deleted": deleted} | told)
        return Answered()
    books = store.tree.books

    def pieces() -> Generator[None, None, int]:
        deleted = 0
        for begin in range(0, len(names), MADE_AT_ONCE):
            some = [name for name in names[begin : begin + MADE_AT_ONCE] if name in books]
            deleted += num_whole(store, some)
            store.tree.free(some)
            yield
        return deleted

    def steps() -> Steps:
        deleted = yield from in_slices(pieces())
        request.place.lay({"num_deleted": deleted} | told)

    return Sliced(steps(), lambda: None)


def chosen(store: Store, request: Request) -> tuple[list[str], list[str] | None]:
    """The sequences to delete, and those to be skipped, where any are. Raises SequenceMoving."""
    fields, books, leaving = request.fields, store.tree.books, store.leaving
    if fields.prefix is None:
        names = [name for name in fields.names if name in books]
    else:
        found = books.beginning_with(request.tenant.prefix + fields.prefix, len(books))
        names = [name for name in found if not name.startswith(HIDDEN)]
    if not fields.skip:
        leaving.check(names, request)
        return names, None
    skipped = leaving.marks.keys() & names if leaving else set()
    if books.num_shards:
        skipped |= {name for name in names if epoch_of(books.leaf(name))}
    kept = [name for name in names if name not in skipped]
    return kept, sorted(skipped)[:MAX_LISTED]


def num_whole(store: Store, names: Sequence[str]) -> int:
    """How many sequences these are, where one that is dealt out counts for its first page."""
    books = store.tree.books
    return sum(books.leaf(name).shard.rank == 0 for name in names)
