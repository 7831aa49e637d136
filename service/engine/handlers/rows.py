"""Rows of the pool, written and read, and the page tables of sequences."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import numpy as np
from attnd.wire.images import Shaped

from kernels.backend import NUMPY_DTYPES, Array, DType, Int32, Pending
from service.core.errors import InvalidRequest
from service.core.nodes import Leaf
from service.core.plans.ragged import indptr as prefix_sums
from service.core.plans.ragged import token_slots
from service.core.sequences.books import Batch
from service.core.values import Extension
from service.engine.handlers.slices import even_spans, paced_spans
from service.engine.handlers.token_ids import has_ids, learn, lens_of, room
from service.engine.store.store import Store, write_cost
from service.engine.work.request import Request
from service.engine.work.work import (
    Completed,
    Cost,
    Counts,
    Seconds,
    Slice,
    SlicedWork,
    Slices,
    SoloLaunch,
    Work,
    in_slices,
)
from service.errors import AnswerTooLarge

NUMBER_BYTES: Final = 12
"""Most that one int32 takes in JSON."""
LAYERS_AT_ONCE: Final = 128
"""Layers that one turn writes: each is a launch of its own."""
ROWS_AT_ONCE: Final = 2**18
"""Rows that one slice reads at most: their slots take some milliseconds."""
PAGING: Final = "request fewer sequences, or a part of each with start and stop"


def append(store: Store, request: Request, seconds: Seconds) -> Work:
    fields, rows = request.fields, (request.tensors["k"], request.tensors["v"])
    ids, layers = fields.ids, fields.layers
    request.place.require(64 + NUMBER_BYTES * len(ids) + room(request))
    counts = np.diff(fields.indptr(rows[0].shape[0 if layers is None else 1]))
    batch = store.look_up(request)
    if layers is not None:
        return append_layers(store, request, batch, counts, seconds)
    extension = store.extend(fields.layer, batch, counts, fields.offset_array, seconds)
    lay_lengths(store, request, extension, counts)
    counted = Counts(appended=extension.num_stored)
    if store.pace.is_long("append", write_cost(rows)):
        slices = write_slices(store, extension, rows)
        undo = partial(store.undo, extension)
        return SlicedWork(slices, undo, counts=counted, rows=extension)
    return Completed(extension, (store.write(extension, rows, seconds),), counted)


def lay_lengths(store: Store, request: Request, extension: Extension, counts: Int32) -> None:
    """The answer to an append; the ids that it brings are learned first."""
    lengths = {"lengths": extension.lengths.tolist()}
    request.place.lay(lengths)
    if has_ids(request):
        learn(store, request, extension, prefix_sums(counts))
        place, leaves = request.place, extension.leaves

        def report() -> None:
            place.lay(lengths | lens_of(store, leaves))

        request.report = report


def append_layers(
    store: Store, request: Request, batch: Batch, counts: Int32, seconds: Seconds
) -> Work:
    """Rows for many layers, k and v `[L, n, Hkv, D]`: all or none."""
    fields, rows = request.fields, (request.tensors["k"], request.tensors["v"])
    started = time.monotonic()
    every = store.tree.extend_layers(fields.layers, batch, counts, fields.offset_array)
    seconds.plan += time.monotonic() - started
    lay_lengths(store, request, every, counts)
    counted = Counts(appended=every.num_stored * len(fields.layers))
    parts = [(layer, k, v) for layer, k, v in zip(fields.layers, *rows, strict=True)]

    def slices() -> Slices:
        for layer, k, v in parts:
            own = replace(every, layer=layer, slots=slots_at(store, every, layer))
            yield from write_slices(store, own, (k, v))

    if store.pace.is_long("append", write_cost(rows)) or len(parts) > LAYERS_AT_ONCE:
        return SlicedWork(slices(), partial(store.undo, every), counts=counted, rows=every)
    started = time.monotonic()
    try:
        own = [(layer, k, v, slots_at(store, every, layer)) for layer, k, v in parts]
        written = [store.backend.append(*one) for one in own]
    except BaseException:
        store.undo(every)
        raise
    seconds.copy_in += time.monotonic() - started
    return Completed(every, written, counted)


def slots_at(store: Store, extension: Extension, layer: int) -> Int32:
    """The token slots of an extension of many layers at one of them."""
    if extension.group_slots is None:
        return extension.slots
    return extension.group_slots[store.tree.group_of(layer)]


def write_slices(store: Store, extension: Extension, rows: tuple[Array, Array]) -> Slices:
    """The rows of an extension, some at a time."""
    k, v = rows
    cost = write_cost(rows)
    for span in paced_spans(store.pace, "append", len(k), cost):
        part = slice(span.first, span.last)
        slots = extension.slots[part]
        start = partial(store.backend.append, extension.layer, k[part], v[part], slots)
        yield Slice(start, "append", span.cost)


def gather(store: Store, request: Request, seconds: Seconds) -> Work:
    """Tokens `start:stop` of every sequence, dequantised."""
    fields, geometry = request.fields, store.geometry
    started = time.monotonic()
    chosen = choose(store, fields)
    seconds.plan += time.monotonic() - started
    group = geometry.group_of(fields.layer)
    own = "fp16" if group.dtype.startswith("fp8") else group.dtype
    dtype = cast(DType, fields.dtype or own)
    rows = (chosen.num_rows, group.num_kv_heads)
    dims = (("k", group.head_dim), ("v", group.v_head_dim))
    shapes: tuple[Shaped, ...] = tuple((name, NUMPY_DTYPES[dtype], (*rows, d)) for name, d in dims)
    request.place.require(64 + NUMBER_BYTES * chosen.indptr.size, shapes, PAGING)
    laid = request.place.lay({"kv_indptr": chosen.indptr.tolist()}, shapes)
    out = (laid["k"], laid["v"])
    cost = Cost(num_bytes=2.0 * (out[0].nbytes + out[1].nbytes))

    def read(first: int, last: int) -> Pending[Any]:
        part = (out[0][first:last], out[1][first:last])
        slots = store.tree.layer_slots(fields.layer, chosen.slots(first, last, geometry.page_size))
        return store.backend.gather(fields.layer, slots, dtype, out=part)

    def slices() -> Slices:
        for span in paced_spans(store.pace, "gather", chosen.num_rows, cost):
            pieces = -(-(span.last - span.first) // ROWS_AT_ONCE)
            for part in even_spans(span.last - span.first, span.cost, pieces):
                first, last = span.first + part.first, span.first + part.last
                yield Slice(partial(read, first, last), "gather", part.cost)

    if store.pace.is_long("gather", cost) or chosen.num_rows > ROWS_AT_ONCE:
        return SlicedWork(slices())
    return SoloLaunch(partial(read, 0, chosen.num_rows), lambda _: None, "gather", cost)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Tokens `first[b]:first[b] + counts[b]` of each sequence; `indptr` [B+1] are their sums."""

    leaves: Sequence[Leaf]
    first: Int32
    counts: Int32
    indptr: Int32

    @property
    def num_rows(self) -> int:
        return int(self.indptr[-1])

    def slots(self, begin: int, end: int, page_size: int) -> Int32:
        if begin == end:
            return np.empty(0, np.int32)
        low = int(np.searchsorted(self.indptr, begin, "right")) - 1
        high = int(np.searchsorted(self.indptr, end, "left"))
        first, counts = self.first[low:high].copy(), self.counts[low:high].copy()
        before = begin - int(self.indptr[low])
        first[0] += before
        counts[0] -= before
        counts[-1] -= int(self.indptr[high]) - end
        some = np.flatnonzero(counts)
        tables = [self.leaves[low + at].table for at in some.tolist()]
        return token_slots(tables, first[some], counts[some], page_size)


