"""Truncates and deletes sequences, one or many; tokens that are kept behind a cut move up."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from attnd.wire.bounds import MAX_DELETED

from kernels.backend import NUMPY_DTYPES, Done
from kernels.errors import NoMemory
from service.core.keys import TokenIds
from service.core.page_table import NO_PAGES
from service.core.sequences.cuts import Cut
from service.core.values import Int32, RowCopies
from service.engine.handlers.sequences import (
    LONGEST_ID,
    VIEW_BYTES,
    copy_rows,
    sequence_fields,
    view_bytes,
)
from service.engine.store.imports import HIDDEN
from service.engine.store.store import Store, StoreLost
from service.engine.work.request import Request
from service.engine.work.work import (
    Completed,
    Cost,
    Fields,
    Seconds,
    Slice,
    SlicedWork,
    Slices,
    Work,
    in_slices,
)

MOVES_AT_ONCE: Final = 32
"""Maximum moves of one slice, each of some rows at one layer: each waits for the device."""
FREED_AT_ONCE: Final = 256
"""Sequences deleted between two reads of the clock: about a millisecond."""
MEMORY_WAIT_S: Final = 10.0
"""Longest time for which a truncation that has begun waits for the device's memory."""

Move = tuple[int, int, int]
"""A layer, and the first and last of the rows that move there."""


