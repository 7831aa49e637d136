"""Device tensors keep the order of their streams; registered memory comes and goes; a launch that
fails loses the device."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from flat_plans import decode_plan

from kernels.backend import DeviceLost, PoolGeometry

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels import make_backend  # noqa: E402
from kernels.backend import Attend, AttentionState, Backend, Scoring  # noqa: E402
from kernels.tensor import DeviceTensor, PinnedArray  # noqa: E402

SCORING = Scoring(0.125)
SLOW_BYTES = 1 << 30
HALF, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture
def backend() -> Any:
    made = make_backend("cuda", PoolGeometry(1, 64, 16, 2, 64, "NHD", "fp16"))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1024, 2, 64), np.float32).astype(HALF) for _ in range(2))
    made.append(0, k, v, np.arange(1024, dtype=np.int32))
    yield made
    made.close()


class Caller:
    """A stream with much work queued."""

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self.slow = cupy.cuda.alloc(SLOW_BYTES)

    def keep_busy(self) -> None:
        for _ in range(100):  # some 30 ms
            self.slow.memset_async(0, SLOW_BYTES, self.stream)

    def tensor(self, shape: tuple[int, ...], dtype: Any) -> DeviceTensor:
        """NaN so far."""
        size = int(np.prod(shape)) * dtype.itemsize
        with self.stream:
            memory = cupy.cuda.alloc(size)
        memory.memset_async(0xFF, size, self.stream)
        return DeviceTensor(dtype, shape, memory.ptr, self.stream.ptr, memory)

    def copy(self, to: DeviceTensor, source: DeviceTensor) -> None:
        kind = cupy.cuda.runtime.memcpyDeviceToDevice
        cupy.cuda.runtime.memcpyAsync(to.address, source.address, to.nbytes, kind, self.stream.ptr)

    def spoil(self, tensor: DeviceTensor) -> None:
        cupy.cuda.runtime.memsetAsync(tensor.address, 0xFF, tensor.nbytes, self.stream.ptr)

    def read(self, tensor: DeviceTensor) -> Any:
        values = np.empty(tensor.shape, tensor.dtype)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        to = values.ctypes.data
        cupy.cuda.runtime.memcpyAsync(to, tensor.address, tensor.nbytes, kind, self.stream.ptr)
        self.stream.synchronize()
        return values

    def write(self, tensor: DeviceTensor, values: Any) -> None:
        kind = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(
            tensor.address, values.ctypes.data, values.nbytes, kind, self.stream.ptr
        )
        self.stream.synchronize()


@pytest.mark.parametrize("requests", [1, 3])
def test_a_launch_is_ordered_within_the_work_of_its_tensors_streams(
    backend: Backend, requests: int
) -> None:
    rng = np.random.default_rng(1)
    plan, caller = decode_plan([64, 512, 448], 16), Caller()
    shape = (len(plan.positions), 8, 64)
    values = [rng.standard_normal(shape, np.float32).astype(HALF) for _ in range(requests)]
    want = [
        (np.array(state.o), np.array(state.lse))
        for state in backend.attend([Attend(0, q, plan, SCORING) for q in values]).result()
    ]
    given, asked, kept = [], [], []
    for q in values:
        source, tensor = caller.tensor(shape, HALF), caller.tensor(shape, HALF)
        caller.write(source, q)
        place = AttentionState(caller.tensor(shape, HALF), caller.tensor(shape[:2], FLOAT32))
        given.append((source, tensor))
        asked.append(Attend(0, tensor, plan, SCORING, out=place))
        kept.append((caller.tensor(shape, HALF), caller.tensor(shape[:2], FLOAT32)))
    caller.stream.synchronize()
    caller.keep_busy()
    for source, tensor in given:
        caller.copy(tensor, source)
    pending = backend.attend(asked)
    for request, (o, lse) in zip(asked, kept, strict=True):
        assert request.out is not None
        caller.copy(o, request.out.o)  # type: ignore[arg-type]
        caller.copy(lse, request.out.lse)  # type: ignore[arg-type]
        for tensor in (request.q, request.out.o, request.out.lse):
            caller.spoil(tensor)  # type: ignore[arg-type]
    assert not pending.done
    for (o, lse), (want_o, want_lse) in zip(kept, want, strict=True):
        assert np.array_equal(caller.read(o), want_o)
        assert np.array_equal(caller.read(lse), want_lse)
    assert pending.done
    pending.result()


def test_memory_is_registered_once_until_it_is_unregistered(backend: Backend) -> None:
    arena = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    address = arena.ctypes.data
    assert backend.register(address, arena.nbytes)
    assert not backend.register(address, arena.nbytes)
    backend.unregister(address)
    assert backend.register(address, arena.nbytes)
    backend.unregister(address)


def test_an_array_over_two_registered_ranges_is_read_and_written_whole(backend: Backend) -> None:
    arena = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    address, half = arena.ctypes.data, 1 << 15
    assert backend.register(address, half)
    assert backend.register(address + half, half)
    plan = decode_plan([64, 512, 448], 16)
    shape = (len(plan.positions), 8, 64)
    q = np.random.default_rng(2).standard_normal(shape, np.float32).astype(HALF)
    want = backend.attend([Attend(0, q, plan, SCORING)]).result()[0]
    begin = half - q.nbytes // 2
    given = arena[begin : begin + q.nbytes].view(HALF).reshape(shape).view(PinnedArray)
    given[...] = q
    place = AttentionState(given, np.empty(shape[:2], np.float32))
    got = backend.attend([Attend(0, given, plan, SCORING)]).result()[0]
    assert np.array_equal(got.o, want.o)
    backend.attend([Attend(0, q, plan, SCORING, out=place)]).result()
    assert np.array_equal(np.array(given), want.o)
    for first in (0, half):
        backend.unregister(address + first)


def test_a_failing_registration_leaves_the_backend_as_it_was(backend: Backend) -> None:
    assert not backend.register(1 << 12, 4096), "an address of no memory was registered"
    slots = np.arange(4, dtype=np.int32)
    assert backend.gather(0, slots, "fp16").result()[0].shape == (4, 2, 64)


pytest.importorskip("cupy")


def test_a_failed_launch_loses_the_device_with_a_clear_message() -> None:
    from kernels.cuda.backend import CudaBackend
    from kernels.cuda.merge.variants import merge_spec

    backend = CudaBackend(PoolGeometry(2, 9, 5, 3, 80, dtype="fp16"), poison=True)
    with pytest.raises(DeviceLost, match="cannot be trusted"), backend.guarded():
        function = backend.library.function(merge_spec(80, False, "fp16", 2), "merge_states")
        function((1,), (4096,), (np.zeros(1, np.int32),))
    with pytest.raises(DeviceLost):
        backend.gather(0, np.zeros(1, np.int32), "fp16")
