"""Decode steps on a GPU without a service: the kernels alone, and the backend in this process.

`kernels`: append and attention of every layer as a CUDA graph over tensors on the device, timed by
the device's clock. `process`: a program that calls the backend itself with host arrays and waits
for each layer's result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Literal

import cupy
import numpy as np

from bench.cases.kernel_calls import fill_pool, random_array
from bench.cases.kernel_plans import level_of, row_levels
from bench.cases.loads import Decode, Request
from bench.driver.calls import Call, Sample
from kernels.backend import Attend, Int32, Plan, PoolGeometry, Scoring
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.backend import CudaBackend

POOL_LAYERS: Final = 8
"""Layers of the pool, used in turn: many times the cache's size."""
PAGE_SIZE: Final = 16
Shape = tuple[int, int, int, int, int]


class Alone:
    """The steps of a `Decode` that appends, over sequences of `kv_len` tokens."""

    def __init__(self, kind: Literal["kernels", "process"], load: Decode) -> None:
        heads = load.heads
        shape = (len(load.names), load.kv_len + 1, heads.num_qo, heads.num_kv, heads.dim)
        self._load = load
        self._requests = load.requests()
        self.num_requests = len(self._requests)
        self._layer_share = Sample(0.0, 0.0)
        self._scoring = Scoring(heads.dim**-0.5)
        self._backend, self._plan, self._slots = placed(shape)
        self._graph = self._capture() if kind == "kernels" else None

    @contextmanager
    def connected(self) -> Iterator[Call]:
        yield self._call if self._graph is None else self._replay

    def _call(self, turn: int) -> Sample:
        """One layer with host arrays."""
        number = turn % self.num_requests
        started = time.perf_counter()
        self._layer(number % POOL_LAYERS, self._requests[number])
        seconds = time.perf_counter() - started
        return Sample(seconds, seconds)

    def _layer(self, layer: int, request: Request) -> None:
        tensors = request.tensors
        self._backend.append(layer, tensors["k"], tensors["v"], self._slots)
        attend = Attend(layer, tensors["q"], self._plan, self._scoring)
        self._backend.attend([attend]).result()

    def _replay(self, turn: int) -> Sample:
        """A layer's share of a step, whose graph is launched in the turn of its first layer."""
        if self._graph is None:
            raise RuntimeError("no graph was captured: this is a bug")
        if turn % self.num_requests == 0:
            graph, stream, _ = self._graph
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            seconds = cupy.cuda.get_elapsed_time(begin, end) / 1e3 / self.num_requests
            self._layer_share = Sample(seconds, seconds)
        return self._layer_share

    def _capture(self) -> tuple[Any, Any, object]:
        """The step's graph, its stream, and its tensors, which must live as long."""
        backend, load, heads = self._backend, self._load, self._load.heads
        config = AttentionConfig(backend.kv, heads.num_qo, "fp16", self._scoring, False)
        device_plan = backend.attention.make([(0, self._plan)], config)
        rows = len(load.names)
        q, o = (random_array((rows, heads.num_qo, heads.dim), "fp16") for _ in "qo")
        k, v = (random_array((rows, heads.num_kv, heads.dim), "fp16") for _ in "kv")
        lse = cupy.empty(rows * heads.num_qo, cupy.float32)
        slots = cupy.asarray(self._slots)
        backend.transfers.finish()
        at = (k.data.ptr, v.data.ptr, slots.data.ptr)
        where = (q.data.ptr, o.data.ptr, lse.data.ptr)
        stream = cupy.cuda.Stream(non_blocking=True, priority=-1)

        def enqueue(layer: int) -> None:
            backend.enqueue_rows("append_rows", layer, "fp16", rows, at)
            backend.attention.enqueue(device_plan, config, layer, where)

        with stream:
            enqueue(0)
            stream.synchronize()
            stream.begin_capture()
            for layer in range(len(self._requests)):
                enqueue(layer % POOL_LAYERS)
            return stream.end_capture(), stream, (q, k, v, o, lse, slots)


@lru_cache(maxsize=1)
def placed(shape: Shape) -> tuple[CudaBackend, Plan, Int32]:
    """A pool of random KV, a decode's plan, and the slots of the last tokens.

    `shape` is batch, kv_len, query heads, KV heads, head_dim.
    """
    batch, kv_len, _, num_kv, dim = shape
    row = {"kind": "decode", "kv_lens": [kv_len] * batch, "page_size": PAGE_SIZE}
    levels, positions, pages = row_levels(row)
    plan = Plan(tuple(level_of(nodes, PAGE_SIZE) for nodes in levels), positions)
    backend = CudaBackend(PoolGeometry(POOL_LAYERS, pages, PAGE_SIZE, num_kv, dim))
    fill_pool(backend)
    level = plan.levels[0]
    last = level.kv_indices[level.kv_indptr[1:] - 1]
    slots = last * PAGE_SIZE + level.kv_last_page_len - 1
    return backend, plan, slots.astype(np.int32)
