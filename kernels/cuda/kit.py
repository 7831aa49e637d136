"""From work items to launches that are ready to go: the kernels of one scene, given a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from kernels.backend import Plan
from kernels.cuda import visible, wide
from kernels.cuda.launch import Launcher, Library, OverlappingLauncher
from kernels.cuda.planner import Launch, Merges, Work, make_work
from kernels.cuda.scene import Scene
from kernels.cuda.shapes import Kernel, attend_kernels, merge_launch, planner_shape, wide_variant
from kernels.cuda.steps import MergeStep, MmaStep, Step, VisibleStep, WideStep
from kernels.cuda.structs import ATTEND_PARAMS, MERGE_PARAMS, packed, writer
from kernels.cuda.tiles import KEYS, PAGE, Problem
from kernels.cuda.transfer import Transfers

SHORT_LAUNCH: Final = 512
"""Keys a warp up to which a launch gains by beginning while its predecessor ends."""
_LOG2E: Final = 1 / np.log(2)
_write_arrays: Final = writer(
    ATTEND_PARAMS, "items", "worker_begin", "kv_indices", "order", "positions"
)
_write_workers: Final = writer(ATTEND_PARAMS, "num_workers")
_write_team: Final = writer(ATTEND_PARAMS, "team")


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A batch's plan on the device. `plans` are kept so that their identity stays theirs.

    `beside` steps run beside `steps`, on another stream; `merge` comes after all of them.
    """

    plans: tuple[Plan, ...]
    buffer: Any
    steps: tuple[Step, ...]
    beside: tuple[Step, ...]
    merge: MergeStep | None
    num_rows: int
    partial_rows: int

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for plans whose launches are the same to the byte, if their tensors are."""
        apart = tuple(step.signature for step in self.beside)
        merge = None if self.merge is None else self.merge.signature
        return (tuple(step.signature for step in self.steps), apart, merge, self.partial_rows)


class _Places(NamedTuple):
    """Device addresses of a plan's arrays, the last three those of its merge lists."""

    order: int
    positions: int
    kv_indices: int
    indptr: int
    members: int
    chunks: int


