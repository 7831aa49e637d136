"""Append, gather and row copies: rows are read as written, and others are unchanged."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from pooled import FP8, Pooled, Run, bars, check, expected, int32, normal, refusals, stored

from kernels import make_backend
from kernels.backend import LEFT_OUT, NUMPY_DTYPES, Attend, PoolGeometry, Scoring

DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
TENSORS = ("fp32", "fp16", "bf16")


def geometry(dtype, layout="NHD", page_size=5, layers=2) -> PoolGeometry:
    return PoolGeometry(layers, 12, page_size, 3, 64, layout, dtype, 0.02, 0.05)


def read(backend, layer: int, slots, dtype="fp32"):
    return backend.gather(layer, int32(slots), dtype).result()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_rows_are_gathered_dequantised(backend, rng, dtype, tensor, layout) -> None:
    with refusals(backend.kind, geometry(dtype)):
        pool = backend(geometry(dtype, layout))
        slots = int32(rng.permutation(60)[:37])
        k, v = (normal(rng, (37, 3, 64), tensor) for _ in range(2))
        pool.append(1, k, v, slots)
        for name in TENSORS:
            got = read(pool, 1, slots, name)
            for part, given, scale in zip(got, (k, v), (0.02, 0.05), strict=True):
                want = stored(given, dtype, scale)
                assert part.dtype == NUMPY_DTYPES[name]
                ulp = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[name]
                off = np.abs(part.astype(np.float64) - want) - ulp * np.abs(want)
                assert off.max() <= 1e-7, f"{name} of {dtype} is off by {off.max()}"


def test_rows_that_are_left_out_are_written_nowhere(backend, rng) -> None:
    pool = backend(geometry("fp16"))
    slots = int32(rng.permutation(60)[:40])
    before, after = (normal(rng, (40, 3, 64), "fp16") for _ in range(2))
    pool.append(0, before, before, slots)
    left_out = rng.random(40) < 0.5
    pool.append(0, after, after, np.where(left_out, np.int32(LEFT_OUT), slots))
    want = np.where(left_out[:, None, None], before, after)
    for part in read(pool, 0, slots, "fp16"):
        np.testing.assert_array_equal(part, want)
    pool.append(0, after, after, np.full(40, LEFT_OUT, np.int32))
    np.testing.assert_array_equal(read(pool, 0, slots, "fp16")[0], want)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_and_keeps_nan(backend, dtype) -> None:
    pool = backend(PoolGeometry(1, 2, 4, 1, 64, "NHD", dtype, 0.5, 2.0))
    row = np.zeros((1, 1, 64), np.float32)
    row[0, 0, :6] = 1e30, -1e30, np.inf, np.nan, 2.0**-8, -0.0
    pool.append(0, row, row, int32([3]))
    largest = 448.0 if dtype == "fp8_e4m3" else 57344.0
    for part, scale in zip(read(pool, 0, [3]), (0.5, 2.0), strict=True):
        assert part[0, 0, :3].tolist() == [largest * scale, -largest * scale, largest * scale]
        assert np.isnan(part[0, 0, 3])
        assert part[0, 0, 4] == stored(row, dtype, scale)[0, 0, 4]


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_value_survives_a_round_trip(backend, dtype) -> None:
    every = np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    finite = np.where(np.isfinite(every), every, 0).reshape(1, 4, 64)
    pool = backend(PoolGeometry(1, 1, 1, 4, 64, "NHD", dtype))
    pool.append(0, finite, finite, int32([0]))
    k, v = read(pool, 0, [0])
    assert np.array_equal(k, finite)
    assert np.array_equal(v, finite)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_rows_are_the_sources_bits_in_every_layer(backend, rng, dtype, layout) -> None:
    with refusals(backend.kind, geometry(dtype)):
        pool = backend(geometry(dtype, layout))
        slots = np.arange(60)
        for layer in range(2):
            k, v = (normal(rng, (60, 3, 64), "fp16") for _ in range(2))
            pool.append(layer, k, v, int32(slots))
        before = [read(pool, layer, slots) for layer in range(2)]
        pool.copy_rows(int32([0, 7, 3, 1]), int32([2, 4, 9, 5]), int32([3, 5, 1, 0]))
        source = slots.copy()
        for src, dst, rows in [(0, 2, 3), (7, 4, 5), (3, 9, 1)]:
            source[dst * 5 : dst * 5 + rows] = np.arange(src * 5, src * 5 + rows)
        for layer in range(2):
            for part, old in zip(read(pool, layer, slots), before[layer], strict=True):
                assert np.array_equal(part, old[source]), f"layer {layer} of {dtype} {layout}"


def test_an_append_touches_no_other_slot_and_no_other_layer(backend, rng) -> None:
    pool = backend(geometry("fp16"))
    k, v = (normal(rng, (4, 3, 64), "fp16") for _ in range(2))
    pool.append(0, k, v, int32([7, 0, 59, 23]))
    others = [slot for slot in range(60) if slot not in (7, 0, 59, 23)]
    for layer, slots in [(0, others), (1, range(60))]:
        for part in read(pool, layer, list(slots)):
            assert np.isnan(part).all()


def test_nothing_appended_gathered_or_copied_is_legal(backend, rng) -> None:
    pool = backend(geometry("bf16"))
    none = normal(rng, (0, 3, 64), "bf16")
    pool.append(0, none, none, int32([]))
    pool.copy_rows(int32([]), int32([]), int32([]))
    assert read(pool, 0, [])[0].shape == (0, 3, 64)


def test_a_misaligned_tensor_is_read_right(backend) -> None:
    pool = backend(geometry("fp16"))
    body = np.arange(3 * 64 * 4 + 1, dtype=np.uint8).tobytes()
    rows = np.frombuffer(body, np.float16, 3 * 64, offset=1).reshape(1, 3, 64)
    assert not rows.flags.aligned
    rows = np.where(np.isfinite(rows), rows, 0).astype(np.float16)
    odd = np.frombuffer(b"\0" + rows.tobytes(), np.float16, offset=1).reshape(1, 3, 64)
    pool.append(0, odd, odd, int32([11]))
    assert np.array_equal(read(pool, 0, [11])[0], rows.astype(np.float32))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_as_they_are_stored_move_to_the_bit(backend, rng, dtype, layout) -> None:
    with refusals(backend.kind, geometry(dtype)):
        source, target = backend(geometry(dtype, layout)), backend(geometry(dtype, "NHD"))
        kind = NUMPY_DTYPES[dtype]
        shape = (37, 3, 64 * kind.itemsize)
        k, v = (rng.integers(0, 256, shape, np.uint8).view(kind) for _ in range(2))
        slots, others = (int32(rng.permutation(60)[:37]) for _ in range(2))
        source.write_stored(1, k, v, slots).result()
        places = np.zeros_like(k), np.zeros_like(v)
        target.write_stored(0, *source.read_stored(1, slots, places).result(), others).result()
        moved = np.zeros_like(k), np.zeros_like(v)
        reply = target.read_stored(0, others, moved).result()
        for place, got, want in zip(moved, reply, (k, v), strict=True):
            assert got is place
            assert np.array_equal(got.view(np.uint8), want.view(np.uint8)), "NaNs and all"
        rest = [slot for slot in range(60) if slot not in slots]
        assert np.isnan(read(source, 1, rest)[0]).all(), "another slot was written"


def test_stored_rows_of_another_dtype_are_refused(backend, rng) -> None:
    pool = backend(geometry("fp16"))
    rows = normal(rng, (1, 3, 64), "bf16")
    with pytest.raises(ValueError, match="as the pool is"):
        pool.write_stored(0, rows, rows, int32([0]))
    with pytest.raises(ValueError, match=r"out\.k"):
        pool.read_stored(0, int32([0]), (rows, rows))


@pytest.mark.parametrize("slot", [-2, 60])
def test_a_slot_outside_the_pool_is_refused_and_nothing_is_written(backend, rng, slot) -> None:
    pool = backend(geometry("fp16"))
    k, v = (normal(rng, (2, 3, 64), "fp16") for _ in range(2))
    with pytest.raises(ValueError, match="slots"):
        pool.append(0, k, v, int32([0, slot]))
    with pytest.raises(ValueError, match="slots"):
        read(pool, 0, [slot])
    assert np.isnan(read(pool, 0, [0])[0]).all()


def test_an_idle_pool_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = make_backend("cpu", PoolGeometry(32, 1024, 16, 8, 128))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool.close()
    assert after - before < 100 * 1024, f"a 2 GiB pool took {(after - before) // 1024} MiB"


def test_the_error_of_a_pool_too_large_for_the_machine_has_a_remedy() -> None:
    with pytest.raises(MemoryError, match=r"bytes.*lower pool\.num_pages"):
        make_backend("cpu", PoolGeometry(32, 2**28, 16, 8, 128))


def test_dead_rows_of_a_reused_page_do_not_show(backend, rng) -> None:
    """A page once full and now holding one token gives that token only."""
    pooled = Pooled(backend(geometry("fp16", layers=1)), rng, "fp16")
    old = pooled.add(5)
    cut = Run(old.pages, old.k[:1], old.v[:1])
    q = normal(rng, (1, 6, 64), "fp16")
    got = pooled.backend.attend([Attend(0, q, pooled.flat([cut], [1], True), Scoring(0.125))])
    want = expected(q, [cut], [1], True, Scoring(0.125))
    check(got.result()[0], want, bars(backend.kind, "fp16", "fp16"))
