"""tritonclient, unmodified, over both doors: tensors in system shared memory, with true numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import oracle
import pytest
from http_messages import HEAD_DIM, QO_HEADS, WIRE_DTYPE, rows
from http_service import Service, serving
from regions import (
    Region,
    in_region,
    infer,
    memory,
    packed,
    registered,
    status,
    to_region,
    told_of,
)
from test_http_numbers import SCALE, check, seen
from test_oip_numbers import fill
from triton_callers import Triton
from tritonclient.utils import np_to_triton_dtype

ROW = QO_HEADS * HEAD_DIM * WIRE_DTYPE.itemsize
"""Bytes of one row of q, or o."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--server.client-shm", "true", "--server.client-shm-regions", "8") as running:
        yield running


def test_append_and_decode_read_and_write_regions(triton: Triton, rng: np.random.Generator) -> None:
    k, v, q = rows(rng, 5), rows(rng, 5), rows(rng, 1, QO_HEADS)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    with registered(triton, 1 << 14) as given, registered(triton, 1 << 14) as wanted:
        indptr = np.array([0, 5], np.int32)
        inputs = packed(triton, given, {"k": k, "v": v, "append_indptr": indptr})
        result = infer(triton, "append", inputs, layer=0, sequences=["a"])
        assert "[5]" in str(result.get_response())
        outputs = [to_region(triton, "o", wanted, 4096, 64), to_region(triton, "lse", wanted, 16)]
        inputs = [in_region(triton, "q", q, given, 128)]
        result = infer(triton, "decode", inputs, outputs, layer=0, sequences=["a"])
        sizes = {"shared_memory_region": wanted.name, "shared_memory_byte_size": ROW}
        assert told_of(result, "o") == {**sizes, "shared_memory_offset": 64}
        tensors = {
            "o": wanted.get(q.shape, q.dtype, 64),
            "lse": wanted.get(q.shape[:2], np.float32),
        }
        check(tensors, *oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE), "decode")
        assert set(wanted.all_bytes()[64 + ROW :]) == {7}, "more was written than the output"


def test_prefill_with_a_mask_takes_some_inputs_from_regions_and_some_from_the_body(
    triton: Triton, rng: np.random.Generator
) -> None:
    k, v = fill(triton, rng, "a", 6)
    q = rows(rng, 3, QO_HEADS)
    mask = rng.random((3, 6)) < 0.6
    with registered(triton, 1 << 14) as region:
        inputs = [
            in_region(triton, "mask", mask.reshape(-1), region, 8000),
            triton.input("q", q),
            in_region(triton, "qo_indptr", np.array([0, 3], np.int32), region),
        ]
        outputs = [
            to_region(triton, "o", region, 3 * ROW),
            triton.module.InferRequestedOutput("lse"),
        ]
        result = infer(triton, "prefill", inputs, outputs, layer=1, sequences=["a"], causal=True)
        tensors = {"o": region.get(q.shape, q.dtype), "lse": result.as_numpy("lse")}
    visible = seen(q, k, causal=True, mask=mask)
    check(tensors, *oracle.attend(q, k, v, visible, sm_scale=SCALE), "a masked prefill")


def test_large_tensors_and_long_json_go_the_same_way(
    triton: Triton, rng: np.random.Generator
) -> None:
    """Beyond what the event loop copies itself, and what a door reads of JSON itself."""
    k, v = fill(triton, rng, "root", 8)
    names = [f"{'x' * 60}-{i}" for i in range(400)]
    forks = [{"id": name, "parent": "root"} for name in names]
    triton.infer("create_sequences", sequences=forks)
    q = rows(rng, 400, QO_HEADS)
    with registered(triton, 1 << 20) as given, registered(triton, 1 << 20) as wanted:
        inputs = packed(triton, given, {"qo_indptr": np.arange(401, dtype=np.int32), "q": q})
        outputs = [
            to_region(triton, "o", wanted, 400 * ROW),
            to_region(triton, "lse", wanted, 4 * 400 * QO_HEADS, 400 * ROW),
        ]
        infer(triton, "prefill", inputs, outputs, layer=1, sequences=names)
        tensors = {
            "o": wanted.get(q.shape, q.dtype),
            "lse": wanted.get(q.shape[:2], np.float32, 400 * ROW),
        }
    check(tensors, *oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE), "forks")


def test_a_region_may_begin_inside_its_object(triton: Triton, rng: np.random.Generator) -> None:
    k = rows(rng, 2)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    with memory(8192) as region:
        triton.client.register_system_shared_memory("inside", region.key, 4096, offset=1024)
        assert status(triton, "inside") == {"inside": (region.key, 1024, 4096)}
        region.put(k, offset=1024 + 256)
        inside = Region("inside", region.key, region.handle)
        given = [
            triton.module.InferInput(name, k.shape, np_to_triton_dtype(k.dtype)).set_shared_memory(
                "inside", k.nbytes, offset=256
            )
            for name in ("k", "v")
        ]
        infer(triton, "append", given, layer=0, sequences=["a"], append_indptr=[0, 2])
        outputs = [to_region(triton, "v", inside, k.nbytes, 512)]
        infer(triton, "gather", [], outputs, layer=0, sequences=["a"])
        np.testing.assert_array_equal(region.get(k.shape, k.dtype, 1024 + 512), k)
        triton.client.unregister_system_shared_memory("inside")
