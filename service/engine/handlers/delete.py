"""Deletes sequences, one or many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Final

from service.engine.handlers.sequences import MADE_AT_ONCE, VIEW_BYTES
from service.engine.loop.job import Completed, Seconds, SlicedWork, Slices, Work, in_slices
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.engine.store.unfinished_imports import HIDDEN
from service.operations.sequences import MAX_LISTED

ID_BYTES: Final = 4
"""Size of an id in an answer beside its characters."""


def delete_sequence(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(0)
    store.tree.free((request.fields.id,))
    request.place.lay({})
    return Completed()


def delete_sequences(
    store: Store,
    request: Request,
    _: Seconds,
    count: Callable[[Sequence[str]], int] = len,
    skips: Callable[[Sequence[str]], Collection[str]] = lambda _: (),
) -> Work:
    """Delete many sequences, some at a time; ids that do not exist are ignored.

    `count` returns the number of sequences that some ids are parts of; `skips` returns ids that a
    request with `skip` leaves alone.
    """
    names, skipped = chosen(store, request, skips)
    shown = {} if skipped is None else {"skipped": [request.tenant.shown(one) for one in skipped]}
    request.place.require(VIEW_BYTES + sum(len(one) + ID_BYTES for one in skipped or ()))
    if len(names) <= MADE_AT_ONCE:
        deleted = count(names)
        store.tree.free(names)
        request.place.lay({"num_deleted": deleted} | shown)
        return Completed()
    books = store.tree.books

    def pieces() -> Generator[None, None, int]:
        deleted = 0
        for begin in range(0, len(names), MADE_AT_ONCE):
            some = [name for name in names[begin : begin + MADE_AT_ONCE] if name in books]
            deleted += count(some)
            store.tree.free(some)
            yield
        return deleted

    def slices() -> Slices:
        deleted = yield from in_slices(pieces())
        request.place.lay({"num_deleted": deleted} | shown)

    return SlicedWork(slices())


def chosen(
    store: Store, request: Request, skips: Callable[[Sequence[str]], Collection[str]]
) -> tuple[list[str], list[str] | None]:
    """The sequences to delete, and those to skip (None: none may be). Raises SequenceMoving."""
    fields, books, marks = request.fields, store.tree.books, store.move_marks
    if fields.prefix is None:
        names = [name for name in fields.names if name in books]
    else:
        found = books.with_prefix(request.tenant.prefix + fields.prefix, len(books))
        names = [name for name in found if not name.startswith(HIDDEN)]
    if not fields.skip:
        marks.check(names, request)
        return names, None
    skipped = (marks.marks.keys() & names) | set(skips(names))
    kept = [name for name in names if name not in skipped]
    return kept, sorted(skipped)[:MAX_LISTED]
