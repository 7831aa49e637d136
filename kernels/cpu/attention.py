"""The attention loop: steps of keys against tiles of rows, joined into states.

16-bit queries over a 16-bit pool go another way, `fused.py`.

A step's keys are gathered and widened once for all query rows of its segments, and a kv head meets
its group's heads and all rows that share the segment in one matrix product. So a shared prefix is
read once for all its queries, and no array grows with rows x keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from kernels.backend import Scoring
from kernels.cpu import fused
from kernels.cpu.pool import Pool
from kernels.cpu.state import Rows, States, finite
from kernels.cpu.steps import Step, load


@dataclass(frozen=True, slots=True)
class Scores:
    """`Scoring` folded into factors: q is multiplied once, and exp2 serves in place of exp."""

    q_factor: float
    cap: float  # in units of log 2; 0 is off

    @classmethod
    def of(cls, scoring: Scoring, k_scale: float) -> Scores:
        factor, cap = scoring.sm_scale * k_scale, scoring.logits_soft_cap
        if cap > 0:
            return cls(factor / cap, cap / math.log(2))
        return cls(factor / math.log(2), 0.0)


def attention(
    pool: Pool, steps: Iterable[Step], first_page: int, q: torch.Tensor, scoring: Scoring
) -> States:
    """States of all rows of `q [n, num_qo_heads, head_dim]`, in plan order.

    The steps' pages count from page `first_page` of the pool.
    """
    everything, states = slice(0, q.shape[0]), None
    empty = (*q.shape[:2], pool.value_dim)
    for index, found in _found(pool, steps, first_page, q, scoring):
        if states is None and index == everything:
            states = found
            continue
        states = States.empty(*empty) if states is None else states.widened()
        states.join(index, found)
    return States.empty(*empty) if states is None else states


def _found(
    pool: Pool, steps: Iterable[Step], first_page: int, q: torch.Tensor, scoring: Scoring
) -> Iterator[tuple[Rows, States]]:
    """Each tile's rows, and their states over its step's keys."""
    if fused.is_fused(pool, q, scoring):
        for step in steps:
            k, v = fused.load(pool, step, first_page)
            for tile in step.tiles:
                found = fused.tile_states(q[tile.index], k, v, tile, scoring.sm_scale)
                if not found.are_finite:
                    # torch adds -inf to hidden scores: of NaN and +inf it makes NaN
                    scores = Scores.of(scoring, pool.k.scale)
                    rows = q[tile.index].float() * scores.q_factor
                    keys, values = k.flatten(0, 1).float(), v.flatten(0, 1).float()
                    found = _tile_states(rows, keys, values, tile.shape, tile.hidden, scores.cap)
                yield tile.index, found
        return
    scores = Scores.of(scoring, pool.k.scale)
    q = q.to(torch.float32) * scores.q_factor
    for step in steps:
        k, v = load(pool, step, first_page)
        for tile in step.tiles:
            found = _tile_states(q[tile.index], k, v, tile.shape, tile.hidden, scores.cap)
            yield tile.index, found


def _tile_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: tuple[int, int],
    hidden: torch.Tensor | None,
    cap: float,
) -> States:
    """States of `q [G * R, heads, dim]` (`shape` = G, R) over one step's keys, row for row."""
    groups, rows = shape
    heads, dim = q.shape[1:]
    kv_heads = k.shape[0] // groups
    split = (groups, rows, kv_heads, heads // kv_heads)
    packed = q.view(*split, dim).transpose(1, 2).reshape(groups * kv_heads, -1, dim)
    s = torch.bmm(packed, k.transpose(1, 2))
    if cap > 0:
        s.tanh_().mul_(cap)
    if hidden is not None:
        by_row = s.view(groups, kv_heads, rows, split[3], -1)
        by_row.masked_fill_(hidden[:, None, :, None, :], -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = s.sub_(finite(m)).exp2_()
    l, o = p.sum(-1), torch.bmm(p, v)  # noqa: E741 (the papers' name)
    blank = l == 0  # weights of 0 times a hidden inf or NaN are NaN
    if bool(blank.any()):
        o.masked_fill_(blank[..., None], 0.0)

    def unpack(x: torch.Tensor) -> torch.Tensor:
        if rows == 1:
            return x.view(groups, heads, *x.shape[2:])
        apart = x.view(groups, kv_heads, rows, split[3], *x.shape[2:])
        return apart.transpose(1, 2).reshape(groups * rows, heads, *x.shape[2:])

    return States(unpack(m.squeeze(-1)), unpack(l), unpack(o))
