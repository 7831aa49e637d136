"""Append, gather, row copies and merges on the device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels.backend import (  # noqa: E402
    NUMPY_DTYPES,
    AttentionState,
    DeviceLost,
    DType,
    PoolGeometry,
    Unsupported,
)


def backend_of(**options: Any) -> Any:
    from kernels.cuda.backend import CudaBackend

    settings: dict[str, Any] = {
        "num_layers": 2,
        "num_pages": 9,
        "page_size": 5,
        "num_kv_heads": 3,
        "head_dim": 80,
    }
    return CudaBackend(PoolGeometry(**(settings | options)), poison=True)


def stored(values: Any, dtype: DType, scale: float) -> Any:
    """Real values after rounding to a pool's `dtype`."""
    kind = NUMPY_DTYPES[dtype]
    scaled = values.astype(np.float32) / np.float32(scale)
    if dtype.startswith("fp8"):
        most = float(ml_dtypes.finfo(kind).max)
        scaled = np.clip(scaled, -most, most)
    return scaled.astype(kind).astype(np.float32) * np.float32(scale)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("tensor", ["fp16", "bf16", "fp32"])
def test_appended_rows_are_gathered(layout: Any, dtype: DType, tensor: DType) -> None:
    backend = backend_of(layout=layout, dtype=dtype, k_scale=0.25, v_scale=0.5)
    k_scale, v_scale = (0.25, 0.5) if dtype.startswith("fp8") else (1.0, 1.0)
    rng = np.random.default_rng(0)
    slots = rng.permutation(45)[:23].astype(np.int32)
    shape = (23, 3, 80)
    k = (rng.standard_normal(shape, np.float32) * 40).astype(NUMPY_DTYPES[tensor])
    v = (rng.standard_normal(shape, np.float32) * 1e-3).astype(NUMPY_DTYPES[tensor])
    if dtype == "fp8_e4m3":
        k[0, 0, :4] = [1000, -1000, 0, 448]
    backend.append(1, k, v, slots)
    got_k, got_v = backend.gather(1, slots, "fp32").result()
    np.testing.assert_array_equal(got_k, stored(k, dtype, k_scale))
    np.testing.assert_array_equal(got_v, stored(v, dtype, v_scale))
    other, _ = backend.gather(0, slots, "fp32").result()
    assert np.isnan(other).all(), "the other layer was written"
    half, _ = backend.gather(1, slots[:2], "fp16").result()
    assert half.dtype == np.float16


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3"])
def test_row_copies_take_every_layer_and_nothing_more(layout: Any, dtype: DType) -> None:
    backend = backend_of(layout=layout, dtype=dtype)
    rng = np.random.default_rng(1)
    k = rng.standard_normal((10, 3, 80), np.float32)
    slots = np.arange(10, dtype=np.int32)  # pages 0 and 1
    for layer in range(2):
        backend.append(layer, k + layer, k - layer, slots)
    pages = (np.array([0, 1], np.int32), np.array([7, 4], np.int32))
    backend.copy_rows(*pages, np.array([3, 5], np.int32))
    copied = np.array([35, 36, 37, 20, 21, 22, 23, 24], np.int32)
    source = np.array([0, 1, 2, 5, 6, 7, 8, 9], np.int32)
    for layer in range(2):
        for a, b in zip(
            backend.gather(layer, copied, "fp32").result(),
            backend.gather(layer, source, "fp32").result(),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        rest, _ = backend.gather(layer, np.array([38, 39], np.int32), "fp32").result()
        assert np.isnan(rest).all(), "rows past the count were copied"


def merged(o: Any, lse: Any, indptr: Any) -> tuple[Any, Any]:
    rows = len(indptr) - 1
    out, out_lse = np.zeros((rows, *o.shape[1:])), np.full((rows, o.shape[1]), -np.inf)
    for t in range(rows):
        for j in range(indptr[t], indptr[t + 1]):
            both = np.logaddexp(out_lse[t], lse[j].astype(np.float64))
            safe = np.where(both == -np.inf, 0, both)
            a, b = np.exp(out_lse[t] - safe), np.exp(lse[j].astype(np.float64) - safe)
            out[t] = out[t] * a[:, None] + o[j].astype(np.float64) * b[:, None]
            out_lse[t] = both
    return out, out_lse


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 80), (3, 7), (32, 128), (1030, 1), (2, 300)])
@pytest.mark.parametrize("into", [False, True])
def test_merges_of_any_lengths_heads_and_dims(
    dtype: DType, heads: int, dim: int, into: bool
) -> None:
    rng = np.random.default_rng(dim)
    backend = backend_of(dtype="fp16")
    lengths = [0, 1, 2, 5, 0, 70, 3]
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    o = rng.standard_normal((int(indptr[-1]), heads, dim), np.float32).astype(NUMPY_DTYPES[dtype])
    lse = (rng.standard_normal((int(indptr[-1]), heads)) * 10).astype(np.float32)
    lse[rng.random(lse.shape) < 0.2] = -np.inf
    o[lse == -np.inf] = 0
    member, all_o, all_lse, all_indptr = None, o, lse, indptr
    if into:
        member = AttentionState(
            rng.standard_normal((7, heads, dim), np.float32).astype(NUMPY_DTYPES[dtype]),
            rng.standard_normal((7, heads)).astype(np.float32),
        )
        order = np.argsort(
            np.concatenate([np.repeat(np.arange(7), lengths), np.arange(7)]), kind="stable"
        )
        all_o, all_lse = (
            np.concatenate([o, member.o])[order],
            np.concatenate([lse, member.lse])[order],
        )
        all_indptr = indptr + np.arange(8, dtype=np.int32)
    expected = merged(all_o, all_lse, all_indptr)
    state = backend.merge(o, lse, indptr, member).result()
    if into:
        assert state is member
    bar = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 1e-5}[dtype]
    np.testing.assert_allclose(state.o.astype(np.float64), expected[0], atol=bar, rtol=0)
    np.testing.assert_allclose(state.lse, expected[1], atol=1e-4)


