"""From a batch's plans to launches that are ready to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from kernels.backend import Int32, Plan
from kernels.cuda.attention.choice import batch_kind
from kernels.cuda.attention.config import LOG2E, AttentionConfig, attend_struct
from kernels.cuda.attention.kernel_sets import KernelSet, kernel_sets
from kernels.cuda.attention.steps import (
    DevicePlan,
    Step,
    Write,
    write_attend,
    write_merge,
    write_stored_wide,
    write_visible,
    write_wide,
)
from kernels.cuda.common.kernel import Kernel
from kernels.cuda.common.structs import (
    ATTEND_PARAMS,
    MERGE_PARAMS,
    STORED_KV,
    VISIBLE_PARAMS,
    VISIBLE_TABLE,
    WIDE_PARAMS,
    packed,
    writer,
)
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.transfer import Transfers
from kernels.cuda.latent import variants as latent
from kernels.cuda.merge.variants import merge_launch
from kernels.cuda.plan.merges import MergeLists
from kernels.cuda.plan.planner import make_work
from kernels.cuda.plan.runs import KernelWork
from kernels.cuda.plan.tiles import PAGE
from kernels.cuda.visible import table as visible
from kernels.cuda.wide import variants as wide

SHORT_LAUNCH: Final = 512
"""Keys a warp up to which a launch gains by beginning while its predecessor ends."""
SHORT_LATENT: Final = 512
"""Keys a unit of the latent kernel up to which it does. Of longer ones, those of one sequence read
it at different times where CTAs start in the order in which earlier ones end: 2 % slower."""
MOST_APPENDING: Final = 256
"""Threads of a block that has registers to store new tokens."""
TAKE_TABLES: Final = ("attend_tile", wide.ENTRY)
"""Kernels that walk past the tiles of keys of which a custom mask leaves nothing."""
LATE_ROWS: Final = 64
"""Rows a unit on average below which units of fixed splits are taken late, because their lengths
are unlike. Short units of many rows begin too late then: 12 % slower. Elsewhere they are where
there is one for each CTA, of which some begin after another kernel, or where tokens are copied."""
_write_arrays: Final = writer(
    ATTEND_PARAMS, "items", "worker_begin", "kv_indices", "order", "positions"
)
_write_workers: Final = writer(ATTEND_PARAMS, "num_workers")
_write_team: Final = writer(ATTEND_PARAMS, "alone", "team")
_NO_MERGE: Final = bytes(MERGE_PARAMS.itemsize)
_write_lists: Final = writer(
    MERGE_PARAMS,
    *("indptr", "members", "chunks", "order", "num_rows", "num_kv_heads", "group_size"),
    *("chunk_rows", "head_dim", "split"),
)


class _Places(NamedTuple):
    """Device addresses of a plan's arrays; the last three are its merge lists."""

    order: int
    positions: int
    kv_indices: int
    indptr: int
    members: int
    chunks: int


