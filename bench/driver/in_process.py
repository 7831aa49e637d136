"""Decode steps on a GPU without a service: the kernels alone, and the backend called by its owner.

`kernels`: append and attention of every layer, captured in a CUDA graph on tensors of the device;
the device's own clock. `process`: what a program pays that calls the backend itself, with host
arrays, and waits for the answer of each layer before it goes on.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any, Final, Literal

import cupy
import numpy as np

from bench.cases.kernel_calls import fill_random, random_array
from bench.cases.kernel_plans import level_of, row_levels
from bench.cases.loads import Decode, Request
from bench.driver.connections import Run, Sample
from kernels.backend import NUMPY_DTYPES, Attend, Int32, Plan, PoolGeometry, Scoring
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.backend import CudaBackend

POOL_LAYERS: Final = 8
"""Layers in turn: many times the cache, a fraction of the service's pool beside it."""
PAGE_SIZE: Final = 16
Shape = tuple[int, int, int, int, int]


class Alone:
    """The steps of a `Decode` that appends, over sequences of its `kv_len`, again and again."""

    def __init__(self, kind: Literal["kernels", "process"], load: Decode) -> None:
        heads = load.heads
        shape = (len(load.names), load.kv_len + 1, heads.num_qo, heads.num_kv, heads.dim)
        self._load = load
        self._requests = load.requests()
        self._scoring = Scoring(heads.dim**-0.5)
        self._backend, self._plan, self._slots = placed(shape)
        self._graph = self._capture() if kind == "kernels" else None

    def loop(self, count: int, limit_s: float) -> Run:
        started = time.perf_counter()
        samples: list[Sample] = []
        step = self._step if self._graph is None else self._replay
        step()
        while len(samples) < count and time.perf_counter() - started < limit_s:
            samples += step()
        return Run(tuple(samples), time.perf_counter() - started)

    def crowd(self, connections: int, limit_s: float) -> float:
        raise RuntimeError("one process has no connections")

    def _step(self) -> list[Sample]:
        """All layers, one after another, with host arrays."""
        samples = []
        for number, request in enumerate(self._requests):
            started = time.perf_counter()
            self._layer(number % POOL_LAYERS, request)
            seconds = time.perf_counter() - started
            samples.append(Sample(seconds, seconds))
        return samples

    def _layer(self, layer: int, request: Request) -> None:
        tensors = request.tensors
        self._backend.append(layer, tensors["k"], tensors["v"], self._slots)
        attend = Attend(layer, tensors["q"], self._plan, self._scoring)
        self._backend.attend([attend]).result()

    def _replay(self) -> list[Sample]:
        """A whole step by the graph; every layer's share of it."""
        if self._graph is None:
            raise RuntimeError("no graph was captured: this is a bug")
        graph, stream, _ = self._graph
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        layers = len(self._requests)
        seconds = cupy.cuda.get_elapsed_time(begin, end) / 1e3 / layers
        return [Sample(seconds, seconds)] * layers

    def _capture(self) -> tuple[Any, Any, object]:
        """The step's graph, its stream, and the tensors that it reads and writes."""
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
        stream = cupy.cuda.Stream(non_blocking=True, priority=-1)

        def enqueue(layer: int) -> None:
            backend.enqueue_rows("append_rows", layer, "fp16", rows, at)
            backend.attention.enqueue(
                device_plan, config, layer, q.data.ptr, o.data.ptr, lse.data.ptr
            )

        with stream:
            enqueue(0)
            stream.synchronize()
            stream.begin_capture()
            for layer in range(len(self._requests)):
                enqueue(layer % POOL_LAYERS)
            return stream.end_capture(), stream, (q, k, v, o, lse, slots)


@lru_cache(maxsize=1)
def placed(shape: Shape) -> tuple[CudaBackend, Plan, Int32]:
    """A pool of random KV, the plan of a decode over it, and the slots of its last tokens.

    `shape` is batch, kv_len, query heads, KV heads, head_dim.
    """
    batch, kv_len, _, num_kv, dim = shape
    row = {"kind": "decode", "kv_lens": [kv_len] * batch, "page_size": PAGE_SIZE}
    levels, positions, pages = row_levels(row)
    plan = Plan(tuple(level_of(nodes, PAGE_SIZE) for nodes in levels), positions)
    geometry = PoolGeometry(POOL_LAYERS, pages, PAGE_SIZE, num_kv, dim)
    backend = CudaBackend(geometry)
    kind = NUMPY_DTYPES[geometry.dtype]
    count = POOL_LAYERS * pages * geometry.page_bytes // kind.itemsize
    fill_random(backend.kv.k, count, kind, backend)
    level = plan.levels[0]
    last = level.kv_indices[level.kv_indptr[1:] - 1]
    slots = last * PAGE_SIZE + level.kv_last_page_len - 1
    return backend, plan, slots.astype(np.int32)
