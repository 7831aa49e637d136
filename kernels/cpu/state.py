"""Attention states in the making: running maximum, sum and output, and how they are joined.

A row's state over a set of keys is m = max s, l = sum exp2(s - m), o = sum exp2(s - m) v (online
softmax: Milakov & Gimelshein, arXiv 1805.02867), with scores in units of log 2. States over
disjoint keys join by moving both to the larger m. The empty state is m = -inf, l = 0, o = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.backend import Array, AttentionState
from kernels.cpu.tensors import dtype_name, to_numpy, to_torch

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class States:
    """Of n rows: float32 `m, l [n, heads]`, `o [n, heads, dim]`; filled in place."""

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 (the papers' name)
    o: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int) -> States:
        return cls(
            torch.full((rows, heads), -torch.inf),
            torch.zeros(rows, heads),
            torch.zeros(rows, heads, dim),
        )

    def join(self, rows: Rows, other: States) -> None:
        """Join `other`'s states to those of `rows`, one to one."""
        m = torch.maximum(self.m[rows], other.m)
        top = finite(m)
        mine, theirs = torch.exp2(self.m[rows] - top), torch.exp2(other.m - top)
        self.m[rows] = m
        self.l[rows] = self.l[rows].mul(mine).addcmul_(other.l, theirs)
        self.o[rows] = self.o[rows].mul(mine[..., None]).addcmul_(other.o, theirs[..., None])

    def finish(self, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised o, and lse in natural log; empty rows give exactly (0, -inf)."""
        factor = torch.where(self.l > 0, v_scale / self.l, 0.0)
        return self.o.mul_(factor[..., None]), self.m.add(self.l.log2()).mul_(math.log(2))


def finite(m: torch.Tensor) -> torch.Tensor:
    """m, with 0 in place of -inf: what to subtract so that no -inf meets a -inf."""
    return m.masked_fill(m == -torch.inf, 0.0)


def merge(o: Array, lse: Array, indptr: Array, into: AttentionState | None) -> AttentionState:
    """`Backend.merge`: weights exp(lse - max) within each list, one pass over o."""
    counts = torch.from_numpy(indptr[1:] - indptr[:-1]).to(torch.int64)
    lists = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    states, values = to_torch(lse), to_torch(o).to(torch.float32)
    if into is not None:
        lists = torch.cat((lists, torch.arange(counts.numel())))
        states = torch.cat((states, to_torch(into.lse)))
        values = torch.cat((values, to_torch(into.o).to(torch.float32)))
    merged_o, merged_lse = _merge_lists(values, states, lists, counts.numel())
    o_out, lse_out = to_numpy(merged_o, dtype_name(o.dtype)), to_numpy(merged_lse, "fp32")
    if into is None:
        return AttentionState(o_out, lse_out)
    into.o[...] = o_out
    into.lse[...] = lse_out
    return into


def _merge_lists(
    o: torch.Tensor, lse: torch.Tensor, lists: torch.Tensor, num_lists: int
) -> tuple[torch.Tensor, torch.Tensor]:
    m = torch.full((num_lists, lse.shape[1]), -torch.inf)
    m.scatter_reduce_(0, lists[:, None].expand_as(lse), lse, "amax")
    weight = torch.exp(lse - finite(m)[lists])
    total = torch.zeros_like(m).index_add_(0, lists, weight)
    # an empty state weighs nothing, whatever its o holds: 0 * NaN must not get in
    weighted = (o * weight[..., None]).masked_fill_((lse == -torch.inf)[..., None], 0.0)
    sums = torch.zeros(num_lists, *o.shape[1:]).index_add_(0, lists, weighted)
    safe = torch.where(total > 0, total, 1.0)
    return sums.div_(safe[..., None]), m + total.log()