def choose(store: Store, fields: Any) -> TokenRows:
    """Tokens `start:stop` of each sequence; no slot is looked up yet.

    A stop beyond a sequence's end means its end. Raises `InvalidRequest` for more tokens than int32
    counts, and `WindowReturned` for tokens whose pages were returned.
    """
    lengths, leaves = store.tree.read(fields.ids, fields.layer)
    first = np.minimum(fields.start, lengths).astype(np.int32)
    last = lengths if fields.stop is None else np.minimum(fields.stop, lengths)
    counts = (last - first).astype(np.int32)
    satellites, windows = store.tree.satellites, store.tree.windows
    if satellites is not None and windows and (window := satellites.window_at(fields.layer)):
        for leaf, begin, end in zip(leaves, first.tolist(), last.tolist(), strict=True):
            if end > begin:
                windows.check_rows(window, leaf, begin, end)
    if int(counts.sum(dtype=np.int64)) > np.iinfo(np.int32).max:
        rule = "together they hold more than 2**31 - 1 tokens"
        raise InvalidRequest("sequences", len(fields.ids), rule)
    return TokenRows(leaves, first, counts, prefix_sums(counts))


MAX_TABLE: Final = 2**18
"""Maximum pages of the tables in one answer: some 100 ms of work, in slices."""
SPELLED_AT_ONCE: Final = 4096
"""Numbers written as JSON between two reads of the clock: a millisecond or two."""


