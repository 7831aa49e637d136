"""Attention on the device: a batch's plan made resident once, then launched for layer after layer.

`Resident` is what a batch of plans needs on the device, reusable for any layer and any q; the seam
`Attention.enqueue` runs it on device addresses, which is also what the benchmarks time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import cupy
import numpy as np

from kernels.backend import DType, Plan, PoolGeometry, Scoring
from kernels.cuda import wide
from kernels.cuda.launch import ATTEND_PARAMS, MERGE_PARAMS, Library, params
from kernels.cuda.planner import Launch, Merges, Work, make_work
from kernels.cuda.shapes import Kernel, attend_kernels, merge_launch, planner_shape, wide_variant
from kernels.cuda.steps import Call, MergeStep, MmaStep, Step, WideStep
from kernels.cuda.tiles import PAGE, Problem, chunk_rows
from kernels.cuda.transfer import Transfers

RESIDENT_PLANS: Final = 64
_LOG2E: Final = 1 / np.log(2)


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Where K and V are: device addresses, strides in rows of head_dim elements, dtype, scales.

    `layer_bytes` separates layers; `contiguous` means that a page id is its own index. `maps`
    makes Hopper's tensor maps of one layer, or of all for None.
    """

    k: int
    v: int
    layer_bytes: int
    layer_rows: int
    page_rows: int
    token_rows: int
    head_rows: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    k_scale: float
    v_scale: float
    num_pages: int
    contiguous: bool
    maps: Callable[[int | None], wide.TensorMaps]


@dataclass(frozen=True, slots=True)
class Scene:
    """What, besides the plans, decides the work and the kernels of a batch."""

    store: Store
    num_qo_heads: int
    compute: DType
    scoring: Scoring
    masked: bool

    @property
    def rare(self) -> bool:
        """Whether the common kernels do not do: see RARE in tile.cuh."""
        scoring = self.scoring
        return self.masked or scoring.logits_soft_cap > 0 or scoring.sm_scale <= 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.store.num_kv_heads


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


class PoolMaps:
    """Tensor maps of a pool, made when first asked for: one per layer, and one of all layers."""

    def __init__(self, geometry: PoolGeometry, address: int) -> None:
        self._geometry, self._address = geometry, address
        self._made: dict[int | None, wide.TensorMaps] = {}

    def __call__(self, layer: int | None) -> wide.TensorMaps:
        found = self._made.get(layer)
        if found is None:
            step = self._geometry.num_pages * self._geometry.page_bytes
            found = wide.paged_maps(self._geometry, self._address + (layer or 0) * step)
            self._made[layer] = found
        return found


