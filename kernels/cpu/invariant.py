"""Attention whose bits do not depend on the batch: `numerics: invariant` on the CPU.

A row's keys are split at fixed positions of its sequence, `SPLIT_KEYS` apart, and its states of the
splits are joined in order. Nothing here depends on which rows or sequences a split meets:

- Products have a fixed number of keys, hidden ones included, and a multiple of `PACKED` rows: then
  every row of them has the same bits at any place (the library takes other ways for few).
- `exp`, `log` and `tanh` of torch give an element the same bits at any place; `exp2` and
  fused multiplications do not, because the last elements of an array are computed one by one.
- An empty state changes nothing, so splits that a row does not see may be left out or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from kernels.backend import Scoring
from kernels.cpu.pool import Pool
from kernels.cpu.state import Rows, finite
from kernels.cpu.steps import Step, load

SPLIT_KEYS: Final = 256
PACKED: Final = 16

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of n rows: `m, l [n, heads]`, `o [n, heads, dim]` as in `state.py`, but in units of log e."""


def attention(
    pool: Pool, steps: Iterable[Step], first_page: int, q: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of all rows of `q [n, num_qo_heads, head_dim]`, in plan order.

    The steps, one split of some sequences each, come in order of position.
    """
    m, l = torch.full(q.shape[:2], -torch.inf), torch.zeros(q.shape[:2])  # noqa: E741
    o = torch.zeros(*q.shape[:2], pool.value_dim)
    scale, cap = scoring.sm_scale * pool.k.scale, scoring.logits_soft_cap
    q = q.to(torch.float32) * (scale / cap if cap > 0 else scale)
    for step in steps:
        k, v = load(pool, step, first_page)
        for tile in step.tiles:
            found = _tile_states(q[tile.index], k, v, tile.shape, tile.hidden, cap)
            _join((m, l, o), tile.index, found)
    divisor = torch.where(l == 0, 1.0, l)
    # adding 0 makes 0 of -0, which joining an empty state would make too
    return o.div_(divisor[..., None]).mul_(pool.v.scale).add_(0.0), m.add(l.log())


def _tile_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: tuple[int, int],
    hidden: torch.Tensor | None,
    cap: float,
) -> States:
    """States of `q [G * R, heads, dim]` (`shape` = G, R) over one split's keys, row for row."""
    groups, rows = shape
    heads, dim = q.shape[1:]
    kv_heads = k.shape[0] // groups
    group, num_keys = heads // kv_heads, k.shape[1]
    count = rows * group
    packed = q.new_zeros(groups * kv_heads, -(-count // PACKED) * PACKED, dim)
    given = q.view(groups, rows, kv_heads, group, dim).transpose(1, 2)
    packed.view(groups, kv_heads, -1, dim)[:, :, :count] = given.flatten(2, 3)
    s = torch.bmm(packed, k.transpose(1, 2))
    if cap > 0:
        s.tanh_().mul_(cap)
    if hidden is not None:
        seen = s.view(groups, kv_heads, -1, num_keys)[:, :, :count]
        by_row = seen.view(groups, kv_heads, rows, group, num_keys)
        by_row.masked_fill_(hidden[:, None, :, None, :], -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = s.sub_(finite(m)).exp_()
    l, o = p.sum(-1), torch.bmm(p, v)  # noqa: E741 (the papers' name)
    o.masked_fill_((l == 0)[..., None], 0.0)  # weights of 0 times a hidden inf or NaN are NaN

    def unpack(x: torch.Tensor) -> torch.Tensor:
        apart = x[:, :count].reshape(groups, kv_heads, rows, group, *x.shape[2:])
        return apart.transpose(1, 2).reshape(groups * rows, heads, *x.shape[2:])

    return unpack(m.squeeze(-1)), unpack(l), unpack(o)


def _join(states: States, rows: Rows, others: States) -> None:
    """Merge states into the states of `rows`, one to one."""
    (m, l, o), (more_m, more_l, more_o) = states, others  # noqa: E741
    joint = torch.maximum(m[rows], more_m)
    top = finite(joint)
    keep, add = (m[rows] - top).exp_(), (more_m - top).exp_()
    m[rows] = joint
    l[rows] = l[rows].mul(keep).add_(more_l.mul(add))
    o[rows] = o[rows].mul(keep[..., None]).add_(more_o.mul(add[..., None]))
