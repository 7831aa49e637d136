"""Many calls of every kind in flight: each gives the bits that it gives alone.

Freed device memory is overwritten at once, so that a buffer that is freed under its kernel shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels.backend import (  # noqa: E402
    Attend,
    AttentionState,
    DType,
    PoolGeometry,
    RaggedAttend,
    Scoring,
)
from kernels.lanes.lane import Owner, Slot, StepWork  # noqa: E402
from kernels.tensor import DeviceTensor  # noqa: E402

HALF, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
HEADS, KV_HEADS, DIM = 32, 8, 128
SCORING = Scoring(DIM**-0.5)
Call = Callable[[], Callable[[], list[bytes]]]
"""Starts a call; what that returns waits for it, and gives its bits."""


class Device:
    """A backend, and tensors on a stream beside it."""

    def __init__(self, seed: int) -> None:
        from device_cases import PagePool, fill

        from kernels.cuda.backend import CudaBackend

        self.backend = CudaBackend(PoolGeometry(2, 6000, 16, KV_HEADS, DIM, "NHD", "fp16"))
        fill(self.backend, seed)
        self.rng = np.random.default_rng(seed)
        self.pages = PagePool(self.backend, self.rng)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.lanes: Any = None

    def tensor(self, values: Any) -> DeviceTensor:
        with self.stream:
            memory = cupy.asarray(values)
        self.stream.synchronize()
        pointer, stream = memory.data.ptr, self.stream.ptr
        return DeviceTensor(values.dtype, values.shape, pointer, stream, memory)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceTensor:
        return self.tensor(np.full(shape, np.nan, dtype))

    def values(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(HALF)

    def bits(self, tensor: Any) -> bytes:
        if not isinstance(tensor, DeviceTensor):
            return np.asarray(tensor).tobytes()
        with self.stream:
            return bytes(cupy.asnumpy(tensor.owner).tobytes())


def ragged(device: Device, qo: list[int], kv: list[int], on_device: bool) -> Call:
    ends = [np.cumsum([0, *lens]).astype(np.int32) for lens in (qo, kv)]
    tensors: Any = [device.values(sum(qo), HEADS, DIM)]
    tensors += [device.values(sum(kv), KV_HEADS, DIM) for _ in "kv"]
    if on_device:
        tensors = [device.tensor(values) for values in tensors]

    def call() -> Callable[[], list[bytes]]:
        out = None
        if on_device:
            shape = tensors[0].shape
            out = AttentionState(device.empty(shape, HALF), device.empty(shape[:2], FLOAT32))
        request = RaggedAttend(*tensors, *ends, True, SCORING, out=out)
        pending = device.backend.attend_ragged(request)

        def get() -> list[bytes]:
            state = pending.result()
            return [device.bits(state.o), device.bits(state.lse)]

        return get

    return call


def paged(device: Device, lengths: list[tuple[int, int]], shared: int, layer: int) -> Call:
    """(rows, keys) of each sequence, behind `shared` keys of all."""
    from device_cases import Segment, int32, make_level

    from kernels.backend import Plan

    rows = sum(count for count, _ in lengths)
    ends = np.cumsum([0, *(count for count, _ in lengths)]).tolist()
    own = [Segment(ends[i], ends[i + 1], n, shared) for i, (_, n) in enumerate(lengths)]
    levels = [make_level(own, device.pages, rows, causal=True)]
    if shared:
        levels.insert(0, make_level([Segment(0, rows, shared, 0)], device.pages, rows))
    positions = np.concatenate([np.arange(n - r, n) + shared for r, n in lengths])
    plan, q = Plan(tuple(levels), int32(positions)), device.values(rows, HEADS, DIM)

    def call() -> Callable[[], list[bytes]]:
        # a new plan each time: it is made, uploaded, and evicted while others run
        pending = device.backend.attend([Attend(layer, q, replace(plan), SCORING)])

        def get() -> list[bytes]:
            (state,) = pending.result()
            return [device.bits(state.o), device.bits(state.lse)]

        return get

    return call


def merge(device: Device, lists: list[int], heads: int) -> Call:
    o = device.values(sum(lists), heads, DIM)
    lse = device.rng.standard_normal((sum(lists), heads)).astype(np.float32)
    ends = np.cumsum([0, *lists]).astype(np.int32)

    def call() -> Callable[[], list[bytes]]:
        pending = device.backend.merge(o, lse, ends)

        def get() -> list[bytes]:
            state = pending.result()
            return [device.bits(state.o), device.bits(state.lse)]

        return get

    return call


def append_and_gather(device: Device, rows: int, layer: int) -> Call:
    """Into slots of its own, and out again."""
    pages = device.pages.take(-(-rows // 16))
    slots = (np.asarray(pages)[:, None] * 16 + np.arange(16)).reshape(-1)[:rows].astype(np.int32)
    k, v = (device.values(rows, KV_HEADS, DIM) for _ in "kv")

    def call() -> Callable[[], list[bytes]]:
        device.backend.append(layer, k, v, slots)
        pending = device.backend.gather(layer, slots, "fp16")

        def get() -> list[bytes]:
            got = [device.bits(part) for part in pending.result()]
            assert got == [k.tobytes(), v.tobytes()]
            return got

        return get

    return call


def steps(device: Device, lanes: Any, rows: int, keys: int) -> Call:
    """A step of two layers on a lane of its own."""
    from device_cases import Segment, int32, make_level

    from kernels.backend import Plan

    arena = 8 << 20
    lane = lanes.open(memoryview(b""), arena, Owner(1))
    own = [Segment(i, i + 1, keys, 0) for i in range(rows)]
    plan = Plan((make_level(own, device.pages, rows),), int32([keys - 1] * rows))
    q = device.values(rows, HEADS, DIM)
    o, lse, flags = 2 << 20, 4 << 20, 5 << 20
    slot = Slot(q=0, k=0, v=0, o=o, lse=lse)
    memory = cupy.cuda.UnownedMemory(lane.address, lane.arena_bytes, lane)
    whole = cupy.ndarray((lane.arena_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    with device.stream:
        whole[: q.nbytes] = cupy.asarray(q.view(np.uint8).reshape(-1))
    device.stream.synchronize()

    def call() -> Callable[[], list[bytes]]:
        scorings = (SCORING, SCORING)
        work = StepWork(
            (0, 1), (slot,), flags, rows, HEADS, HALF, None, replace(plan), scorings, 1.0
        )
        run = lane.begin(work)
        run.release()

        def get() -> list[bytes]:
            while not run.done:
                pass
            with device.stream:
                found = [
                    cupy.asnumpy(whole[at : at + size]).tobytes()
                    for at, size in ((o, q.nbytes), (lse, rows * HEADS * 4))
                ]
            lane.clear()
            return found

        return get

    return call


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    from poisoning import poisoned_when_freed

    with poisoned_when_freed():
        made = Device(request.param)
        yield made
        made.backend.close()


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_ragged_calls_in_flight_give_the_bits_of_each_alone(
    device: Device, on_device: bool
) -> None:
    mixed = [37, 3000, 512, 1, 700]
    calls = [
        ragged(device, *[lens, lens], on_device) for lens in ([8192], [4096] * 2, [1024] * 8, mixed)
    ]
    calls += [ragged(device, [1] * 64, [130] * 64, on_device)]
    assert_alone_and_together(device, calls, 200 if on_device else 60)


def test_calls_of_every_kind_in_flight_give_the_bits_of_each_alone(
    device: Device,
) -> None:
    from poisoning import poison

    from kernels.cuda.lanes.lanes import CudaLanes

    lanes = device.lanes = CudaLanes(device.backend, 1 << 28, 4, queues=32)
    poison()  # what lanes allocate, too
    calls = [
        ragged(device, [2048, 37], [2048, 500], True),
        ragged(device, [5, 1], [700, 30], False),
        paged(device, [(1, 4000)] * 4, 0, 0),
        paged(device, [(1, 37)] * 16, 2000, 1),
        paged(device, [(37, 800), (130, 130)], 0, 1),
        paged(device, [(7, 60)] * 9, 3000, 0),
        merge(device, [2] * 700, HEADS),
        merge(device, [0, 1, 33, 5, 200], 7),
        append_and_gather(device, 1, 0),
        append_and_gather(device, 3000, 1),
        steps(device, lanes, 16, 300),
        steps(device, lanes, 2, 9000),
    ]
    assert_alone_and_together(device, calls, 300, one_at_a_time=(10, 11))


def assert_alone_and_together(
    device: Device, calls: list[Call], count: int, one_at_a_time: tuple[int, ...] = ()
) -> None:
    """Random calls, up to 40 in flight; a step's arena serves one at a time."""
    cupy.cuda.Device().synchronize()
    alone = []
    for call in calls:
        alone.append(call()())
        device.backend.transfers.finish()
    flying: list[tuple[int, Callable[[], list[bytes]]]] = []
    wrong: dict[int, int] = {}
    for _ in range(count):
        which = int(device.rng.integers(len(calls)))
        for at, get in [entry for entry in flying if entry[0] == which in one_at_a_time]:
            flying.remove((at, get))
            wrong[at] = wrong.get(at, 0) + (get() != alone[at])
        flying.append((which, calls[which]()))
        while len(flying) > 40:
            at, get = flying.pop(0)
            wrong[at] = wrong.get(at, 0) + (get() != alone[at])
    for at, get in flying:
        wrong[at] = wrong.get(at, 0) + (get() != alone[at])
    assert not any(wrong.values()), f"calls with other bits than alone: {wrong}"