class Attention:
    """Plans, caches and launches attention over one store.

    For plans made from then on, `fuse_merges` says whether narrow kernels may merge their own
    partial states, and `team` forces how many warps share an item: both are for measurements.
    """

    def __init__(self, library: Library, transfers: Transfers, multiprocessors: int) -> None:
        self._library = library
        self._transfers = transfers
        self._multiprocessors = multiprocessors
        self.fuse_merges = True
        self.team: int | None = None
        self._residents: OrderedDict[tuple[object, ...], Resident] = OrderedDict()
        self._partial: Any = None
        self._partial_bytes = 0
        with transfers.compute:
            self._schedule = cupy.zeros(2, cupy.uint32)
        # less urgent than the compute stream: narrow blocks take their multiprocessors first
        self._beside = cupy.cuda.Stream(non_blocking=True, priority=0)
        self._fork, self._join = (cupy.cuda.Event(disable_timing=True) for _ in range(2))

    def find(self, requests: Sequence[tuple[int, Plan]], scene: Scene) -> Resident | None:
        """The resident form of (layer, plan) requests, if it was made before.

        Requests of one layer share their work with every other layer.
        """
        key = _key(requests, scene)
        found = self._residents.get(key)
        if found is not None:
            self._residents.move_to_end(key)
        return found

    def make(self, requests: Sequence[tuple[int, Plan]], scene: Scene) -> Resident:
        """Plan and upload; kept for `find` unless the store is a passing one.

        Raises Unsupported for a head_dim that has no kernels.
        """
        made = self._make(_layered(requests), scene)
        if not scene.store.contiguous:
            self._residents[_key(requests, scene)] = made
            if len(self._residents) > RESIDENT_PLANS:
                self._transfers.retire(self._residents.popitem(last=False)[1])
        return made

    def _make(self, requests: Sequence[tuple[int, Plan]], scene: Scene) -> Resident:
        store, arch = scene.store, self._library.arch
        page_size = 0 if store.contiguous else store.page_size
        options = (arch, store.head_dim, scene.compute, store.dtype)
        variant = wide_variant(*options, page_size, scene.scoring, scene.masked)
        kernels = attend_kernels(*options, scene.rare, variant)
        problem = Problem(
            group_size=scene.group_size,
            page_size=store.page_size,
            num_kv_heads=store.num_kv_heads,
            window_left=scene.scoring.window_left,
            shapes=tuple(
                planner_shape(
                    kernel,
                    store.head_dim,
                    store.dtype,
                    self._multiprocessors,
                    largest=kernel is kernels[-1],
                )
                for kernel in kernels
            ),
            team=self.team,
        )
        return self._upload(requests, make_work(requests, problem), scene, kernels, variant)

    def _upload(
        self,
        requests: Sequence[tuple[int, Plan]],
        work: Work,
        scene: Scene,
        kernels: Sequence[Kernel],
        variant: wide.WideVariant | None,
    ) -> Resident:
        merges = work.merges
        fused = self.fuse_merges and _fusible(work)
        arrays = [work.order, work.positions, work.kv_indices]
        arrays += [merges.indptr, merges.members]
        arrays += [merges.list_of_chunk() if fused else merges.chunks]
        arrivals = len(merges.chunks) * scene.store.num_kv_heads if fused else 0
        arrays += [np.zeros(arrivals, np.int32)]
        for launch in work.launches:
            arrays += [launch.items, launch.worker_begin]
        buffer, at = self._transfers.upload(arrays)
        shared = {"order": at[0], "positions": at[1]}
        shared["kv_indices"] = 0 if scene.store.contiguous else at[2]
        lists = {"merge_indptr": at[3], "merge_members": at[4], "merge_of_chunk": at[5]}
        lists["merge_arrivals"] = at[6]
        narrow: list[Step] = []
        others: list[Step] = []
        for i, (launch, kernel) in enumerate(zip(work.launches, kernels, strict=True)):
            if launch.num_items == 0:
                continue
            places = shared | {"items": at[7 + 2 * i]}
            if kernel.entry == wide.ENTRY and variant is not None:
                places["schedule"] = self._schedule.data.ptr
                others.append(self._wide_step(launch, kernel, variant, scene, places))
                continue
            places["worker_begin"] = at[8 + 2 * i]
            if fused:
                places |= lists
            step = self._mma_step(launch, kernel, scene, places)
            (narrow if launch.shape.persistent else others).append(step)
        merge = None
        if len(merges.chunks) and not fused:
            merge = self._merge_step(merges, scene, at[0], at[3:6])
        return Resident(
            plans=tuple(plan for _, plan in requests),
            buffer=buffer,
            steps=tuple(narrow or others),
            beside=tuple(others if narrow else ()),
            merge=merge,
            num_rows=work.num_rows,
            partial_rows=merges.num_partial_rows,
        )

    def _mma_step(
        self, launch: Launch, kernel: Kernel, scene: Scene, places: dict[str, int]
    ) -> MmaStep:
        store, scoring = scene.store, scene.scoring
        scale = scoring.sm_scale * store.k_scale
        block = params(
            ATTEND_PARAMS,
            **places,
            layer_rows=store.layer_rows,
            page_rows=store.page_rows,
            token_rows=store.token_rows,
            head_rows=store.head_rows,
            page_size=store.page_size,
            num_workers=launch.num_workers,
            num_kv_heads=store.num_kv_heads,
            group_size=scene.group_size,
            scale=scale,
            scale2=scale * _LOG2E,
            soft_cap=scoring.logits_soft_cap,
            v_scale=store.v_scale,
            window_left=scoring.window_left,
            team=launch.team,
            chunk_rows=chunk_rows(scene.group_size),
        )
        grid = launch.num_items * store.num_kv_heads
        if launch.shape.persistent:
            grid = -(-launch.num_workers * store.num_kv_heads * launch.team * 32 // kernel.threads)
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        return MmaStep(function, grid, kernel.threads, kernel.shared_bytes, block)

    def _wide_step(
        self,
        launch: Launch,
        kernel: Kernel,
        variant: wide.WideVariant,
        scene: Scene,
        places: dict[str, int],
    ) -> WideStep:
        store, scoring = scene.store, scene.scoring
        runs = len(np.unique(launch.items[:, PAGE]))
        block = wide.argument_block(
            **places,
            sm_scale=scoring.sm_scale * store.k_scale,
            soft_cap=scoring.logits_soft_cap,
            window_left=scoring.window_left,
            num_items=launch.num_items,
            num_kv_heads=store.num_kv_heads,
            group_size=scene.group_size,
            head_block=wide.heads_together(store.num_kv_heads, launch.num_items, runs),
            num_pages=store.num_pages,
        )
        function = self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes)
        launcher = partial(_launch_wide, function, variant, self._multiprocessors)
        return WideStep(launcher, block, store.maps)

    def _merge_step(self, merges: Merges, scene: Scene, order: int, at: Sequence[int]) -> MergeStep:
        store = scene.store
        units = len(merges.chunks) * merges.chunk_rows * store.num_kv_heads
        how = merge_launch(
            store.head_dim, True, scene.compute, units, merges.longest, self._multiprocessors
        )
        block = params(
            MERGE_PARAMS,
            indptr=at[0],
            list=at[1],
            chunks=at[2],
            order=order,
            num_rows=len(merges.chunks),
            num_heads=store.num_kv_heads,
            group_size=scene.group_size,
            chunk_rows=merges.chunk_rows,
            head_dim=store.head_dim,
            split=how.split,
        )
        function = self._library.function(how.spec, "merge_states")
        return MergeStep(function, how.grid, how.threads, block)

    def enqueue(
        self,
        resident: Resident,
        scene: Scene,
        layer: int | None,
        q: int,
        o: int,
        lse: int,
        mask: tuple[int, int] = (0, 0),
    ) -> None:
        """Launch on the current stream. q, o, lse: device addresses; mask: bits and offsets.

        `layer` is that of the requests when they share one, else None.
        """
        store = scene.store
        partial_o, partial_lse = self._partials(resident, store)
        shift = (layer or 0) * store.layer_bytes
        k, v = store.k + shift, store.v + shift
        call = Call(layer, k, v, (q, o, lse, *mask, partial_o, partial_lse))
        if resident.beside:
            stream = cupy.cuda.get_current_stream()
            self._fork.record(stream)
        for step in resident.steps:
            step.launch(call)
        if resident.beside:
            with self._beside:
                self._beside.wait_event(self._fork)
                for step in resident.beside:
                    step.launch(call)
                self._join.record(self._beside)
            stream.wait_event(self._join)
        if resident.merge is not None:
            resident.merge.launch(call)

    def _partials(self, resident: Resident, store: Store) -> tuple[int, int]:
        """Device addresses for the batch's partial states, from one buffer that only grows."""
        rows = resident.partial_rows * store.num_kv_heads
        size = rows * (store.head_dim + 1) * 4
        if size > self._partial_bytes:
            self._partial = self._transfers.scratch(size)
            self._partial_bytes = size
        base = self._partial.ptr if self._partial is not None else 0
        return base, base + rows * store.head_dim * 4


def _fusible(work: Work) -> bool:
    """Whether the work's one kernel can merge all partial states itself, and there are some."""
    active = [launch.shape.persistent for launch in work.launches if launch.num_items]
    return active == [True] and len(work.merges.chunks) > 0 and not work.merges.any_empty


def _launch_wide(
    function: Any,
    variant: wide.WideVariant,
    multiprocessors: int,
    maps: wide.TensorMaps,
    block: Any,
) -> None:
    wide.launch(function, variant, maps, block, multiprocessors)


def _layered(requests: Sequence[tuple[int, Plan]]) -> list[tuple[int, Plan]]:
    """Requests of a single layer as of layer 0: the layer comes with each launch."""
    first = requests[0][0]
    single = all(layer == first for layer, _ in requests)
    return [(0 if single else layer, plan) for layer, plan in requests]


def _key(requests: Sequence[tuple[int, Plan]], scene: Scene) -> tuple[object, ...]:
    """Plans never change, so their identity is their value while the cache holds them."""
    return (scene, *((layer, id(plan)) for layer, plan in _layered(requests)))
