"""Attention states of several engines made one, in the order of torch's current stream.

The algebra is that of cascade attention (FlashInfer, arXiv 2501.01005): with `w_r = exp(lse_r -
lse)` and `lse = log sum_r exp(lse_r)`, o is the sum of `w_r o_r`. A state without keys, (0, -inf),
changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
State = tuple[torch.Tensor, torch.Tensor]
"""o [n, H, D], lse [n, H] float32, natural."""

MERGED_O: Final = """
template <typename T> T merged_o(T a, T lse_a, T b, T lse_b) {
  T top = lse_a > lse_b ? lse_a : lse_b;
  if (top == -INFINITY) return T(0);
  T weight_a = exp(lse_a - top), weight_b = exp(lse_b - top);
  return (weight_a * a + weight_b * b) / (weight_a + weight_b);
}
"""
MERGED_LSE: Final = """
template <typename T> T merged_lse(T a, T b) {
  T top = a > b ? a : b;
  if (top == -INFINITY) return top;
  return top + log(exp(a - top) + exp(b - top));
}
"""


def merge(states: Sequence[State], o: torch.Tensor, lse: torch.Tensor) -> None:
    """The states of the same rows over disjoint keys as one, into `o` and `lse`."""
    merged_o, merged_lse = fused() if o.is_cuda else (plain_o, torch.logaddexp)
    held, held_lse = states[0]
    for part, part_lse in states[1:]:
        held = merged_o(held, held_lse[..., None], part, part_lse[..., None])
        held_lse = merged_lse(held_lse, part_lse)
    o.copy_(held)
    lse.copy_(held_lse)


@functools.cache
def fused() -> tuple[Any, Any]:
    """Each of the two as one kernel, which torch compiles the first time."""
    make: Any = torch.cuda.jiterator._create_jit_fn
    return make(MERGED_O), make(MERGED_LSE)


def plain_o(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    share = torch.sigmoid(lse_b - lse_a).nan_to_num_(0.0)
    return torch.lerp(a.float(), b.float(), share)
