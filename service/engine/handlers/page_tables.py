"""Page tables: the pages of sequences, flat and by the levels that they share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

import numpy as np

from service.engine.handlers.rows import NUMBER_BYTES
from service.engine.loop.job import Completed, Seconds, SlicedWork, Slices, Work, in_slices
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.errors import AnswerTooLarge

MAX_TABLE: Final = 2**18
"""Maximum pages of the tables in one answer: some 100 ms of work, in slices."""
SPELLED_AT_ONCE: Final = 4096
"""Numbers written as JSON between two reads of the clock: a millisecond or two."""


def page_table(store: Store, request: Request, _: Seconds) -> Work:
    """The flat table, and every level the tree has, however little its sharing would save.

    Raises AnswerTooLarge for more than `MAX_TABLE` pages, before anything is planned.
    """
    ids, layer = store.look_up(request), request.fields.layer
    pages = -(-store.tree.lengths(ids, layer) // store.geometry.page_size)
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
    """The three arrays of a CSR page table."""
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