KINDS: list[tuple[DType, DType, int]] = [
    ("fp16", "fp16", 64),
    ("fp16", "fp16", 80),
    ("fp16", "fp16", 128),
    ("bf16", "bf16", 192),
    ("fp16", "fp16", 256),
    ("fp16", "fp8_e4m3", 64),
    ("bf16", "fp8_e5m2", 128),
]


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(("compute", "storage", "head_dim"), KINDS)
def test_the_same_call_twice_gives_the_same_bits(
    compute: DType, storage: DType, head_dim: int, masked: bool, cap: float
) -> None:
    """Tiles with rows to spare, large and small queries, and other work between the two."""
    from device_cases import PagePool, Segment, fill, int32, make_level, random_q

    from kernels.backend import Plan
    from kernels.cuda.backend import CudaBackend
    from kernels.masks import make_mask

    backend = CudaBackend(PoolGeometry(1, 5000, 16, 2, head_dim, "NHD", storage))
    fill(backend, 3)
    rng = np.random.default_rng(3)
    cases = []
    shapes = [(16, 37, 3000), (5, 19, 700), (3, 130, 130), (9, 1, 900), (7, 5, 90)]
    for sequences, rows, keys in shapes:
        pool = PagePool(backend, rng)
        own = [Segment(i * rows, (i + 1) * rows, keys, 0) for i in range(sequences)]
        level = make_level(own, pool, sequences * rows, causal=True)
        positions = np.tile(np.arange(keys - rows, keys), sequences)
        plan = Plan((level,), int32(positions), int32(rng.permutation(sequences * rows)))
        mask = None
        if masked:
            sizes = np.full(sequences, rows, np.int32), np.full(sequences, keys, np.int32)
            mask = make_mask(rng.random(sequences * rows * keys) < 0.7, *sizes)
        q = random_q((sequences * rows, 8, head_dim), compute, rng)
        scale = np.where(rng.random(len(q)) < 0.3, 30, 1).astype(q.dtype)[:, None, None]
        cases += [Attend(0, q, plan, Scoring(head_dim**-0.5, cap), mask)]
        cases += [Attend(0, (q * scale).astype(q.dtype), plan, Scoring(1.0, cap), mask)]
    first: dict[int, bytes] = {}
    for _ in range(6):
        for index in rng.permutation(len(cases)):
            (state,) = backend.attend([cases[index]]).result()
            bits = state.o.tobytes() + state.lse.tobytes()
            assert first.setdefault(int(index), bits) == bits, shapes[int(index) // 2]
    backend.close()