def truncate(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    name, layer = fields.id, fields.layer
    request.place.require(view_bytes(store) + 2 * LONGEST_ID)

    def answer() -> None:
        request.place.lay(sequence_fields(store.tree.describe(name), request.tenant))

    if layer is not None:
        store.tree.cut_layer(name, layer, fields.length)
        answer()
        return Completed()
    keep, ids = np.array(fields.keep or (), np.int32), np.array(fields.token_ids or (), np.uint32)
    cuts = store.tree.cuts.prepare((name,), (fields.length,), (keep,))
    ends = Ends((name,), [fields.length], [keep], [ids], fields.reserve)
    request.report = answer if fields.token_ids else None
    return cut(store, cuts, ends, answer)


def truncate_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """All or none."""
    fields = request.fields
    ids = fields.ids
    request.place.require((view_bytes(store) + 2 * LONGEST_ID) * len(ids))
    keeps = None
    if fields.keep is not None:
        keeps = np.split(np.array(fields.keep, np.int32), fields.keep_indptr[1:-1])

    def answer() -> None:
        views = [sequence_fields(store.tree.describe(name), request.tenant) for name in ids]
        request.place.lay({"sequences": views})

    cuts = store.tree.cuts.prepare(ids, fields.lengths, keeps, batch=True)
    named = [] if fields.ids_array is None else np.split(fields.ids_array, fields.ids_indptr[1:-1])
    ends = Ends(ids, fields.lengths, keeps or [NO_PAGES] * len(ids), named, fields.reserve)
    request.report = answer if fields.token_ids else None
    return cut(store, cuts, ends, answer)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """How sequences are after a cut: `names` are the ids of tokens from `lengths` on, or before,
    where they are not known; none: no more ids. `reserve`: tokens of each (None: unchanged)."""

    ids: Sequence[str]
    lengths: Sequence[int]
    keeps: Sequence[Int32]
    names: Sequence[TokenIds]
    reserve: int | None

    def check(self, store: Store) -> None:
        """Raises `InvalidRequest` and `KeyMismatch` for the names, before the cut."""
        for at, ids in enumerate(self.names):
            if ids.size:
                leaf = store.tree.books.leaf(self.ids[at])
                store.tree.naming.check_cut(leaf, self.lengths[at], self.keeps[at].size, ids)

    def apply(self, store: Store) -> None:
        leaves = [store.tree.books.leaf(name) for name in self.ids]
        if any(ids.size for ids in self.names):
            sums = np.cumsum([0, *(ids.size for ids in self.names)], dtype=np.int32)
            before = np.array(self.lengths, np.int32)
            ends = before + np.array([keep.size for keep in self.keeps], np.int32)
            store.tree.naming.learn(leaves, before, ends, np.concatenate(self.names), sums)
        if self.reserve is not None:
            for leaf in leaves:
                store.tree.cuts.lower_reserve(leaf, self.reserve)


def cut(store: Store, cuts: Sequence[Cut], ends: Ends, answer: Callable[[], None]) -> Work:
    """Carry out prepared cuts. Rows are copied and move first, while their pages are still
    referenced."""
    try:
        ends.check(store)
    except BaseException:
        store.tree.cuts.release(cuts)
        raise
    sources, targets = store.tree.cuts.moves(cuts)
    copies = store.tree.cuts.copies(cuts)
    if not sources.size:
        try:
            copy(store, copies)
        except NoMemory:
            store.tree.cuts.release(cuts)
            raise
        store.tree.cuts.finish(cuts)
        ends.apply(store)
        answer()
        return Completed()
    tree, begun, failing_since = store.tree, False, math.inf

    def move(todo: deque[Move]) -> Done[None]:
        """Carry out moves while there is memory for them. All rows of a move are read before any is
        written, so that a later slice can repeat it."""
        nonlocal begun, failing_since
        try:
            if not begun:
                copy(store, copies)
                begun = len(copies) > 0
            while todo:
                layer, first, last = todo[0]
                slots = tree.layer_slots(layer, sources[first:last])
                group = store.geometry.group_of(layer)
                dtype, shape = NUMPY_DTYPES[group.dtype], (slots.size, group.num_kv_heads)
                k = np.empty((*shape, group.head_dim), dtype)
                rows = k, np.empty((*shape, group.v_head_dim), dtype)  # bit by bit
                store.backend.read_stored(layer, slots, rows).result()
                begun = True
                to = tree.layer_slots(layer, targets[first:last])
                store.backend.write_stored(layer, *rows, to).result()
                todo.popleft()
                failing_since = math.inf
        except NoMemory:  # open steps hold it
            failing_since = min(failing_since, time.monotonic())
            if not begun or time.monotonic() > failing_since + MEMORY_WAIT_S:
                raise
        return Done(None)

    def slices() -> Slices:
        for moves, cost in move_plan(store, sources.size):
            todo = deque(moves)
            while todo:
                yield Slice(partial(move, todo), "move", cost)
        store.tree.cuts.finish(cuts)
        ends.apply(store)
        answer()

    def undo() -> None:
        if begun:
            raise StoreLost("rows that a truncate keeps were moved in part")
        store.tree.cuts.release(cuts)

    return SlicedWork(slices(), undo, must_finish=lambda: begun)


def move_plan(store: Store, num_rows: int) -> Iterator[tuple[list[Move], Cost]]:
    """The moves of `num_rows` rows at every layer, in slices.

    Within a layer rows move in their order, as a later one may come from where an earlier one was.
    """
    geometry = store.geometry
    whole = Cost(num_bytes=4.0 * num_rows * geometry.token_bytes * geometry.num_layers)
    pieces = max(store.pace.num_slices("move", whole), -(-geometry.num_layers // MOVES_AT_ONCE))
    a_layer = min(num_rows, max(1, -(-pieces // geometry.num_layers)))
    bounds = np.linspace(0, num_rows, a_layer + 1).astype(int).tolist()
    layers = range(geometry.num_layers)
    moves = [(layer, first, last) for layer in layers for first, last in pairwise(bounds)]
    at_once = max(1, len(moves) // pieces)
    for begin in range(0, len(moves), at_once):
        some = moves[begin : begin + at_once]
        yield some, Cost(num_bytes=whole.num_bytes * len(some) / len(moves))


def copy(store: Store, copies: RowCopies) -> None:
    """Copy rows before cuts within shared pages. Raises NoMemory before anything has changed."""
    try:
        copy_rows(store, copies)
    except NoMemory:
        raise
    except Exception as error:
        raise StoreLost("rows were lost in a truncate") from error


def delete_sequence(store: Store, request: Request, _: Seconds) -> Fields:
    store.tree.free((request.fields.id,))
    return {}


def delete_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """Delete many sequences, some at a time; ids that do not exist are ignored.

    Once some are deleted, the others are, too.
    """
    names = chosen(store, request)
    request.place.require(VIEW_BYTES)
    if len(names) <= MAX_DELETED:  # by a prefix there may be more
        store.tree.free(names)
        request.place.lay({"num_deleted": len(names)})
        return Completed()
    books, deleted = store.tree.books, 0

    def pieces() -> Generator[None, None, None]:
        nonlocal deleted
        for begin in range(0, len(names), FREED_AT_ONCE):
            some = [name for name in names[begin : begin + FREED_AT_ONCE] if name in books]
            deleted += len(some)
            store.tree.free(some)
            yield

    def slices() -> Slices:
        yield from in_slices(pieces())
        request.place.lay({"num_deleted": deleted})

    return SlicedWork(slices(), must_finish=lambda: deleted > 0)


def chosen(store: Store, request: Request) -> list[str]:
    """The sequences to delete."""
    fields, books = request.fields, store.tree.books
    if fields.prefix is None:
        return [name for name in fields.names if name in books]
    found = books.with_prefix(request.tenant.prefix + fields.prefix, len(books))
    return [name for name in found if not name.startswith(HIDDEN)]
