"""Attention states in the making: running maximum, sum and output, and how they are joined.

A row's state over a set of keys is m = max s, l = sum exp2(s - m), o = sum exp2(s - m) v (online
softmax: Milakov & Gimelshein, arXiv 1805.02867), with scores in units of log 2. States over
disjoint keys join by moving both to the larger m. The empty state is m = -inf, l = 0, o = 0. A
score of NaN or +inf makes l NaN, and so the row's o and lse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from kernels.backend import Array, AttentionState, Int32
from kernels.cpu.tensors import on_host, to_torch

Rows = slice | torch.Tensor
_LOWEST: Final = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class States:
    """Of n rows: float32 `m, l [n, heads]`, `o [n, heads, dim]`; filled in place.

    `l` None is 1 everywhere: o is normalised, and may be of 16 bits.
    """

    m: torch.Tensor
    l: torch.Tensor | None  # noqa: E741 (the papers' name)
    o: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int) -> States:
        return cls(
            torch.full((rows, heads), -torch.inf),
            torch.zeros(rows, heads),
            torch.zeros(rows, heads, dim),
        )

    @property
    def are_finite(self) -> bool:
        """Whether every o is a number, and every m a number or -inf."""
        if not self.o.numel():
            return True
        least, most = self.o.aminmax()  # NaN is both; isfinite takes five times as long
        is_finite = math.isfinite(least.item()) and math.isfinite(most.item())
        return is_finite and self.m.amax().item() < math.inf

    def widened(self) -> States:
        """The same states, to be joined to: all float32, `l` spelled out."""
        if self.l is not None:
            return self
        return States(self.m, torch.ones_like(self.m), self.o.float())

    def join(self, rows: Rows, other: States) -> None:
        """Merge `other`'s states into the states of `rows`, one to one; these are `widened`."""
        sums = torch.ones_like(other.m) if other.l is None else other.l
        if self.l is None:
            raise RuntimeError("states without sums are joined to: this is a bug")
        m = torch.maximum(self.m[rows], other.m)
        top = finite(m)
        mine, theirs = torch.exp2(self.m[rows] - top), torch.exp2(other.m - top)
        self.m[rows] = m
        self.l[rows] = self.l[rows].mul(mine).addcmul_(sums, theirs)
        more = other.o.float()
        self.o[rows] = self.o[rows].mul(mine[..., None]).addcmul_(more, theirs[..., None])

    def finish(self, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised o, and lse in natural log; empty rows give exactly (0, -inf)."""
        if self.l is None:
            return self.o, self.m.mul_(math.log(2))
        # l is at least 1, of the key that has the maximum, or 0, or NaN
        factor = self.l.clamp(min=1.0).reciprocal_()
        if v_scale != 1.0:
            factor.mul_(v_scale)
        # m is +inf or -inf where l is NaN, or finite: NaN passes, and log2(0) is -inf
        return self.o.mul_(factor[..., None]), self.m.add(self.l.log2()).mul_(math.log(2))


def add_sinks(
    o: torch.Tensor, lse: torch.Tensor, sinks: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """States `o [n, H, D]`, `lse [n, H]` merged with the states (0, sinks[h]); float32."""
    sink = to_torch(sinks)
    top = torch.maximum(lse, sink)
    weight = torch.exp(lse - finite(top))
    total = weight + torch.exp(sink - finite(top))
    share = torch.where(total == 0, 0.0, weight / total)
    return o.float().mul(share[..., None]), top + total.log()


def finite(m: torch.Tensor) -> torch.Tensor:
    """m with a number in place of -inf, to be subtracted without computing -inf - -inf."""
    return m.clamp(min=_LOWEST)


def merge(
    o: Array, lse: Array, indptr: Int32, into: AttentionState | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Backend.merge`, float32: weights exp(lse - max) within each list, one pass over o."""
    counts = torch.from_numpy(indptr[1:] - indptr[:-1]).to(torch.int64)
    lists = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    states, values = to_torch(lse), to_torch(o).to(torch.float32)
    if into is not None:
        lists = torch.cat((lists, torch.arange(counts.numel())))
        states = torch.cat((states, to_torch(on_host(into.lse, "into.lse"))))
        values = torch.cat((values, to_torch(on_host(into.o, "into.o")).to(torch.float32)))
    return _merge_lists(values, states, lists, counts.numel())


def _merge_lists(
    o: torch.Tensor, lse: torch.Tensor, lists: torch.Tensor, num_lists: int
) -> tuple[torch.Tensor, torch.Tensor]:
    m = torch.full((num_lists, lse.shape[1]), -torch.inf)
    m.scatter_reduce_(0, lists[:, None].expand_as(lse), lse, "amax")
    weight = torch.exp(lse - finite(m)[lists])
    total = torch.zeros_like(m).index_add_(0, lists, weight)
    # what weighs nothing adds nothing, whatever its o holds: 0 * NaN must not get in
    weighted = (o * weight[..., None]).masked_fill_((weight == 0)[..., None], 0.0)
    sums = torch.zeros(num_lists, *o.shape[1:]).index_add_(0, lists, weighted)
    safe = torch.where(total == 0, 1.0, total)
    return sums.div_(safe[..., None]), m + total.log()
