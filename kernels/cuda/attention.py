"""Attention on the device: a batch's plan made resident once, then launched for layer after layer.

`Resident` is what a batch of plans needs on the device, reusable for any layer and any q; the seam
`Attention.enqueue` runs it on device addresses, which is also what the benchmarks time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import cupy

from kernels.backend import Plan
from kernels.cuda.kit import Kit, Resident
from kernels.cuda.launch import Library
from kernels.cuda.scene import Scene, Store
from kernels.cuda.steps import Call
from kernels.cuda.transfer import Transfers

RESIDENT_PLANS: Final = 64
MOST_KITS: Final = 64


class Attention:
    """Plans, caches and launches attention over one store.

    `team` forces how many warps share an item in plans made from then on: for measurements.
    """

    def __init__(self, library: Library, transfers: Transfers, multiprocessors: int) -> None:
        self._library = library
        self._transfers = transfers
        self._multiprocessors = multiprocessors
        self.team: int | None = None
        self._residents: OrderedDict[tuple[object, ...], Resident] = OrderedDict()
        self._kits: dict[Scene, Kit] = {}
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
        kit = self._kit(scene)
        made = kit.make(_layered(requests), self._transfers, self.team)
        if not scene.store.contiguous:
            self._residents[_key(requests, scene)] = made
            if len(self._residents) > RESIDENT_PLANS:
                self._transfers.retire(self._residents.popitem(last=False)[1])
        return made

    def _kit(self, scene: Scene) -> Kit:
        """The scene's kernels, kept unless the store is a passing one."""
        kit = self._kits.get(scene)
        if kit is None:
            kit = Kit(scene, self._library, self._multiprocessors, self._schedule.data.ptr)
            if len(self._kits) == MOST_KITS:
                self._kits.clear()
            if not scene.store.contiguous:
                self._kits[scene] = kit
        return kit

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
        shift = (layer or 0) * store.layer_bytes
        tensors = (q, o, lse, store.k + shift, store.v + shift)
        call = Call(layer, *tensors, *mask, *self.partials(resident, store))
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

    def partials(self, resident: Resident, store: Store) -> tuple[int, int]:
        """Device addresses for the batch's partial states, from one buffer that only grows."""
        if resident.partial_rows == 0:
            return 0, 0
        rows = resident.partial_rows * store.num_kv_heads
        size = rows * (store.head_dim + 1) * 4
        if size > self._partial_bytes:
            self._partial = self._transfers.scratch(size)
            self._partial_bytes = size
        base: int = self._partial.ptr
        return base, base + rows * store.head_dim * 4


def _layered(requests: Sequence[tuple[int, Plan]]) -> Sequence[tuple[int, Plan]]:
    """Requests of a single layer as of layer 0: the layer comes with each launch."""
    first = requests[0][0]
    if any(layer != first for layer, _ in requests):
        return requests
    return [(0, plan) for _, plan in requests]


def _key(requests: Sequence[tuple[int, Plan]], scene: Scene) -> tuple[object, ...]:
    """Plans never change, so their identity is their value while the cache holds them."""
    if len(requests) == 1:
        return (scene, id(requests[0][1]))
    return (scene, *((layer, id(plan)) for layer, plan in _layered(requests)))