def test_empty_operations_are_legal() -> None:
    backend = backend_of(dtype="fp16")
    none = np.zeros(0, np.int32)
    rows = np.zeros((0, 3, 80), np.float16)
    backend.append(0, rows, rows, none)
    backend.copy_rows(none, none, none)
    k, v = backend.gather(0, none, "fp16").result()
    assert k.shape == v.shape == (0, 3, 80)
    state = backend.merge(rows, np.zeros((0, 3), np.float32), np.zeros(3, np.int32)).result()
    assert (state.o == 0).all() and (state.lse == -np.inf).all()


def test_bad_input_is_named_and_reaches_no_kernel() -> None:
    backend = backend_of(dtype="fp16")
    rows = np.zeros((1, 3, 80), np.float16)
    with pytest.raises(ValueError, match="slots"):
        backend.append(0, rows, rows, np.array([45], np.int32))
    with pytest.raises(ValueError, match="layer"):
        backend.append(2, rows, rows, np.array([0], np.int32))
    with pytest.raises(ValueError, match="dst_pages"):
        backend.copy_rows(*(np.array([x], np.int32) for x in (0, 9, 1)))
    with pytest.raises(Unsupported):
        backend_of(dtype="fp32")
    with pytest.raises(Unsupported):
        backend_of(head_dim=72)


def test_a_failed_launch_loses_the_device_with_a_clear_message() -> None:
    backend = backend_of(dtype="fp16")
    with pytest.raises(DeviceLost, match="cannot be trusted"), backend.guarded():
        function = backend.library.function(
            next(spec for spec in backend.library.specs if spec.source == "merge/merge"),
            "merge_states",
        )
        function((1,), (4096,), (np.zeros(1, np.int32),))
    with pytest.raises(DeviceLost):
        backend.gather(0, np.zeros(1, np.int32), "fp16")
