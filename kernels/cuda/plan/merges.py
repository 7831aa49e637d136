"""Rows that end up with more than one run, or none: the lists of partial states to merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32
from kernels.cuda.common.extremes import greatest
from kernels.cuda.common.scalars import int64
from kernels.cuda.plan.tiles import PARTIAL, ROW, ROWS, Int

NOTHING: Final = np.zeros(0, np.int32)
NO_LISTS: Final = np.zeros(1, np.int32)
"""The indptr of no lists."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a plan
class MergeLists:
    """Chunks of packed rows whose partial states are merged, and the lists of those states.

    `chunks[m]` is merged from partial rows `members[indptr[m]:indptr[m + 1]]` (each the first row
    of a chunk's partial state); an empty list, which come last, is a chunk that sees nothing.
    """

    chunk_rows: int
    chunks: Int32
    indptr: Int32
    members: Int32
    num_partial_rows: int
    longest: int


def lists_of_pieces(runs: Int, pieces: Int | None, chunk: int) -> MergeLists:
    """The lists where chunk i is in `pieces[i]` runs, one after another; None: in one each.

    Gives runs that are not final their partial rows.
    """
    if pieces is None:
        return MergeLists(chunk, NOTHING, NO_LISTS, NOTHING, 0, 0)
    cut = pieces > int64(1)
    chunks = cut.nonzero()[0]
    indptr = np.zeros(len(chunks) + 1, np.int32)
    indptr[1:] = np.add.accumulate(pieces[chunks])
    num_rows = indptr.item(-1) * chunk
    members = np.arange(0, num_rows, chunk, dtype=np.int32)
    runs[:, PARTIAL][cut.repeat(pieces).nonzero()[0]] = members
    how = (chunk, chunks.astype(np.int32), indptr, members, num_rows)
    return MergeLists(*how, greatest(pieces))


def merge_lists(runs: Int, num_packed: int, chunk: int) -> MergeLists:
    """The lists of chunks that are merged; gives runs that are not final their partial rows."""
    num_runs, num_chunks = len(runs), num_packed // chunk
    if num_runs <= num_chunks and _once_each(runs, num_packed):
        return lists_of_pieces(runs, None, chunk)
    first = runs[:, ROW] // chunk
    width = runs[:, ROWS] // chunk if np.count_nonzero(runs[:, ROWS] != chunk) else None
    return _lists_gathered(runs, first, width, num_chunks, chunk)


def _once_each(runs: Int, num_packed: int) -> bool:
    """Whether every packed row is in one run: all are final."""
    begins, ends = runs[:, ROW], runs[:, ROW] + runs[:, ROWS]
    if _follow(begins, ends, num_packed):
        return True
    # in another order? As many runs have a row as begin by then less those that end, whichever
    return _follow(np.sort(begins), np.sort(ends), num_packed)


def _follow(begins: Int, ends: Int, num_packed: int) -> bool:
    """Whether each begins where the one before ends, from the first row to the last."""
    if len(begins) == 0:
        return num_packed == 0
    if begins[0] != 0 or ends[-1] != num_packed:
        return False
    return not np.count_nonzero(begins[1:] != ends[:-1])


def _lists_gathered(
    runs: Int, first: Int, width: Int | None, num_chunks: int, chunk: int
) -> MergeLists:
    """`merge_lists` of runs in any order, of `width` chunks each from their `first` on."""
    seen, partial = _seen(first, width, num_chunks)
    chunks = _members(runs, partial.nonzero()[0], first, width, chunk)

    # members grouped by chunk, within a chunk in the order of their runs
    order = chunks.argsort(kind="stable")
    chunks = chunks.take(order)
    fresh = np.empty(len(chunks), np.bool_)
    fresh[:1] = True
    np.not_equal(chunks[1:], chunks[:-1], out=fresh[1:])
    lists = fresh.nonzero()[0]
    merged = chunks.take(lists)
    if np.count_nonzero(seen) < num_chunks:
        merged = np.concatenate([merged, (seen == 0).nonzero()[0]])
    indptr = np.empty(len(merged) + 1, np.int32)
    indptr[: len(lists)] = lists
    indptr[len(lists) :] = len(chunks)
    return MergeLists(
        chunk_rows=chunk,
        chunks=merged.astype(np.int32, copy=False),
        indptr=indptr,
        members=(order * chunk).astype(np.int32),
        num_partial_rows=len(chunks) * chunk,
        longest=greatest(indptr[1:] - indptr[:-1]) if len(merged) else 0,
    )


def _members(runs: Int, partial: Int, first: Int, width: Int | None, chunk: int) -> Int:
    """The chunk of every member: those of the first of the `partial` runs, of the second, ...

    Member i is the state of partial rows `i * chunk` and on. Writes each run's first into `runs`.
    """
    chunks = first.take(partial)
    if width is None:
        runs[:, PARTIAL][partial] = np.arange(0, len(partial) * chunk, chunk, dtype=np.int32)
        return chunks
    width = width.take(partial)
    begins = np.add.accumulate(width) - width
    runs[:, PARTIAL][partial] = (begins * chunk).astype(np.int32)
    chunks = (chunks - begins).repeat(width)
    chunks += np.arange(len(chunks))
    return chunks


def _seen(first: Int, width: Int | None, num_chunks: int) -> tuple[Int, NDArray[np.bool_]]:
    """How many runs each chunk is in, and which runs have a chunk that others have too.

    `width` is None where each run is one chunk.
    """
    if width is None:
        seen = np.bincount(first, minlength=num_chunks)
        return seen, (seen > 1).take(first)
    past = first + width
    change = np.bincount(first, minlength=num_chunks + 1)
    change -= np.bincount(past, minlength=num_chunks + 1)
    seen = np.add.accumulate(change)[:-1]
    shared = np.zeros(num_chunks + 1, np.intp)
    np.add.accumulate(seen > 1, out=shared[1:])
    return seen, shared.take(past) > shared.take(first)
