"""Merges of states that come from outside: any heads and head_dim, whatever the pool's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.backend import (
    Array,
    AttentionState,
    Done,
    DType,
    Float32,
    Int32,
    Pending,
    StageSeconds,
)
from kernels.cuda import checks
from kernels.cuda.launch import Library
from kernels.cuda.pending import Guard, Result
from kernels.cuda.shapes import merge_launch
from kernels.cuda.structs import MERGE_PARAMS, params
from kernels.cuda.transfer import Transfers, aligned, pinned

FLOAT32 = np.dtype(np.float32)


class Merging:
    """Merges lists of states; `head_dim` is the one that has a kernel of its own."""

    def __init__(
        self,
        head_dim: int,
        multiprocessors: int,
        library: Library,
        transfers: Transfers,
        guarded: Guard,
    ) -> None:
        self._head_dim, self._multiprocessors = head_dim, multiprocessors
        self._library, self._transfers, self._guarded = library, transfers, guarded

    def merge(
        self, o: Array, lse: Float32, indptr: Int32, into: AttentionState | None
    ) -> Pending[AttentionState]:
        """`Backend.merge`."""
        dtype = checks.check_states(o, lse, indptr, into)
        shape = (len(indptr) - 1, *o.shape[1:])
        transfers = self._transfers
        with self._guarded():
            if 0 in shape:
                return Done(into or _empty(shape, o.dtype))
            members = (o, lse, indptr) if into is None else (o, lse, indptr, into.o, into.lse)
            buffer, at = transfers.upload(members)
            host = AttentionState(pinned(shape, o.dtype), pinned(shape[:2], FLOAT32))
            out, where = buffer, at[3:]
            if into is None:
                second = aligned(host.o.nbytes)
                out = transfers.scratch(second + host.lse.nbytes)
                where = [out.ptr, out.ptr + second]
            longest = int(np.diff(indptr).max())
            with transfers.compute:
                self.enqueue(shape, dtype, at[:3], where, longest, into is not None)
            targets = ((host.o, 0), (host.lse, where[1] - where[0]))
            done = transfers.download(where[0], targets, (out, buffer))
        return Result(self._guarded, done, lambda: _written(host, into), StageSeconds())

    def enqueue(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        members: Sequence[int],
        where: Sequence[int],
        longest: int,
        into: bool = False,
    ) -> None:
        """Launch a merge of device addresses (o, lse, indptr) -> (o, lse) of `shape`.

        `shape` is (lists, heads, head_dim); `longest` is the length of the longest list.
        """
        rows, heads, head_dim = shape
        special = head_dim if head_dim == self._head_dim else 0
        how = merge_launch(special, False, dtype, rows * heads, longest, self._multiprocessors)
        block = params(
            MERGE_PARAMS,
            o_in=members[0],
            lse_in=members[1],
            indptr=members[2],
            o=where[0],
            lse=where[1],
            num_rows=rows,
            num_heads=heads,
            group_size=1,
            chunk_rows=1,
            head_dim=head_dim,
            split=how.split,
            into=int(into),
        )
        function = self._library.function(how.spec, "merge_states")
        function((how.grid,), (how.threads,), (block,))


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> AttentionState:
    """States over nothing."""
    return AttentionState(np.zeros(shape, dtype), np.full(shape[:2], -np.inf, np.float32))


def _written(merged: AttentionState, into: AttentionState | None) -> AttentionState:
    """`merged`, or `into` overwritten with it."""
    if into is None:
        return merged
    np.copyto(into.o, merged.o)
    np.copyto(into.lse, merged.lse)
    return into
