"""Cuts requests into batches of equal-shaped segments, in numpy, for the attention loop.

Requests are laid end to end: rows are counted over all of them, in plan order, and a page is a
block of the pool, so segments of any request, level and layer of a group can share a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from kernels.backend import Array, Attend, Int64, Mask, UInt8

LOAD_ELEMENTS: Final = 512 * 1024
"""Elements of K (and of V) widened at a time: 2 MiB of float32, which stays in cache between the
gather, the two products and the next tile. Twice as much was slower on 512 KiB of L2 per core."""

SHORT_KEYS: Final = 512
"""Segments up to this long are padded to a common length, so that a batch of short sequences costs
a few calls and not a few calls each; padding a longer one would cost more than it saves."""

PADDED_KEYS: Final = 64
"""What short segments are padded to a multiple of."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Pages of a layer, tokens of a page, and its elements of K or, if these are more, of V.

    Blocks of the pool from a page to the next one, and the block of each layer's page 0.
    """

    num_pages: int
    page_size: int
    page_elements: int
    page_step: int
    layer_blocks: Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """G segments of R query rows each, over runs of P pages; no row is in it twice.

    `rows` int64 [G, R]; `pages` int64 [G, P], a shorter run repeats its last page; `num_keys` and
    `kv_start` int64 [G].
    """

    rows: Int64
    pages: Int64
    num_keys: Int64
    kv_start: Int64
    causal: bool
    masked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Batches, and what visibility rests on: each row's position, and its first bit of `mask`.

    `split_keys`: keys of every batch's runs, shorter ones included; 0: runs of any length.
    """

    batches: list[Batch]
    positions: Int64
    mask: Mask | None
    split_keys: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Columns over all non-empty segments; `first_page` counts into `pages` of all requests."""

    level: Int64
    first_row: Int64
    num_rows: Int64
    first_page: Int64
    num_pages: Int64
    num_keys: Int64
    kv_start: Int64
    causal: Int64
    masked: Int64


def lay_out(
    requests: Sequence[Attend], shape: PagedShape, first_block: int = 0, split_keys: int = 0
) -> Work:
    """Batches for requests over a pool, whose blocks count from `first_block`.

    With `split_keys`, runs end at its multiples, and come in order of level and position.
    """
    segments, pages = _segments(requests, shape, first_block)
    positions = np.concatenate([r.plan.positions for r in requests]).astype(np.int64)
    if split_keys:
        segments = _split(segments, split_keys // shape.page_size, shape.page_size)
        batches = list(_splits(segments, pages, split_keys // shape.page_size, shape.page_elements))
    else:
        batches = list(_batches(segments, pages, shape.page_size, shape.page_elements))
    return Work(batches, positions, _join_masks(requests), split_keys)


def _segments(
    requests: Sequence[Attend], shape: PagedShape, first_block: int
) -> tuple[Segments, Int64]:
    tables: list[Int64] = []
    pages: list[Array] = []
    row, page = 0, 0
    for request in requests:
        for number, level in enumerate(request.plan.levels):
            table = np.empty((len(fields(Segments)), level.qo_indptr.size - 1), np.int64)
            of = Segments(*table)
            of.level[:], of.causal[:], of.masked[:] = number, level.causal, request.mask is not None
            np.add(level.qo_indptr[:-1], row, out=of.first_row)
            np.subtract(level.qo_indptr[1:], level.qo_indptr[:-1], out=of.num_rows)
            np.add(level.kv_indptr[:-1], page, out=of.first_page)
            np.subtract(level.kv_indptr[1:], level.kv_indptr[:-1], out=of.num_pages)
            np.multiply(of.num_pages - 1, shape.page_size, out=of.num_keys)
            of.num_keys[:] += level.kv_last_page_len
            of.kv_start[:] = level.kv_start
            some = (of.num_rows > 0) & (of.num_pages > 0)
            tables.append(table if some.all() else table[:, some])
            check_range("kv_indices", level.kv_indices, shape.num_pages)
            before = shape.layer_blocks[request.layer] - first_block
            pages.append(level.kv_indices * np.int64(shape.page_step) + np.int64(before))
            page += level.kv_indices.size
        row += request.plan.positions.size
    if not tables:
        return Segments(*np.zeros((len(fields(Segments)), 0), np.int64)), np.zeros(0, np.int64)
    if len(tables) == 1:
        return Segments(*tables[0]), pages[0]
    return Segments(*np.concatenate(tables, axis=1)), np.concatenate(pages)


def check_range(field: str, values: Array, limit: int) -> None:
    """Raise `ValueError` unless all are in `0 .. limit - 1`: beyond is another layer."""
    if values.size and (int(values.min()) < 0 or int(values.max()) >= limit):
        raise ValueError(f"{field} = {values.min()}..{values.max()}: must be within 0..{limit - 1}")


def _split(segments: Segments, split_pages: int, page_size: int) -> Segments:
    """Each segment every `split_pages` pages; `level` then orders levels and splits."""
    counts = -(-segments.num_pages // split_pages)
    parts = Segments(*(getattr(segments, f.name).repeat(counts) for f in fields(Segments)))
    split = np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)
    before = split * split_pages
    parts.level[:] = (parts.level << 32) + split
    parts.first_page[:] += before
    parts.kv_start[:] += before * page_size
    parts.num_pages[:] = np.minimum(parts.num_pages - before, split_pages)
    parts.num_keys[:] = np.minimum(parts.num_keys - before * page_size, split_pages * page_size)
    return parts


def _splits(
    segments: Segments, pages: Int64, split_pages: int, page_elements: int
) -> Iterator[Batch]:
    """Splits of one shape and place together, in order of their places."""
    kinds = (segments.num_rows, segments.causal, segments.masked, segments.level)
    most = max(1, LOAD_ELEMENTS // (split_pages * page_elements))
    for group in _groups(np.stack(kinds)):
        for begin in range(0, group.size, most):
            yield _batch(segments, pages, group[begin : begin + most], split_pages)


def _batches(
    segments: Segments, pages: Int64, page_size: int, page_elements: int
) -> Iterator[Batch]:
    """Group segments by shape and flags, cut groups so that a short one is loaded whole."""
    short = segments.num_keys <= SHORT_KEYS
    quantum = max(1, PADDED_KEYS // page_size)
    padded = -(-segments.num_pages // quantum) * quantum
    width = np.where(short, padded, segments.num_pages)
    kinds = (segments.level, segments.num_rows, width, segments.causal, segments.masked)
    for group in _groups(np.stack(kinds)):
        columns = int(width[group[0]])
        most = max(1, LOAD_ELEMENTS // (columns * page_elements))
        for begin in range(0, group.size, most):
            yield _batch(segments, pages, group[begin : begin + most], columns)


def _groups(kinds: Int64) -> list[Int64]:
    """Indices of the columns that are alike, for each kind of column."""
    if kinds.shape[1] == 0:
        return []
    if (kinds == kinds[:, :1]).all():
        return [np.arange(kinds.shape[1])]
    order = np.lexsort(kinds)
    keys = kinds[:, order]
    cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    return np.split(order, cuts)


def _batch(segments: Segments, pages: Int64, chosen: Int64, width: int) -> Batch:
    first = chosen[0]
    column = np.minimum(np.arange(width), segments.num_pages[chosen, None] - 1)
    return Batch(
        rows=segments.first_row[chosen, None] + np.arange(segments.num_rows[first]),
        pages=pages[segments.first_page[chosen, None] + column],
        num_keys=segments.num_keys[chosen],
        kv_start=segments.kv_start[chosen],
        causal=bool(segments.causal[first]),
        masked=bool(segments.masked[first]),
    )


def _join_masks(requests: Sequence[Attend]) -> Mask | None:
    """All masks as one; rows of a request without one get offset 0, which nothing reads."""
    if all(request.mask is None for request in requests):
        return None
    bits: list[UInt8] = []
    offsets: list[Array] = []
    bytes_before = 0
    for request in requests:
        if request.mask is None:
            offsets.append(np.zeros(request.plan.positions.size, np.int64))
            continue
        bits.append(request.mask.bits)
        offsets.append(request.mask.row_offsets + 8 * bytes_before)
        bytes_before += request.mask.bits.size
    return Mask(np.concatenate(bits), np.concatenate(offsets))
