"""Plans: index arrays of the keys that each query row attends, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.core.errors import InvalidRequest
from service.core.page_table import PageTable
from service.core.plans.group_levels import group_level, visible_runs, windowed_level
from service.core.plans.levels import CascadeLevel, PlanBatch, Runs, cut_level
from service.core.plans.ragged import Int32, indptr, lens_of, ramps
from service.core.plans.segments import Segments, cut_segments
from service.core.sequences.books import Ids
from service.core.tree import PrefixTree

CascadeMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """The levels (0 = most shared) that query rows attend; a row's states of all levels are merged.

    Plan row r is row `order[r]` of the request (None: the identity). `positions` int32 [n], in plan
    order, is the row's position in its own sequence, `kv_len - qo_len + i`; negative if there are
    more queries than keys. `is_cascade`: sequences share some level. `tokens_read` counts the keys
    of all segments that have query rows, `tokens_flat` the keys read without sharing. `page_size`
    is that of the group of the plan's layer.
    """

    levels: tuple[CascadeLevel, ...]
    positions: Int32
    order: Int32 | None
    is_cascade: bool
    tokens_read: int
    tokens_flat: int
    page_size: int

    @property
    def num_levels(self) -> int:
        return len(self.levels)


def make_plan(
    tree: PrefixTree,
    ids: Ids,
    layer: int,
    qo_indptr: Int32,
    causal: bool,
    mode: CascadeMode,
    split_keys: int = 0,
) -> CascadePlan:
    """The plan for rows `qo_indptr[b]:qo_indptr[b+1]` attending all of sequence `ids[b]`.

    `mode`: `always` makes a segment of every range of pages that several sequences share, `auto` of
    ranges that save more than they cost, `never` of none. With `split_keys`, segments end at
    multiples of it, short of those pages. In a layer group with a window every sequence is a
    segment of its own, without the pages before its rows' windows.

    Raises `UnknownSequence`; `WindowReturned` for rows that see returned pages.
    """
    kv_lens, leaves = tree.read(ids, layer)
    satellites, window = tree.satellites, None
    if satellites is not None and (window := satellites.window_at(layer)) is not None:
        mode = "never"
    qo_lens = lens_of(qo_indptr)
    segments = None
    if mode != "never":
        parents = [leaf.parent for leaf in leaves]
        segments = cut_segments(parents, (qo_lens > 0).tolist(), tree.page_size, mode == "auto")
    # The only row of a sequence is its last: no key comes after it.
    hides = causal and bool((qo_lens > 1).any())
    order = None
    if segments is not None and segments.shared and segments.order != list(range(len(leaves))):
        places = np.array(segments.order, dtype=np.intp)
        leaves = [leaves[place] for place in segments.order]
        order = ramps(qo_indptr[places], qo_lens[places])
        kv_lens, qo_lens = kv_lens[places], qo_lens[places]
    tables = [leaf.table for leaf in leaves]
    batch = PlanBatch(tree.page_size, tables, kv_lens, indptr(qo_lens))
    if window is not None:
        runs = [visible_runs(batch, window, split_keys)]
    else:
        runs = [_flat_runs(batch)] if segments is None else _runs(segments, batch, split_keys)
    cut = [cut_level(batch, level, hides) for level in runs]
    if satellites is not None and window is not None:
        cut = [windowed_level(satellites, window, cut[0], [leaf.id for leaf in leaves], batch)]
    elif satellites is not None:
        cut = [group_level(satellites, tree.group_of(layer), level) for level in cut]
    # Levels without keys add nothing, but a plan has at least one level.
    levels = [level for level in cut if level.kv_indices.size] or cut[:1]
    return CascadePlan(
        levels=tuple(levels),
        positions=ramps(kv_lens - qo_lens, qo_lens),
        order=order,
        is_cascade=segments is not None and bool(segments.shared),
        tokens_read=sum(level.tokens_read for level in levels),
        tokens_flat=int(kv_lens[qo_lens > 0].sum()) if window is None else cut[0].tokens_read,
        page_size=tree.page_size_at(layer),
    )


def explicit_levels(
    tree: PrefixTree,
    layer: int,
    levels: Sequence[tuple[Ids, Int32]],
    causal: bool,
    num_rows: int | None = None,
) -> CascadePlan:
    """The plan for rows that attend one whole sequence at each of `levels`.

    A level is `(ids, qo_indptr)`: rows `qo_indptr[s]:qo_indptr[s+1]` attend `ids[s]`. The plan has
    `num_rows` rows (None: as the longest level); rows that a level omits at either end attend
    nothing there. Every level's keys count from position 0. `causal` and `positions` apply to the
    last level.

    Raises `UnknownSequence`, and `InvalidRequest` if a row would see a page twice, or for a layer
    with a window.
    """
    if (satellites := tree.satellites) is not None and satellites.window_at(layer) is not None:
        rule = f"its group {tree.group_of(layer)} has a window, and levels are whole sequences"
        raise InvalidRequest("layer", layer, f"{rule}: decode or prefill there")
    total = max(int(qo_indptr[-1]) for _, qo_indptr in levels) if num_rows is None else num_rows
    batches = [_explicit_batch(tree, layer, *level, total) for level in levels]
    _check_disjoint(tree, layer, levels, batches)
    cut = [
        cut_level(batch, _flat_runs(batch), causal and batch is batches[-1]) for batch in batches
    ]
    if satellites is not None:
        cut = [group_level(satellites, tree.group_of(layer), level) for level in cut]
    qo_lens = lens_of(batches[-1].qo_indptr)
    return CascadePlan(
        levels=tuple(cut),
        positions=ramps(batches[-1].kv_lens - qo_lens, qo_lens),
        order=None,
        is_cascade=len(cut) > 1,
        tokens_read=sum(level.tokens_read for level in cut),
        tokens_flat=_flat_tokens(batches),
        page_size=tree.page_size_at(layer),
    )


def _flat_runs(batch: PlanBatch) -> Runs:
    """One run per sequence."""
    places = np.arange(batch.size, dtype=np.int32)
    return Runs(places, places + 1, np.zeros_like(places), batch.kv_lens)


def _runs(segments: Segments, batch: PlanBatch, split_keys: int) -> list[Runs]:
    """The segments of each level, shared ones first."""
    split_pages = max(split_keys // batch.page_size, 1)

    def aligned(page: int) -> int:
        return page - page % split_pages

    if not segments.shared:
        return [_flat_runs(batch)]
    level, num, begin = np.array(segments.own, dtype=np.int32).T
    own_level, own_begin = np.repeat(level, num), np.repeat(begin - begin % split_pages, num)
    tables: list[list[tuple[int, int, int, int]]] = [[] for _ in range(1 + int(level.max()))]
    for s in segments.shared:
        pages = aligned(s.begin), aligned(s.end)
        if pages[0] < pages[1]:
            tables[s.level].append((s.first, s.last, pages[0], pages[1] * batch.page_size))
    runs = []
    for depth, table in enumerate(tables):
        first, last, begin, end = np.array(table, dtype=np.int32).reshape(-1, 4).T
        own = np.flatnonzero(own_level == depth).astype(np.int32)
        runs.append(
            Runs(
                np.concatenate((first, own)),
                np.concatenate((last, own + 1)),
                np.concatenate((begin, own_begin[own])),
                np.concatenate((end, batch.kv_lens[own])),
            )
        )
    return runs


def _explicit_batch(
    tree: PrefixTree, layer: int, ids: Ids, qo_indptr: Int32, num_rows: int
) -> PlanBatch:
    """One explicit level; an empty sequence at each end has the rows before and after it."""
    nothing = np.zeros(1, dtype=np.int32)
    kv_lens, leaves = tree.read(ids, layer)
    return PlanBatch(
        tree.page_size,
        [PageTable(), *(leaf.table for leaf in leaves), PageTable()],
        np.concatenate((nothing, kv_lens, nothing)),
        np.concatenate((nothing, qo_indptr, np.array([num_rows], dtype=np.int32))),
    )


def _check_disjoint(
    tree: PrefixTree, layer: int, levels: Sequence[tuple[Ids, Int32]], batches: Sequence[PlanBatch]
) -> None:
    """Raises `InvalidRequest` if a row sees a page at two levels.

    Sequences share pages exactly if they share the first one, so only that is compared.
    """
    rows = []
    for batch in batches:
        kv_lens = batch.kv_lens.tolist()
        tops = [t.page(0) if n else -1 for t, n in zip(batch.tables, kv_lens, strict=True)]
        top = np.array(tops, dtype=np.int32)
        top[batch.kv_lens == 0] = -1
        rows.append(np.repeat(top, lens_of(batch.qo_indptr)))
    seen = np.sort(np.stack(rows), axis=0)
    twice = ((seen[1:] == seen[:-1]) & (seen[1:] >= 0)).any(axis=0)
    if twice.any():
        row = int(np.argmax(twice))
        names = [
            tree.books.look_up(ids).ids[int(np.searchsorted(at, row, "right")) - 1]
            for ids, at in levels
            if at[0] <= row < at[-1]
        ]
        rule = f"these sequences share pages, which row {row} would see twice"
        raise InvalidRequest("levels", names, rule)


def _flat_tokens(batches: Sequence[PlanBatch]) -> int:
    """Keys read if each run of rows with the same sequences read them separately."""
    ends = np.sort(np.concatenate([batch.qo_indptr for batch in batches]))
    runs = ends[:-1][ends[1:] != ends[:-1]]  # as np.unique, which imports a module at first
    places = [np.searchsorted(batch.qo_indptr, runs, "right") - 1 for batch in batches]
    return sum(int(b.kv_lens[at].sum()) for b, at in zip(batches, places, strict=True))