class DevicePlanBuilder:
    """What all plans of one configuration share: kernels, structs half filled.

    `schedule` is the wide kernel's counters on the device, two for each of two launches that run
    side by side, `running` its running states. Raises Unsupported for a head_dim that has no
    kernels.
    """

    def __init__(
        self,
        config: AttentionConfig,
        library: Library,
        multiprocessors: int,
        schedule: int,
        split_keys: int = 0,
        running: int = 0,
        pool_page: int = 16,
    ) -> None:
        self._config, self._library = config, library
        self._multiprocessors, self._schedule = multiprocessors, schedule
        how = (split_keys, pool_page)
        self._sets = kernel_sets(config.shape, library.arch, multiprocessors, *how)
        self._usual = self._sets["usual"]
        self._struct = attend_struct(config)
        self._split_keys, self._running = split_keys, running

    def make(
        self,
        requests: Sequence[tuple[int, Plan]],
        transfers: Transfers,
        team: int | None,
    ) -> DevicePlan:
        """Plan, upload and lay out the launches of (layer, plan) requests.

        `team` forces the size of teams.
        """
        plans = [plan for _, plan in requests]
        kernels = self.kernels_for(plans)
        planner = kernels.planner if team is None else replace(kernels.planner, team=team)
        work = make_work(requests, planner)
        merges = work.merges
        arrays = [launch.items.reshape(-1) for launch in work.kernels]
        arrays += (work.order, work.positions, work.kv_indices)
        arrays += (merges.indptr, merges.members, merges.chunks)
        arrays += [launch.worker_begin for launch in work.kernels]
        if self._config.masked:
            arrays += [visible_table(launch, kernels) for launch in work.kernels]
        buffer, at = transfers.upload_ints(arrays)
        count = len(work.kernels)
        places = _Places(*at[count : count + 6])
        merged = len(merges.chunks) > 0
        alone = len(work.kernels) == 1 and self._library.overlaps
        follows = not merged
        overlaps = alone and _begins_early(work.kernels[0], not merged)
        apart = self._split_keys > 0 and count > 1
        before: list[Step] = []
        steps: list[Step] = []
        others: list[Step] = []
        for index, launch in enumerate(work.kernels):
            items, worker_begin = at[index], at[count + 6 + index]
            kernel, persistent = kernels.kernel(launch), launch.shape.persistent
            by_maps = kernel.entry in (wide.ENTRY, latent.ENTRY)
            here = follows and by_maps
            table = (0, 0)
            if self._config.masked and kernel.entry in TAKE_TABLES:
                tiles = at[2 * count + 6 + index]
                finder, table = self._visible_step(launch, kernel, places, items, tiles)
                (before if here else others).append(finder)
            if by_maps:
                beside = index > 0 if apart else bool(steps)
                early = beside if apart else here or not beside
                step = self._wide_step(launch, kernels, places, items, table, beside, early)
            else:
                lists = 0 if launch.one_each else worker_begin
                step = self._mma_step(launch, kernel, places, items, lists, table, overlaps)
            (steps if persistent or here else others).append(step)
        return DevicePlan(
            plans=tuple(plans),
            buffer=buffer,
            steps=(*before, *(steps or others)),
            beside=tuple(others if steps else ()),
            merge=self._merge_step(merges, places, alone) if merged else None,
            num_rows=work.num_rows,
            partial_rows=merges.num_partial_rows,
            sums=any(launch.joins for launch in work.kernels),
            appends=len(work.kernels) == 1 and self._appends(work.kernels[0], kernels),
        )

    def _appends(self, launch: KernelWork, kernels: KernelSet) -> bool:
        """Whether a batch's only kernel can store new tokens: kAppends of attend_narrow.cu."""
        plain = self._config.kv.dtype == self._config.compute and not self._config.shape.general
        narrow = launch.shape.persistent and not launch.heads_first
        return narrow and plain and kernels.kernel(launch).threads <= MOST_APPENDING

    def kernels_for(self, plans: Sequence[Plan]) -> KernelSet:
        """The kernels that such a batch gets."""
        if len(self._sets) == 1:
            return self._usual
        return self._sets[batch_kind(plans, self._usual.planner, self._sets)]

    def _visible_step(
        self, launch: KernelWork, kernel: Kernel, places: _Places, items: int, tiles: int
    ) -> tuple[Step, tuple[int, int]]:
        """What finds the key tiles that a mask leaves something of, for a kernel of many rows.

        With the table `tiles` it fills: its address, and words an item.
        """
        words = visible.table_words(launch.items, kernel.tile_keys)
        block = packed(
            VISIBLE_PARAMS,
            items=items,
            positions=places.positions,
            tiles=tiles,
            words=words,
            tile_keys=kernel.tile_keys,
            group_size=self._config.group_size,
            window_left=self._config.scoring.window_left,
        )
        function = self._library.function(visible.SPEC, visible.ENTRY)
        grid = launch.num_items * words
        launcher = Launcher(function, grid, visible.THREADS, 0, block)
        return Step(launcher, write_visible), (tiles, words)

    def _mma_step(
        self,
        launch: KernelWork,
        kernel: Kernel,
        places: _Places,
        items: int,
        lists: int,
        table: tuple[int, int],
        overlaps: bool,
    ) -> Step:
        heads, workers, struct = self._config.kv.num_kv_heads, launch.num_workers, self._struct
        if launch.shape.persistent:
            grid = -(-workers * heads * launch.team * 32 // kernel.threads)
        else:
            grid = launch.num_items * heads
            struct += packed(VISIBLE_TABLE, tiles=table[0], words=table[1])  # TileParams
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        sizes = (grid, kernel.threads, kernel.shared_bytes)
        launcher = Launcher(function, *sizes, struct, overlaps=overlaps)
        pages = 0 if self._config.kv.contiguous else places.kv_indices
        arrays = (items, lists, pages, places.order, places.positions)
        _write_arrays(launcher.memory, *arrays)
        _write_workers(launcher.memory, workers)
        _write_team(launcher.memory, int(overlaps), launch.team)
        return Step(launcher, write_attend)

    def _wide_step(
        self,
        launch: KernelWork,
        kernels: KernelSet,
        places: _Places,
        items: int,
        table: tuple[int, int],
        beside: bool,
        early: bool,
    ) -> Step:
        kernel = kernels.kernel(launch)
        kv, scoring = self._config.kv, self._config.scoring
        runs = len(np.unique(launch.items[:, PAGE]))
        alike = kv.head_dim == kv.v_head_dim
        heads = wide.heads_together(kv.num_kv_heads, launch.num_items, runs, alike)
        units, ctas = launch.num_items * kv.num_kv_heads, launch.shape.workers
        has_maps = wide.has_maps(kv.dtype, 0 if kv.contiguous else kv.page_size)
        late = not has_maps or (beside and units <= ctas)
        if kernels.planner.splits:
            late = launch.num_rows < LATE_ROWS * launch.num_items
        grid = min(units, ctas)
        sm_scale, soft_cap = scoring.sm_scale * kv.k_scale, scoring.logits_soft_cap
        block = packed(
            WIDE_PARAMS,
            items=items,
            kv_indices=0 if kv.contiguous else places.kv_indices,
            order=places.order,
            positions=places.positions,
            schedule=self._schedule + 8 * (self._split_keys > 0 and beside),
            scale=LOG2E * (soft_cap or sm_scale),
            cap_scale=sm_scale / soft_cap if soft_cap else 0.0,
            window_left=scoring.window_left,
            num_items=launch.num_items,
            late=late,
            own_units=0 if beside else grid,
            num_kv_heads=kv.num_kv_heads,
            group_size=self._config.group_size,
            head_block=kv.num_kv_heads if launch.all_heads else heads,
            num_pages=kv.num_pages,
            visible=table[0],
            visible_words=table[1],
            running=self._running,
            split_keys=self._split_keys,
            first_split=self._usual.planner.splits.first,
            page_size=kv.page_size,
        )
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        write: Write = write_stored_wide
        if not has_maps:
            strides = {name: at for name, at in kv.strides.items() if name != "num_kv_heads"}
            before = packed(STORED_KV, **strides, v_scale=kv.v_scale)
            parameters: tuple[int, ...] = wide.STORED_PARAMETERS
        else:
            write = write_wide(lambda layer: kv.maps(layer, kernel.tile_keys))
            before, parameters = bytes(wide.PARAMS_AT), wide.PARAMETERS
        sizes = (grid, kernel.threads, kernel.shared_bytes)
        if kernel.entry == latent.ENTRY:
            early = early and launch.num_keys <= SHORT_LATENT * launch.num_items
        overlaps = early and self._library.overlaps
        launcher = Launcher(function, *sizes, before + block, parameters, overlaps)
        return Step(launcher, write)

    def _merge_step(self, merges: MergeLists, places: _Places, overlaps: bool) -> Step:
        kv = self._config.kv
        units = len(merges.chunks) * merges.chunk_rows * kv.num_kv_heads
        how = merge_launch(
            kv.v_head_dim,
            True,
            self._config.compute,
            units,
            merges.longest,
            self._multiprocessors,
            bool(self._split_keys),
        )
        function = self._library.function(how.spec, "merge_states")
        launcher = Launcher(function, how.grid, how.threads, 0, _NO_MERGE, overlaps=overlaps)
        lists = (places.indptr, places.members, places.chunks, places.order)
        sizes = (len(merges.chunks), kv.num_kv_heads, self._config.group_size, merges.chunk_rows)
        _write_lists(launcher.memory, *lists, *sizes, kv.v_head_dim, how.split)
        return Step(launcher, write_merge)


def visible_table(launch: KernelWork, kernels: KernelSet) -> Int32:
    """The place of a table of visible tiles; empty for kernels that have none."""
    kernel = kernels.kernel(launch)
    if kernel.entry not in TAKE_TABLES:
        return np.empty(0, np.int32)
    words = visible.table_words(launch.items, kernel.tile_keys)
    return np.zeros(launch.num_items * words * visible.ELEMENT_BYTES // 4, np.int32)


def _begins_early(launch: KernelWork, last: bool) -> bool:
    """Whether the only kernel of a batch may begin while its predecessor ends; `last`: no merge.

    The narrow one may, and reads the plan meanwhile; but a long launch of it that no merge follows
    is faster when it begins after that (measured).
    """
    short = launch.num_keys <= SHORT_LAUNCH * launch.num_workers * launch.team
    return launch.shape.persistent and (short or not last)
