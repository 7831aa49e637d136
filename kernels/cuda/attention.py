"""Attention on the device: a batch's plan made resident once, then launched for layer after layer.

`Resident` is what a batch of plans needs on the device, reusable for any layer and any q; the seam
`Attention.enqueue` runs it on device addresses, which is also what the benchmarks time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import DType, Plan, Scoring
from kernels.cuda.launch import ATTEND_PARAMS, MERGE_PARAMS, Library, params
from kernels.cuda.planner import Launch, Merges, Problem, TileShape, Work, make_work
from kernels.cuda.shapes import Kernel, attend_kernels, merge_spec, planner_shape
from kernels.cuda.transfer import Transfers

RESIDENT_PLANS: Final = 64
_LOG2E: Final = 1 / np.log(2)


@dataclass(frozen=True, slots=True)
class Store:
    """Where K and V are: device addresses, strides in rows of head_dim elements, dtype, scales.

    `layer_bytes` separates layers; `contiguous` means that a page id is its own index.
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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One kernel launch of a resident plan; `block` is edited in place for each call."""

    function: Any
    grid: int
    threads: int
    shared_bytes: int
    block: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A batch's plan on the device. `plans` are kept so that their identity stays theirs."""

    plans: tuple[Plan, ...]
    buffer: Any
    steps: tuple[Step, ...]
    merge: Step | None
    num_rows: int
    partial_rows: int


