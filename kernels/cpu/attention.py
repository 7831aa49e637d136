"""The attention loop: batches of segments over tiles of keys and rows, joined into states.

A tile of keys is gathered and widened once for all query rows of its segment, and a kv head meets
its group's heads and all rows that share the segment in one matrix product. So a shared prefix is
read once for all its queries, and no array grows with rows x keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kernels.backend import Array, Int64, Scoring
from kernels.cpu.pool import Pool
from kernels.cpu.state import Rows, States, finite
from kernels.cpu.work import LOAD_ELEMENTS, Batch, Work
from kernels.masks import read_bits

SCORE_ELEMENTS: Final = 1024 * 1024
"""Most scores held at a time: 4 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Scores:
    """`Scoring` folded into factors: q is multiplied once, and exp2 serves in place of exp."""

    q_factor: float
    cap: float  # in units of log 2; 0 is off
    window_left: int

    @classmethod
    def of(cls, scoring: Scoring, k_scale: float) -> Scores:
        factor, cap = scoring.sm_scale * k_scale, scoring.logits_soft_cap
        if cap > 0:
            return cls(factor / cap, cap / math.log(2), scoring.window_left)
        return cls(factor / math.log(2), 0.0, scoring.window_left)


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Keys `[begin, end)` of each of a batch's segments, times rows `[first_row, last_row)`."""

    begin: int
    end: int
    first_row: int
    last_row: int


def attention(pool: Pool, work: Work, q: torch.Tensor, scoring: Scoring) -> States:
    """States of all rows of `q [n, num_qo_heads, head_dim]`, in plan order."""
    scores = Scores.of(scoring, pool.k.scale)
    q = q.to(torch.float32) * scores.q_factor
    states = States.empty(*q.shape)
    for batch in work.batches:
        for tile, k, v in _tiles(pool, work, batch, scores, q.shape[1]):
            rows = batch.rows[:, tile.first_row : tile.last_row]
            hidden = _hidden(work, batch, scores, tile)
            index = _index(rows)
            states.join(index, _tile_states(q[index], k, v, rows.shape, hidden, scores.cap))
    return states


def _tiles(
    pool: Pool, work: Work, batch: Batch, scores: Scores, num_qo_heads: int
) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    """Tiles that any row may see, with the keys' K and V `[G * kv_heads, keys, dim]`."""
    groups, width = batch.pages.shape
    page_size, kv_heads, dim = pool.k.by_token.shape[2:]
    pages_per_tile = max(1, LOAD_ELEMENTS // (groups * page_size * kv_heads * dim))
    positions = work.positions[batch.rows]
    for first in range(0, width, pages_per_tile):
        begin = first * page_size
        pages = batch.pages[:, first : first + pages_per_tile]
        end = min(begin + pages.shape[1] * page_size, int(batch.num_keys.max()))
        rows_per_tile = max(1, SCORE_ELEMENTS // (groups * num_qo_heads * max(1, end - begin)))
        spans = [
            Tile(begin, end, row, min(row + rows_per_tile, positions.shape[1]))
            for row in range(0, positions.shape[1], rows_per_tile)
        ]
        seen = [tile for tile in spans if _may_see(positions, batch, scores, tile)]
        if not seen:
            continue
        index = torch.from_numpy(pages)
        k, v = pool.k.load(index, end - begin), pool.v.load(index, end - begin)
        _clear_dead(v, batch.num_keys - begin)
        for tile in seen:
            yield tile, k, v


def _may_see(positions: Int64, batch: Batch, scores: Scores, tile: Tile) -> bool:
    """Whether causality and the window leave any row of the tile any of its keys."""
    if tile.begin >= tile.end:
        return False
    rows = positions[:, tile.first_row : tile.last_row] - batch.kv_start[:, None]
    after = batch.causal and int(rows.max()) < tile.begin
    before = scores.window_left >= 0 and int(rows.min()) - scores.window_left >= tile.end
    return not (after or before)


def _clear_dead(v: torch.Tensor, live: Int64) -> None:
    """Zero V past each run's `live` keys: a weight of 0 times a dead slot's NaN is NaN."""
    keys = v.shape[1]
    if int(live.min()) >= keys:
        return
    dead = torch.from_numpy(np.arange(keys) >= live[:, None])
    v.view(live.size, -1, keys, v.shape[2]).masked_fill_(dead[:, None, :, None], 0.0)


def _hidden(work: Work, batch: Batch, scores: Scores, tile: Tile) -> torch.Tensor | None:
    """True where a row must not see a key, `[G, rows, keys]`; None where all is visible."""
    within = np.arange(tile.begin, tile.end)
    keys = batch.kv_start[:, None, None] + within
    rows = batch.rows[:, tile.first_row : tile.last_row]
    at = work.positions[rows][..., None]
    hidden: Array | None = None
    if int(batch.num_keys.min()) < tile.end:
        hidden = within >= batch.num_keys[:, None, None]
    if batch.causal and bool((at.min(axis=1) < keys.max(axis=2)).any()):
        hidden = _either(hidden, keys > at)
    window = scores.window_left
    if window >= 0 and bool((at.max(axis=1) - window > keys.min(axis=2)).any()):
        hidden = _either(hidden, keys < at - window)
    if batch.masked and work.mask is not None:
        bit = work.mask.row_offsets[rows][..., None] + keys
        # a padded run's keys have no bits of their own, and may lie past the last one
        bit = np.minimum(bit, 8 * work.mask.bits.size - 1)
        hidden = _either(hidden, ~read_bits(work.mask.bits, bit))
    return None if hidden is None else torch.from_numpy(hidden)


def _either(hidden: Array | None, more: Array) -> Array:
    return more if hidden is None else hidden | more


def _tile_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: tuple[int, ...],
    hidden: torch.Tensor | None,
    cap: float,
) -> States:
    """States of `q [G * R, heads, dim]` (`shape` = G, R) over one tile of keys, row for row."""
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
    m = s.amax(-1)
    p = s.sub_(finite(m)[..., None]).exp2_()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        apart = x.view(groups, kv_heads, rows, split[3], *x.shape[2:])
        return apart.transpose(1, 2).reshape(groups * rows, heads, *x.shape[2:])

    return States(unpack(m), unpack(p.sum(-1)), unpack(torch.bmm(p, v)))


def _index(rows: Int64) -> Rows:
    """Rows `[G, R]` as a slice where they are consecutive (a view), else as an index (a copy)."""
    flat = rows.reshape(-1)
    first, last = int(flat[0]), int(flat[-1])
    if last - first + 1 == flat.size and bool((np.diff(flat) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(flat)
