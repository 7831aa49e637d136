"""Merges of states that come from outside: any heads and head_dim, whatever the pool's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.backend import (
    AttentionState,
    Done,
    DType,
    Float32,
    Int32,
    Pending,
    StageSeconds,
    Tensor,
)
from kernels.cuda import checks
from kernels.cuda.common.structs import MERGE_PARAMS, packed
from kernels.cuda.device.answers import Answers, states_made
from kernels.cuda.device.inputs import as_is, upload
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.pending import Guard, Result
from kernels.cuda.device.transfer import Transfers, mark
from kernels.cuda.merge.variants import merge_launch
from kernels.outputs import check_sinks, merge_place


class Merger:
    """Merges lists of states; `head_dim` is the one that has a kernel of its own."""

    def __init__(
        self,
        head_dim: int,
        multiprocessors: int,
        library: Library,
        transfers: Transfers,
        guarded: Guard,
        in_order: bool = False,
    ) -> None:
        self._head_dim, self._multiprocessors = head_dim, multiprocessors
        self._library, self._transfers, self._guarded = library, transfers, guarded
        self._in_order = in_order

    def merge(
        self,
        o: Tensor,
        lse: Tensor,
        indptr: Int32,
        into: AttentionState | None,
        out: AttentionState | None,
        sinks: Float32 | None,
    ) -> Pending[AttentionState]:
        """`Backend.merge`."""
        dtype = checks.check_states(o, lse, indptr)
        check_sinks(sinks, o)
        place = merge_place(o, indptr, into, out)
        shape = (len(indptr) - 1, *o.shape[1:])
        with self._guarded():
            if 0 in shape:
                return Done(place or _empty(shape, o.dtype))
            members = (o, lse, indptr) if into is None else (o, lse, indptr, into.o, into.lse)
            added = () if sinks is None else (sinks,)
            uploaded = upload(self._transfers, as_is(*members, *added))
            made = states_made([(shape, o.dtype, place)], o.dtype)
            answers = Answers(self._transfers, made, None if into is None else uploaded.at[3:5])
            with self._transfers.compute:
                longest = int(np.diff(indptr).max())
                given = 0 if sinks is None else uploaded.at[-1]
                how = (longest, into is not None, given)
                self.enqueue(shape, dtype, uploaded.at[:3], answers.at, *how)
            launched = mark(self._transfers.compute)
            uploaded.release(launched)
            done = answers.send(launched, uploaded)

        def state() -> AttentionState:
            taken = answers.take()
            return place or AttentionState(*taken)

        return Result(self._guarded, done, state, StageSeconds())

    def enqueue(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        members: Sequence[int],
        where: Sequence[int],
        longest: int,
        into: bool = False,
        sinks: int = 0,
    ) -> None:
        """Launch a merge of device addresses (o, lse, indptr) -> (o, lse) of `shape`.

        `shape` is (lists, heads, head_dim); `longest` is the length of the longest list; `sinks` is
        the address of one for each head, 0 without.
        """
        rows, heads, head_dim = shape
        special = head_dim if head_dim == self._head_dim else 0
        sizes = (rows * heads, longest, self._multiprocessors)
        how = merge_launch(special, False, dtype, *sizes, self._in_order)
        block = packed(
            MERGE_PARAMS,
            o_in=members[0],
            lse_in=members[1],
            indptr=members[2],
            o=where[0],
            lse=where[1],
            sinks=sinks,
            num_rows=rows,
            num_kv_heads=heads,
            group_size=1,
            chunk_rows=1,
            head_dim=head_dim,
            split=how.split,
            into=int(into),
        )
        function = self._library.function(how.spec, "merge_states")
        Launcher(function, how.grid, how.threads, 0, block, overlaps=self._library.overlaps)()


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> AttentionState:
    """States over nothing."""
    return AttentionState(np.zeros(shape, dtype), np.full(shape[:2], -np.inf, np.float32))
