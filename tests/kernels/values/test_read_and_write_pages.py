"""Whole pages to host memory and back: all bits of every layer, and of no other page."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kernels.backend import NUMPY_DTYPES, PagePlaces, PoolGeometry

DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
PAGES = 23


def int32(values) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)


def geometry(dtype, layout="NHD", page_size=5, layers=3) -> PoolGeometry:
    return PoolGeometry(layers, PAGES, page_size, 2, 64, layout, dtype, 0.02, 0.05)


def fill(pool, rng, pages) -> None:
    """Random rows in some pages; the others stay NaN."""
    g = pool.geometry
    slots = int32([page * g.page_size + at for page in pages for at in range(g.page_size)])
    for layer in range(g.num_layers):
        k, v = rng.standard_normal((2, len(slots), g.num_kv_heads, g.head_dim), np.float32)
        pool.append(layer, k, v, slots)


def bits(pool, page: int) -> bytes:
    """All rows of a page by another way."""
    g, found = pool.geometry, b""
    slots = int32(range(page * g.page_size, (page + 1) * g.page_size))
    for layer in range(g.num_layers):
        shape = (g.page_size, g.num_kv_heads, g.head_dim)
        places = tuple(np.zeros(shape, NUMPY_DTYPES[g.dtype]) for _ in range(2))
        pool.read_stored(layer, slots, places).result()
        for place in places:
            found += (place if g.layout == "NHD" else place.swapaxes(0, 1)).tobytes()
    return found


def expected_digests(pages, size=2**17) -> list[bytes]:
    """XXH3-128 of each `size` bytes of pages."""
    return [
        b"".join(xxh3_128_digest(page[at : at + size]) for at in range(0, len(page), size))
        for page in pages
    ]


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_to_the_bit_in_other_places(backend, rng, dtype, layout, page_size) -> None:
    if (backend.kind, dtype) == ("cuda", "fp32"):
        pytest.skip("the CUDA backend stores fp16, bf16 or fp8")
    pool = backend(geometry(dtype, layout, page_size))
    g, copies = pool.geometry, pool.page_copies
    order = rng.permutation(PAGES).tolist()
    written, free = order[:10], order[10:20]
    fill(pool, rng, written)
    before = [bits(pool, page) for page in range(PAGES)]
    memory = copies.memory(10, 64 + g.num_layers * g.page_bytes)
    assert not memory.any()
    rows = rng.permutation(10)
    digests = copies.read(int32(written), PagePlaces(memory, rows, 64), copies.mark())()
    assert digests == expected_digests(before[page] for page in written)
    assert [row.tobytes() for row in memory[rows, 64:]] == [before[page] for page in written]
    assert copies.write(int32(free), PagePlaces(memory, rows, 64), copies.mark())() == digests
    after = [bits(pool, page) for page in range(PAGES)]
    moved = dict(zip(free, written, strict=True))
    assert after == [before[moved.get(page, page)] for page in range(PAGES)]


def test_pages_larger_than_one_copy_come_back_too(backend, rng) -> None:
    """A layer of a page has 2 MiB, a page 26 MiB."""
    pool = backend(PoolGeometry(13, 4, 256, 16, 128, "HND", "fp16"))
    g, copies = pool.geometry, pool.page_copies
    fill(pool, rng, [2])
    want = bits(pool, 2)
    memory = copies.memory(2, g.num_layers * g.page_bytes)
    found = copies.read(int32([2, 2]), PagePlaces(memory, np.arange(2)), copies.mark())()
    assert found == expected_digests([want] * 2, 2**21)
    assert [row.tobytes() == want for row in memory] == [True, True]
    again = copies.write(int32([0, 3]), PagePlaces(memory, np.arange(2)), copies.mark())()
    assert again == found
    assert [bits(pool, page) == want for page in (0, 3)] == [True, True]


@pytest.mark.parametrize(
    ("page_size", "heads", "layers", "dtype"),
    [
        (1, 1, 1, "fp8_e5m2"),  # 128 bytes, less than the kernel digests
        (1, 1, 1, "fp16"),
        (3, 1, 1, "fp16"),
        (16, 8, 9, "fp16"),  # 32 KiB a layer: four a digest, and one
        (11, 3, 17, "bf16"),  # 8,448 bytes a layer: 16 a digest, and one
        (80, 8, 3, "fp16"),  # a digest each
    ],
)
def test_digests_are_those_of_xxhash(backend, rng, page_size, heads, layers, dtype) -> None:
    pool = backend(PoolGeometry(layers, PAGES, page_size, heads, 64, "NHD", dtype))
    g, copies = pool.geometry, pool.page_copies
    memory = copies.memory(9, g.payload_bytes)
    for page in memory:
        page[...] = rng.integers(0, 256, page.size, np.uint8)
    segment = g.segment_pieces * g.piece_bytes
    places = PagePlaces(memory, np.arange(9))
    want = expected_digests([page.tobytes() for page in memory], segment)
    assert copies.write(int32(range(3, 12)), places, copies.mark())() == want
    memory[:] = 0
    assert copies.read(int32(range(3, 12)), places, copies.mark())() == want


def test_a_bit_that_flips_in_host_memory_changes_its_own_page_s_digest(backend, rng) -> None:
    pool = backend(geometry("fp16"))
    g, copies = pool.geometry, pool.page_copies
    fill(pool, rng, range(4))
    places = PagePlaces(copies.memory(4, g.payload_bytes), np.arange(4))
    before = copies.read(int32(range(4)), places, copies.mark())()
    for bit in rng.integers(0, 8 * g.payload_bytes, 20).tolist():
        places.blocks[2, bit // 8] ^= 1 << bit % 8
        after = copies.write(int32(range(4)), places, copies.mark())()
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False, True]
        places.blocks[2, bit // 8] ^= 1 << bit % 8


def test_no_pages_are_no_work(backend) -> None:
    copies = backend(geometry("fp16")).page_copies
    places = PagePlaces(copies.memory(1, 2**16), np.arange(0))
    copies.read(int32([]), places, copies.mark())()
    copies.write(int32([]), places, copies.mark())()