class Kit:
    """What all plans of one scene share: kernels, the planner's problem, structs half filled.

    `schedule` is the wide kernel's counters on the device. Raises Unsupported for a head_dim that
    has no kernels.
    """

    def __init__(self, scene: Scene, library: Library, multiprocessors: int, schedule: int) -> None:
        store = scene.store
        self._scene, self._library = scene, library
        self._multiprocessors, self._schedule = multiprocessors, schedule
        page_size = 0 if store.contiguous else store.page_size
        options = (library.arch, store.head_dim, scene.compute, store.dtype)
        variant = wide_variant(*options, page_size, scene.scoring, scene.masked)
        self._kernels = attend_kernels(*options, scene.rare, variant)
        last, device = self._kernels[-1], (store.head_dim, store.dtype, multiprocessors)
        self._problem = Problem(
            group_size=scene.group_size,
            page_size=store.page_size,
            num_kv_heads=store.num_kv_heads,
            window_left=scene.scoring.window_left,
            shapes=tuple(planner_shape(k, *device, largest=k is last) for k in self._kernels),
        )
        self._struct = _scene_struct(scene)

    def make(
        self,
        requests: Sequence[tuple[int, Plan]],
        transfers: Transfers,
        team: int | None,
    ) -> Resident:
        """Plan, upload and lay out the launches of (layer, plan) requests.

        `team` forces the size of teams.
        """
        problem = self._problem if team is None else replace(self._problem, team=team)
        work = make_work(requests, problem)
        merges = work.merges
        arrays = [launch.items.reshape(-1) for launch in work.launches]
        arrays += [work.order, work.positions, work.kv_indices, merges.indptr, merges.members]
        arrays.append(merges.chunks)
        arrays += [launch.worker_begin for launch in work.launches]
        buffer, at = transfers.upload_ints(arrays)
        count = len(work.launches)
        places = _Places(*at[count : count + 6])
        make = self._launcher_type(work)
        narrow: list[Step] = []
        others: list[Step] = []
        for launch, items, worker_begin in zip(work.launches, at, at[count + 6 :], strict=False):
            kernel = self._kernels[launch.index]
            finder = None
            if self._scene.masked and not launch.shape.persistent:
                finder = self._visible_step(launch, kernel, places, items, transfers)
                others.append(finder)
            if kernel.entry == wide.ENTRY:
                others.append(self._wide_step(launch, kernel, places, items, finder))
                continue
            step = self._mma_step(launch, kernel, places, items, worker_begin, finder, make)
            (narrow if launch.shape.persistent else others).append(step)
        return Resident(
            plans=tuple(plan for _, plan in requests),
            buffer=buffer,
            steps=tuple(narrow or others),
            beside=tuple(others if narrow else ()),
            merge=self._merge_step(merges, places, make) if len(merges.chunks) else None,
            num_rows=work.num_rows,
            partial_rows=merges.num_partial_rows,
        )

    def _launcher_type(self, work: Work) -> type[Launcher]:
        """How the narrow kernel is launched, and the merge.

        Where these two are the whole batch, each may begin while its predecessor ends: the plan is
        read meanwhile. A long launch of the narrow kernel alone is faster when it begins after it
        (measured).
        """
        if len(work.launches) != 1 or not self._library.overlaps:
            return Launcher
        (launch,) = work.launches
        if len(work.merges.chunks) == 0:
            most = SHORT_LAUNCH * launch.num_workers * launch.team
            if int(launch.items[:, KEYS].sum()) > most:
                return Launcher
        return OverlappingLauncher if launch.shape.persistent else Launcher

    def _visible_step(
        self, launch: Launch, kernel: Kernel, places: _Places, items: int, transfers: Transfers
    ) -> VisibleStep:
        """What finds the key tiles that a mask leaves something of, for a kernel of many rows."""
        words = visible.table_words(launch.items, kernel.tile_keys)
        memory = transfers.scratch(launch.num_items * words * visible.ELEMENT_BYTES)
        block = packed(
            visible.PARAMS,
            items=items,
            positions=places.positions,
            tiles=memory.ptr,
            words=words,
            tile_keys=kernel.tile_keys,
            group_size=self._scene.group_size,
            window_left=self._scene.scoring.window_left,
        )
        function = self._library.function(visible.SPEC, visible.ENTRY)
        grid = launch.num_items * words
        launcher = Launcher(function, grid, visible.THREADS, 0, block)
        return VisibleStep(launcher, memory, words)

    def _mma_step(
        self,
        launch: Launch,
        kernel: Kernel,
        places: _Places,
        items: int,
        worker_begin: int,
        finder: VisibleStep | None,
        make: type[Launcher],
    ) -> MmaStep:
        heads = self._problem.num_kv_heads
        grid = launch.num_items * heads
        if launch.shape.persistent:
            grid = -(-launch.num_workers * heads * launch.team * 32 // kernel.threads)
        struct = self._struct
        if not launch.shape.persistent:  # TileParams of attend_tile.cu
            tiles, words = (finder.address, finder.words) if finder is not None else (0, 0)
            struct += packed(visible.TABLE, tiles=tiles, words=words)
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        launcher = make(function, grid, kernel.threads, kernel.shared_bytes, struct)
        pages = 0 if self._scene.store.contiguous else places.kv_indices
        lists = 0 if launch.one_each else worker_begin
        arrays = (items, lists, pages, places.order, places.positions)
        _write_arrays(launcher.memory, *arrays)
        _write_workers(launcher.memory, launch.num_workers)
        _write_team(launcher.memory, launch.team)
        return MmaStep(launcher)

    def _wide_step(
        self,
        launch: Launch,
        kernel: Kernel,
        places: _Places,
        items: int,
        finder: VisibleStep | None,
    ) -> WideStep:
        store, scoring = self._scene.store, self._scene.scoring
        runs = len(np.unique(launch.items[:, PAGE]))
        block = packed(
            wide.ARGUMENTS,
            items=items,
            kv_indices=0 if store.contiguous else places.kv_indices,
            order=places.order,
            positions=places.positions,
            schedule=self._schedule,
            sm_scale=scoring.sm_scale * store.k_scale,
            soft_cap=scoring.logits_soft_cap,
            window_left=scoring.window_left,
            num_items=launch.num_items,
            num_kv_heads=store.num_kv_heads,
            group_size=self._scene.group_size,
            head_block=wide.heads_together(store.num_kv_heads, launch.num_items, runs),
            num_pages=store.num_pages,
            visible=finder.address if finder is not None else 0,
            visible_words=finder.words if finder is not None else 0,
        )
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        grid = min(launch.num_items * store.num_kv_heads, self._multiprocessors)
        launcher = Launcher(
            function,
            grid,
            kernel.threads,
            kernel.shared_bytes,
            bytes(wide.ARGUMENTS_AT) + block,
            wide.PARAMETERS,
        )
        return WideStep(launcher, lambda layer: store.maps(layer, kernel.tile_keys))

    def _merge_step(self, merges: Merges, places: _Places, make: type[Launcher]) -> MergeStep:
        store = self._scene.store
        units = len(merges.chunks) * merges.chunk_rows * store.num_kv_heads
        how = merge_launch(
            store.head_dim,
            True,
            self._scene.compute,
            units,
            merges.longest,
            self._multiprocessors,
        )
        block = packed(
            MERGE_PARAMS,
            indptr=places.indptr,
            list=places.members,
            chunks=places.chunks,
            order=places.order,
            num_rows=len(merges.chunks),
            num_heads=store.num_kv_heads,
            group_size=self._scene.group_size,
            chunk_rows=merges.chunk_rows,
            head_dim=store.head_dim,
            split=how.split,
        )
        function = self._library.function(how.spec, "merge_states")
        return MergeStep(make(function, how.grid, how.threads, 0, block))


def _scene_struct(scene: Scene) -> bytes:
    """`AttendParams` as far as the scene decides it."""
    store, scoring = scene.store, scene.scoring
    scale = scoring.sm_scale * store.k_scale
    return packed(
        ATTEND_PARAMS,
        **store.strides,
        group_size=scene.group_size,
        scale=scale,
        scale2=scale * _LOG2E,
        soft_cap=scoring.logits_soft_cap,
        v_scale=store.v_scale,
        window_left=scoring.window_left,
    )