class Attention:
    """Plans, caches and launches attention over one store."""

    def __init__(self, library: Library, transfers: Transfers, multiprocessors: int) -> None:
        self._library = library
        self._transfers = transfers
        self._multiprocessors = multiprocessors
        self._residents: OrderedDict[tuple[object, ...], Resident] = OrderedDict()
        self._partial: Any = None
        self._partial_bytes = 0

    def kernels(self, scene: Scene) -> tuple[Kernel, ...]:
        """The attention kernels of a scene. Raises Unsupported for a head_dim that has none."""
        store = scene.store
        return attend_kernels(
            self._library.arch, store.head_dim, scene.compute, store.dtype, scene.rare
        )

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
        """Plan and upload; kept for `find` unless the store is a passing one."""
        made = self._make(_layered(requests), scene)
        if not scene.store.contiguous:
            self._residents[_key(requests, scene)] = made
            if len(self._residents) > RESIDENT_PLANS:
                self._transfers.retire(self._residents.popitem(last=False)[1])
        return made

    def _make(self, requests: Sequence[tuple[int, Plan]], scene: Scene) -> Resident:
        store = scene.store
        kernels = self.kernels(scene)
        shapes = self._shapes(kernels)
        problem = Problem(
            group_size=scene.num_qo_heads // store.num_kv_heads,
            page_size=store.page_size,
            num_kv_heads=store.num_kv_heads,
            window_left=scene.scoring.window_left,
            shapes=shapes,
        )
        work = make_work(requests, problem)
        return self._upload(requests, work, scene, dict(zip(shapes, kernels, strict=True)))

    def _shapes(self, kernels: Sequence[Kernel]) -> tuple[TileShape, ...]:
        last = len(kernels) - 1
        return tuple(
            planner_shape(kernel, self._multiprocessors, largest=i == last)
            for i, kernel in enumerate(kernels)
        )

    def _upload(
        self,
        requests: Sequence[tuple[int, Plan]],
        work: Work,
        scene: Scene,
        kernels: dict[TileShape, Kernel],
    ) -> Resident:
        launches = [launch for launch in work.launches if launch.num_items]
        merges = work.merges
        arrays = [work.order, work.positions, work.kv_indices]
        arrays += [merges.indptr, merges.members, merges.chunks]
        for launch in launches:
            arrays += [launch.items, launch.worker_begin]
        buffer, at = self._transfers.upload(arrays)
        shared = {"order": at[0], "positions": at[1], "kv_indices": at[2]}
        if scene.store.contiguous:
            shared["kv_indices"] = 0
        steps = []
        for i, launch in enumerate(launches):
            places = shared | {"items": at[6 + 2 * i], "worker_begin": at[7 + 2 * i]}
            steps.append(self._step(launch, kernels[launch.shape], scene, places))
        merge = self._merge_step(merges, scene, at[0], at[3:6]) if len(merges.chunks) else None
        return Resident(
            plans=tuple(plan for _, plan in requests),
            buffer=buffer,
            steps=tuple(steps),
            merge=merge,
            num_rows=work.num_rows,
            partial_rows=merges.num_partial_rows,
        )

    def _step(self, launch: Launch, kernel: Kernel, scene: Scene, places: dict[str, int]) -> Step:
        store, scoring = scene.store, scene.scoring
        narrow = launch.shape.persistent
        scale = scoring.sm_scale * store.k_scale
        block = params(
            ATTEND_PARAMS,
            **places,
            layer_rows=store.layer_rows,
            page_rows=store.page_rows,
            token_rows=store.token_rows,
            head_rows=store.head_rows,
            page_size=store.page_size,
            num_workers=launch.num_workers if narrow else launch.num_items,
            num_kv_heads=store.num_kv_heads,
            group_size=scene.num_qo_heads // store.num_kv_heads,
            scale=scale,
            scale2=scale * _LOG2E,
            soft_cap=scoring.logits_soft_cap,
            v_scale=store.v_scale,
            window_left=scoring.window_left,
        )
        units = (launch.num_workers if narrow else launch.num_items) * store.num_kv_heads
        warps = kernel.threads // 32
        return Step(
            function=self._library.function(kernel.spec, kernel.entry, kernel.shared_bytes),
            grid=-(-units // warps) if narrow else units,
            threads=kernel.threads,
            shared_bytes=kernel.shared_bytes,
            block=block,
        )

    def _merge_step(self, merges: Merges, scene: Scene, order: int, at: Sequence[int]) -> Step:
        store = scene.store
        group = scene.num_qo_heads // store.num_kv_heads
        lanes = 32 if store.head_dim > 64 else 16
        groups = 256 // lanes
        units = len(merges.chunks) * merges.chunk_rows * store.num_kv_heads
        split = merge_split(merges.longest, units, groups, self._multiprocessors)
        block = params(
            MERGE_PARAMS,
            indptr=at[0],
            list=at[1],
            chunks=at[2],
            order=order,
            num_rows=len(merges.chunks),
            num_heads=store.num_kv_heads,
            group_size=group,
            chunk_rows=merges.chunk_rows,
            head_dim=store.head_dim,
            split=split,
        )
        spec = merge_spec(store.head_dim, True, scene.compute)
        function = self._library.function(spec, "merge_states")
        return Step(function, -(-units * split // groups), 256, 0, block)

    def enqueue(
        self,
        resident: Resident,
        scene: Scene,
        layer: int,
        q: int,
        o: int,
        lse: int,
        mask: tuple[int, int] = (0, 0),
    ) -> None:
        """Launch on the current stream. q, o, lse: device addresses; mask: bits and offsets.

        `layer` is that of the requests when they share one, else 0.
        """
        store = scene.store
        partial_o, partial_lse = self._partials(resident, store)
        shift = layer * store.layer_bytes
        for step in resident.steps:
            block = step.block
            block["q"], block["o"], block["lse"] = q, o, lse
            block["k"], block["v"] = store.k + shift, store.v + shift
            block["partial_o"], block["partial_lse"] = partial_o, partial_lse
            block["mask_bits"], block["mask_row_offsets"] = mask
            step.function((step.grid,), (step.threads,), (block,), shared_mem=step.shared_bytes)
        merge = resident.merge
        if merge is not None:
            block = merge.block
            block["o_in"], block["lse_in"] = partial_o, partial_lse
            block["o"], block["lse"] = o, lse
            merge.function((merge.grid,), (merge.threads,), (block,))

    def _partials(self, resident: Resident, store: Store) -> tuple[int, int]:
        """Device addresses for the batch's partial states, from one buffer that only grows."""
        rows = resident.partial_rows * store.num_kv_heads
        size = rows * (store.head_dim + 1) * 4
        if size > self._partial_bytes:
            self._partial = self._transfers.scratch(size)
            self._partial_bytes = size
        base = self._partial.ptr if self._partial is not None else 0
        return base, base + rows * store.head_dim * 4


def merge_split(longest: int, units: int, groups: int, multiprocessors: int) -> int:
    """Shares per list: long lists are shared while that does not make more blocks than fit."""
    split = 1
    while split < groups and longest >= 8 * split and units * split < multiprocessors * 8 * groups:
        split *= 2
    return split


def _layered(requests: Sequence[tuple[int, Plan]]) -> list[tuple[int, Plan]]:
    """Requests of a single layer as of layer 0: the layer comes with each launch."""
    first = requests[0][0]
    single = all(layer == first for layer, _ in requests)
    return [(0 if single else layer, plan) for layer, plan in requests]


def _key(requests: Sequence[tuple[int, Plan]], scene: Scene) -> tuple[object, ...]:
    """Plans never change, so their identity is their value while the cache holds them."""
    return (scene, *((layer, id(plan)) for layer, plan in _layered(requests)))
