"""Attention on the device: a batch is planned once, then launched for layer after layer.

A `DevicePlan` serves any layer and any q; `AttentionRunner.enqueue` runs it on device addresses,
which the benchmarks time too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import cupy

from kernels.backend import Plan
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.device_plan import DevicePlanBuilder
from kernels.cuda.attention.steps import CallAddresses, DevicePlan
from kernels.cuda.device.launch import Library
from kernels.cuda.device.transfer import Transfers
from kernels.cuda.kv.view import KvView
from kernels.cuda.wide import variants as wide

DEVICE_PLANS: Final = 64
MOST_BUILDERS: Final = 64


class AttentionRunner:
    """Plans, caches and launches attention over one `KvView`.

    `pool_page` is the pool's page size. `team` forces how many warps share an item in plans made
    from then on: for measurements.
    """

    def __init__(
        self,
        library: Library,
        transfers: Transfers,
        multiprocessors: int,
        split_keys: int = 0,
        pool_page: int = 16,
    ) -> None:
        self._library = library
        self._transfers = transfers
        self._multiprocessors = multiprocessors
        self._split_keys, self._pool_page = split_keys, pool_page
        self.team: int | None = None
        self._device_plans: OrderedDict[tuple[object, ...], DevicePlan] = OrderedDict()
        self._builders: dict[AttentionConfig, DevicePlanBuilder] = {}
        self._partial: Any = None
        self._partial_bytes = 0
        with transfers.compute:
            self._schedule = cupy.zeros(4, cupy.uint32)
            running = multiprocessors * wide.MOST_RUNNING if split_keys else 0
            self._running = cupy.zeros(running, cupy.uint32)
        # less urgent than the compute stream: narrow blocks take their multiprocessors first
        self._beside = cupy.cuda.Stream(non_blocking=True, priority=0)
        self._fork, self._join = (cupy.cuda.Event(disable_timing=True) for _ in range(2))

    def find(
        self, requests: Sequence[tuple[int, Plan]], config: AttentionConfig
    ) -> DevicePlan | None:
        """The device plan of (layer, plan) requests, if it was made before.

        Requests of one layer share their work with every other layer.
        """
        key = _key(requests, config)
        found = self._device_plans.get(key)
        if found is not None:
            self._device_plans.move_to_end(key)
        return found

    def make(self, requests: Sequence[tuple[int, Plan]], config: AttentionConfig) -> DevicePlan:
        """Plan and upload; kept for `find` unless K and V are of this call only.

        Raises Unsupported for a head_dim that has no kernels.
        """
        builder = self._builder(config)
        made = builder.make(_layered(requests), self._transfers, self.team)
        if not config.kv.contiguous:
            self._device_plans[_key(requests, config)] = made
            if len(self._device_plans) > DEVICE_PLANS:
                self._device_plans.popitem(last=False)
        return made

    def _builder(self, config: AttentionConfig) -> DevicePlanBuilder:
        """The configuration's kernels, kept unless K and V are of this call only."""
        builder = self._builders.get(config)
        if builder is None:
            builder = DevicePlanBuilder(
                config,
                self._library,
                self._multiprocessors,
                self._schedule.data.ptr,
                self._split_keys,
                self._running.data.ptr,
                self._pool_page,
            )
            if len(self._builders) == MOST_BUILDERS:
                self._builders.clear()
            if not config.kv.contiguous:
                self._builders[config] = builder
        return builder

    def enqueue(
        self,
        device_plan: DevicePlan,
        config: AttentionConfig,
        layer: int | None,
        where: tuple[int, int, int],
        mask: tuple[int, int] = (0, 0),
        sinks: tuple[int, int] = (0, 0),
        new: tuple[int, int] = (0, 0),
    ) -> None:
        """Launch on the current stream, with device addresses: of q, o, lse; of a mask's bits and
        offsets; of sinks, and how many, one for each head or for each head of each row; of k and v
        to append, where the plan does (`DevicePlan.appends`).

        `layer` is that of the requests when they share one, else None. The caller keeps the plan
        until the launch is done: the cache may drop it earlier, and does not hold ragged ones.
        """
        kv = config.kv
        shift = (layer or 0) * kv.layer_bytes
        tensors = (*where, kv.k + shift, kv.v + shift)
        given = (sinks[0], sinks[1] > config.num_qo_heads)
        call = CallAddresses(layer, *tensors, *mask, *self.partials(device_plan, kv), *given, *new)
        if device_plan.beside:
            stream = cupy.cuda.get_current_stream()
            self._fork.record(stream)
        for step in device_plan.steps:
            step.launch(call)
        if device_plan.beside:
            with self._beside:
                self._beside.wait_event(self._fork)
                for step in device_plan.beside:
                    step.launch(call)
                self._join.record(self._beside)
            stream.wait_event(self._join)
        if device_plan.merge is not None:
            device_plan.merge.launch(call)

    def partials(self, device_plan: DevicePlan, kv: KvView) -> tuple[int, int, int]:
        """Device addresses for the batch's partial states, from one buffer that only grows."""
        if device_plan.partial_rows == 0:
            return 0, 0, 0
        rows = device_plan.partial_rows * kv.num_kv_heads
        size = rows * (kv.v_head_dim + 1 + device_plan.sums) * 4
        if size > self._partial_bytes:
            self._partial = self._transfers.scratch(size)
            self._partial_bytes = size
        base: int = self._partial.ptr
        lse = base + rows * kv.v_head_dim * 4
        return base, lse, lse + rows * 4 if device_plan.sums else 0


def _layered(requests: Sequence[tuple[int, Plan]]) -> Sequence[tuple[int, Plan]]:
    """Requests of a single layer as of layer 0: the layer comes with each launch."""
    if len(requests) == 1:
        return [(0, requests[0][1])]
    if len({layer for layer, _ in requests}) > 1:
        return requests
    return [(0, plan) for _, plan in requests]


def _key(requests: Sequence[tuple[int, Plan]], config: AttentionConfig) -> tuple[object, ...]:
    """Plans never change, so their identity is their value while the cache holds them."""
    if len(requests) == 1:
        return (config, id(requests[0][1]))
    return (config, *((layer, id(plan)) for layer, plan in _layered(requests)))
