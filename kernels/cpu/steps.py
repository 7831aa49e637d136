"""Batches cut into steps: keys that are loaded at a time, and the tiles of rows that meet them.

A step has everything that the attention loop needs except the values: its rows, and what they must
not see, as torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kernels.backend import Array, Int64
from kernels.cpu.pool import Pool
from kernels.cpu.state import Rows
from kernels.cpu.work import LOAD_ELEMENTS, Batch, PagedShape, Work
from kernels.masks import read_bits

SCORE_ELEMENTS: Final = 1024 * 1024
"""Most scores held at a time: 4 MiB of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTile:
    """R rows of each of G segments: `index` finds them among all, `shape` is (G, R).

    `hidden` [G, R, keys] is True where a row must not see a key of its step; None: it sees all.
    """

    index: Rows
    shape: tuple[int, int]
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The first `num_keys` keys of each run of `pages` int64 [G, P], and the rows to attend them.

    `dead` [G, num_keys] is True past a run's last key; None where no run ends before.
    """

    pages: torch.Tensor
    num_keys: int
    dead: torch.Tensor | None
    tiles: tuple[RowTile, ...]

    def pages_from(self, first_page: int) -> torch.Tensor:
        """The pages, which count from page `first_page` of the pool, in the pool's own numbers."""
        return self.pages + first_page if first_page else self.pages


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Keys `[begin, end)` of each of a batch's segments, times rows `[first_row, last_row)`."""

    begin: int
    end: int
    first_row: int
    last_row: int


def steps(work: Work, shape: PagedShape, num_qo_heads: int, window_left: int) -> Iterator[Step]:
    """All steps with rows that may see something of them."""
    for batch in work.batches:
        yield from _batch_steps(work, batch, shape, num_qo_heads, window_left)


def load(pool: Pool, step: Step, first_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's K and V, V of dead slots zeroed: a weight of 0 times a dead slot's NaN is NaN."""
    k, v = pool.load(step.pages_from(first_page), step.num_keys)
    if step.dead is not None:
        dead = step.dead
        v.view(len(dead), -1, *v.shape[1:]).masked_fill_(dead[:, None, :, None], 0.0)
    return k, v


def _batch_steps(
    work: Work, batch: Batch, shape: PagedShape, num_qo_heads: int, window: int
) -> Iterator[Step]:
    groups, width = batch.pages.shape
    pages_per_step = max(1, LOAD_ELEMENTS // (groups * shape.page_elements))
    positions = work.positions[batch.rows]
    longest = int(batch.num_keys.max())
    if work.split_keys:
        pages_per_step, longest = width, work.split_keys
    for first in range(0, width, pages_per_step):
        begin = first * shape.page_size
        pages = batch.pages[:, first : first + pages_per_step]
        end = min(begin + pages.shape[1] * shape.page_size, longest)
        rows_per_tile = max(1, SCORE_ELEMENTS // (groups * num_qo_heads * max(1, end - begin)))
        spans = [
            _Span(begin, end, row, min(row + rows_per_tile, positions.shape[1]))
            for row in range(0, positions.shape[1], rows_per_tile)
        ]
        tiles = [
            _row_tile(work, batch, window, span)
            for span in spans
            if _may_see(positions, batch, window, span)
        ]
        if tiles:
            dead = _dead(batch.num_keys - begin, end - begin)
            yield Step(torch.from_numpy(pages), end - begin, dead, tuple(tiles))


def _may_see(positions: Int64, batch: Batch, window: int, span: _Span) -> bool:
    """Whether causality and the window leave any row of the span any of its keys."""
    if span.begin >= span.end:
        return False
    rows = positions[:, span.first_row : span.last_row] - batch.kv_start[:, None]
    after = batch.causal and int(rows.max()) < span.begin
    before = window >= 0 and int(rows.min()) - window >= span.end
    return not (after or before)


def _row_tile(work: Work, batch: Batch, window: int, span: _Span) -> RowTile:
    rows = batch.rows[:, span.first_row : span.last_row]
    return RowTile(_index(rows), rows.shape, _hidden(work, batch, window, span))


def _dead(live: Int64, num_keys: int) -> torch.Tensor | None:
    """Where each run has more than its `live` keys."""
    if int(live.min()) >= num_keys:
        return None
    return torch.from_numpy(np.arange(num_keys) >= live[:, None])


def _hidden(work: Work, batch: Batch, window: int, span: _Span) -> torch.Tensor | None:
    """True where a row must not see a key, `[G, rows, keys]`; None where all is visible."""
    within = np.arange(span.begin, span.end)
    keys = batch.kv_start[:, None, None] + within
    rows = batch.rows[:, span.first_row : span.last_row]
    at = work.positions[rows][..., None]
    hidden: Array | None = None
    if int(batch.num_keys.min()) < span.end:
        hidden = within >= batch.num_keys[:, None, None]
    if batch.causal and bool((at.min(axis=1) < keys.max(axis=2)).any()):
        hidden = _either(hidden, keys > at)
    if window >= 0 and bool((at.max(axis=1) - window > keys.min(axis=2)).any()):
        hidden = _either(hidden, keys < at - window)
    if batch.masked and work.mask is not None:
        bit = work.mask.row_offsets[rows][..., None] + keys
        # keys of a padded run, and those left of a window, need have no bits of their own
        bit = np.clip(bit, 0, 8 * work.mask.bits.size - 1)
        hidden = _either(hidden, ~read_bits(work.mask.bits, bit))
    return None if hidden is None else torch.from_numpy(hidden)


def _either(hidden: Array | None, more: Array) -> Array:
    return more if hidden is None else hidden | more


def _index(rows: Int64) -> Rows:
    """Rows `[G, R]` as a slice where they are consecutive (a view), else as an index (a copy)."""
    flat = rows.reshape(-1)
    first, last = int(flat[0]), int(flat[-1])
    if last - first + 1 == flat.size and bool((np.diff(flat) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(flat)
