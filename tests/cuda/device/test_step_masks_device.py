"""Steps with masks on a lane: their states on a device against float64, launched singly and by a
graph, while the mask changes from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

from kernels.backend import DType, Plan, PoolGeometry, Scoring  # noqa: E402
from kernels.lanes.lane import Owner, Slot, StepWork  # noqa: E402
from kernels.masks import OwnMask  # noqa: E402

ARENA, FLAGS, MASK = 16 << 20, 12 << 20, 13 << 20
SLOT = Slot(q=0, k=0, v=0, o=4 << 20, lse=8 << 20)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim", "heads"), [("fp16", 128, (8, 2)), ("bf16", 64, (4, 4)), ("fp16", 80, (8, 1))]
)
@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"), [([1, 3, 2], [40, 3, 900]), ([8, 60, 5, 130], [3000, 70, 5, 2100])]
)
def test_states_of_masked_steps_equal_float64(
    packed: bool,
    dtype: DType,
    dim: int,
    heads: tuple[int, int],
    qo_lens: list[int],
    kv_lens: list[int],
) -> None:
    import cupy
    from device_cases import PagePool, Segment, assert_close, fill, make_level, oracle, random_q

    from kernels.backend import NUMPY_DTYPES, AttentionState
    from kernels.cuda.backend import CudaBackend
    from kernels.cuda.lanes.lanes import CudaLanes

    rng, kind = np.random.default_rng(dim), np.dtype(NUMPY_DTYPES[dtype])
    backend = CudaBackend(PoolGeometry(2, 400, 16, heads[1], dim, "NHD", dtype))
    fill(backend, 1)
    lane = CudaLanes(backend, 1 << 26, 4, queues=32).open(memoryview(b""), ARENA, Owner(1))
    memory = cupy.cuda.UnownedMemory(lane.address, lane.arena_bytes, lane)
    whole = cupy.ndarray((lane.arena_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    ends = np.cumsum([0, *qo_lens])
    rows = int(ends[-1])
    own = [Segment(int(ends[i]), int(ends[i + 1]), n, 0) for i, n in enumerate(kv_lens)]
    level = make_level(own, PagePool(backend, rng), rows, True)
    lens = zip(qo_lens, kv_lens, strict=True)
    positions = np.concatenate([np.arange(kv - qo, kv) for qo, kv in lens]).astype(np.int32)
    lengths = (np.array(one, np.int32) for one in (qo_lens, kv_lens))
    mask, scoring = OwnMask(MASK, packed, *lengths), Scoring(dim**-0.5)

    def put(values: Any, at: int) -> None:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        whole[at : at + flat.size] = cupy.asarray(flat)

    def get(at: int, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return cupy.asnumpy(whole[at : at + size]).view(dtype).reshape(shape)

    for _ in range(4):
        plan = Plan((level,), positions)
        q = random_q((rows, heads[0], dim), dtype, rng)
        elements = rng.integers(0, 256 if packed else 2, int(mask.sizes.sum())).astype(np.uint8)
        put(q, SLOT.q)
        put(elements, MASK)
        cupy.cuda.Device().synchronize()
        work = StepWork(
            (0, 1), (SLOT,), FLAGS, rows, heads[0], kind, None, plan, (scoring,) * 2, 1.0, mask=mask
        )
        run = lane.begin(work)
        run.release()
        while not run.done:
            pass
        o, lse = get(SLOT.o, q.shape, kind), get(SLOT.lse, q.shape[:2], np.float32)
        lane.clear()
        arena = memoryview(bytes(MASK) + elements.tobytes())
        expanding = mask.expand(arena, None)
        try:
            while True:
                next(expanding)
        except StopIteration as made:
            assert_close(
                AttentionState(o, lse), oracle(backend, 1, q, plan, scoring, made.value), dtype
            )