def page_table(store: Store, request: Request, _: Seconds) -> Work:
    """The flat table, and every level the tree has, however little its sharing would save.

    Raises AnswerTooLarge for more than `MAX_TABLE` pages, before anything is planned.
    """
    ids, layer = store.look_up(request), request.fields.layer
    pages = -(-store.tree.lengths(ids, layer) // store.tree.page_size_at(layer))
    if (count := int(pages.sum(dtype=np.int64))) > MAX_TABLE:
        most = NUMBER_BYTES * MAX_TABLE
        raise AnswerTooLarge(NUMBER_BYTES * count, most, "request the tables of fewer sequences")
    table = store.tree.page_table(ids, layer)
    one_row_each = np.arange(ids.indices.size + 1, dtype=np.int32)
    plan = store.plans.sequences(ids, layer, one_row_each, causal=False, mode="always").plan
    order = one_row_each[:-1] if plan.order is None else plan.order
    numbers = table.kv_indices.size + 4 * ids.indices.size
    numbers += sum(level.kv_indices.size + 4 * level.qo_indptr.size for level in plan.levels)
    request.place.require(NUMBER_BYTES * numbers + 256)
    levels = [{"qo_indptr": level.qo_indptr} | table_arrays(level) for level in plan.levels]
    text = spelled(table_arrays(table) | {"levels": levels, "order": order})
    if numbers <= SPELLED_AT_ONCE:
        request.place.lay_text("".join(text))
        return Completed()

    def pieces() -> Generator[None, None, str]:
        parts = []
        for part in text:
            parts.append(part)
            yield
        return "".join(parts)

    def slices() -> Slices:
        request.place.lay_text((yield from in_slices(pieces())))

    return SlicedWork(slices())


def table_arrays(table: Any) -> dict[str, Any]:
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    return {name: getattr(table, name) for name in names}


def spelled(value: Any) -> Iterator[str]:
    """JSON of objects, lists, and arrays of numbers, of which a bounded part at a time is spelled
    out."""
    match value:
        case np.ndarray():
            yield "["
            for begin in range(0, value.size, SPELLED_AT_ONCE):
                part = ",".join(map(str, value[begin : begin + SPELLED_AT_ONCE].tolist()))
                yield part if begin == 0 else f",{part}"
            yield "]"
        case dict():
            for number, (name, one) in enumerate(value.items()):
                yield f'{"," if number else "{"}"{name}":'
                yield from spelled(one)
            yield "}"
        case _:
            yield "["
            for number, one in enumerate(value):
                yield "," if number else ""
                yield from spelled(one)
            yield "]"
