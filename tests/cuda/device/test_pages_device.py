"""Pages to and from host memory on the device, beside attention, appends and each other."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from kernels.backend import DType, Int32, PagePlaces, PoolGeometry  # noqa: E402

NUM_PAGES = 600


def backend_of(dtype: DType, layout: Any, page_size: int) -> Any:
    from kernels.cuda.backend import CudaBackend

    return CudaBackend(PoolGeometry(8, NUM_PAGES, page_size, 4, 128, layout, dtype), poison=True)


def int32(values: Any) -> Int32:
    return np.ascontiguousarray(values, np.int32)


HEAD = 192


def random_places(copies: Any, rng: np.random.Generator, count: int, size: int) -> Any:
    """Memory for `count` pages with random content, behind headers."""
    whole = copies.memory(count, HEAD + size)
    for place in whole:
        place[...] = rng.integers(0, 256, HEAD + size, np.uint8)
    return whole


def places(memory: Any, rows: Any) -> PagePlaces:
    return PagePlaces(memory, np.asarray(rows), HEAD)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "page_size"), [("fp16", 16), ("bf16", 5), ("fp8_e4m3", 64)])
def test_many_threads_load_and_store_at_once(dtype: DType, layout: Any, page_size: int) -> None:
    """Each owns pages: what it loads, it stores again, the same to the bit; others' are not
    touched. Appends and attention's gathers run beside, and device memory that is freed meanwhile
    is overwritten at once."""
    from poisoning import poisoned_when_freed

    backend = backend_of(dtype, layout, page_size)
    g, copies = backend.geometry, backend.page_copies
    size = g.num_layers * g.page_bytes
    wrong: list[str] = []
    after = copies.mark()

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        own = int32(rng.permutation(60) + 60 * number)
        up, down = random_places(copies, rng, 60, size), random_places(copies, rng, 60, size)
        for turn in range(8):
            waits = []
            for first in range(0, 60, 17):
                some = slice(first, first + 17)
                waits.append(copies.write(own[some], places(up, range(60)[some]), after))
            for wait in waits:
                wait()
            copies.read(own, places(down, range(60)), after)()
            if not np.array_equal(up[:, HEAD:], down[:, HEAD:]):
                wrong.append(f"thread {number}, turn {turn}")
            rng.shuffle(own)

    with poisoned_when_freed():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(99)
        slots = int32(np.arange(400 * page_size, 440 * page_size))
        kind = {"fp16": np.float16}.get(dtype, np.float32)
        k = rng.standard_normal((len(slots), g.num_kv_heads, g.head_dim), np.float32).astype(kind)
        while any(thread.is_alive() for thread in threads):
            backend.append(3, k, k, slots)
            found, _ = backend.gather(3, slots, "fp32").result()
        for thread in threads:
            thread.join()
    assert not wrong
    assert np.isfinite(found).all()
    dead = int32(np.arange(450 * page_size, 460 * page_size))
    for layer in range(g.num_layers):
        assert np.isnan(backend.gather(layer, dead, "fp32").result()[0]).all()
    backend.close()


def test_a_store_sees_the_appends_before_it_and_a_load_is_seen_by_later_calls() -> None:
    backend = backend_of("fp16", "NHD", 16)
    g, copies = backend.geometry, backend.page_copies
    rng = np.random.default_rng(5)
    size = g.num_layers * g.page_bytes
    memory = random_places(copies, rng, 2, size)
    place = memory[:, HEAD:]
    slots = int32(np.arange(16))
    shape = (16, g.num_kv_heads, g.head_dim)
    heavy = int32(rng.integers(16 * 100, 16 * NUM_PAGES, 40_000))
    rows = np.zeros((len(heavy), *shape[1:]), np.float16)
    for _ in range(30):
        backend.append(0, rows, rows, heavy)  # keeps the stream busy
        written = []
        for layer in range(g.num_layers):
            k, v = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in "kv")
            backend.append(layer, k, v, slots)
            written += [k, v]
        wait = copies.read(int32([0]), places(memory, [0]), copies.mark())
        wait()
        assert place[0].tobytes() == b"".join(one.tobytes() for one in written)
        pending = backend.gather(2, slots, "fp16")
        place[1][...] = rng.integers(0, 100, size, np.uint8)
        copies.write(int32([0]), places(memory, [1]), copies.mark())()
        assert pending.result()[0].tobytes() == written[4].tobytes()
        got = backend.gather(2, slots, "fp16").result()
        begin = 2 * g.page_bytes
        assert (
            got[0].tobytes() + got[1].tobytes() == place[1][begin : begin + g.page_bytes].tobytes()
        )
    backend.close()
