"""Copies of pages on the fake device: their order with other calls, and the memory they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from fake_device import FREED, FakeDevice
from faked_backend import Kernels, fake_backend
from xxhash import xxh3_128_digest

from kernels import geometry
from kernels.backend import Int32, PagePlaces
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device import lazy_pinned
from kernels.cuda.pages import copies as copies_module

SLOTS = 4
HALF = np.dtype(np.float16)
PAGE = 2 * 2048
"""Bytes of a page, both layers."""
HEAD = 64


class Bench:
    """A backend on a fake device, whose launches copy up to `most` pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, most: int = 3) -> None:
        monkeypatch.setattr(copies_module, "MOST_PAGES", most)
        monkeypatch.setattr(lazy_pinned, "PIECE", 3 * 8192)
        self.device = FakeDevice(seed)
        self.rng = np.random.default_rng(seed)
        self.backend: CudaBackend
        self.kernels: Kernels
        self.backend, self.kernels = fake_backend(monkeypatch, self.device)
        self.copies = self.backend.page_copies
        self.kernels.pool[...] = self.values(*self.kernels.pool.shape)

    def values(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(HALF)

    def memory(self, count: int) -> Any:
        """Places for pages behind headers."""
        return self.copies.memory(count, HEAD + PAGE)

    def read(self, pages: list[int], memory: Any, rows: Any) -> Callable[[], None]:
        to = PagePlaces(memory, np.asarray(rows), HEAD)
        return self.copies.read(int32(pages), to, self.copies.mark())

    def write(self, pages: list[int], memory: Any, rows: Any) -> Callable[[], None]:
        source = PagePlaces(memory, np.asarray(rows), HEAD)
        return self.copies.write(int32(pages), source, self.copies.mark())

    def page(self, number: int) -> bytes:
        """A page as it is in the pool now."""
        slots = slice(number * SLOTS, (number + 1) * SLOTS)
        return bytes(self.kernels.pool[:, :, slots].astype(HALF).tobytes())

    def append(self, number: int) -> Any:
        """Write a page by the usual way: k and v of both layers."""
        slots = np.arange(number * SLOTS, (number + 1) * SLOTS, dtype=np.int32)
        rows = self.values(2, 2, SLOTS, 2, 64)
        for layer in range(2):
            self.backend.append(layer, rows[layer, 0], rows[layer, 1], slots)
        return rows

    def gather(self, number: int) -> Callable[[], bytes]:
        slots = np.arange(number * SLOTS, (number + 1) * SLOTS, dtype=np.int32)
        pending = [self.backend.gather(layer, slots, "fp16") for layer in range(2)]
        return lambda: b"".join(part.tobytes() for one in pending for part in one.result())


def int32(values: Any) -> Int32:
    return np.array(values, np.int32)


def digests(pages: list[bytes], segment: int) -> list[bytes]:
    starts = range(0, PAGE, segment)
    return [b"".join(xxh3_128_digest(page[at : at + segment]) for at in starts) for page in pages]


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_a_page_is_read_after_the_appends_before_it(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bench = Bench(monkeypatch, seed)
    memory = bench.memory(1)
    rows = bench.append(3)
    wait = bench.read([3], memory, [0])
    wait()
    assert memory[0, HEAD:].tobytes() == rows.tobytes()
    bench.append(3)
    bench.device.run()
    assert memory[0, HEAD:].tobytes() == rows.tobytes()
    assert not memory[0, :HEAD].any()


@SEEDS
def test_a_page_is_written_after_the_calls_before_it_and_before_those_after_its_end(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bench = Bench(monkeypatch, seed)
    memory = bench.memory(1)
    place = memory[0, HEAD:]
    place[...] = np.frombuffer(bench.values(2, 2, SLOTS, 2, 64).tobytes(), np.uint8)
    old = bench.page(5)
    reading = bench.gather(5)
    wait = bench.write([5], memory, [0])
    assert reading() == old
    wait()
    assert bench.gather(5)() == place.tobytes()


@SEEDS
@pytest.mark.parametrize(("most", "segment"), [(1, 2048), (3, 2048), (3, PAGE)])
def test_many_calls_in_flight_both_ways_share_the_streams(
    monkeypatch: pytest.MonkeyPatch, seed: int, most: int, segment: int
) -> None:
    monkeypatch.setattr(geometry, "DIGESTED", segment)
    bench = Bench(monkeypatch, seed, most)
    pool = [bench.page(number) for number in range(8)]
    down, up = bench.memory(16), bench.memory(8)
    up[:] = bench.rng.integers(0, 100, up.shape, np.uint8)
    waits = []
    for first in (0, 2, 1):  # pages 0 to 3 go down, 4 to 7 are overwritten
        waits.append(bench.read([0, 1, 2, 3], down, np.arange(4 * first + 3, 4 * first - 1, -1)))
        if first < 2:
            waits.append(bench.write([4 + first, 6 + first], up, [2 * first, 2 * first + 1]))
    begun = waits.copy()
    bench.rng.shuffle(waits)  # type: ignore[arg-type]
    ends = {wait: wait() for wait in waits}
    for first, read in ((0, 0), (2, 2), (1, 3)):
        got = [row.tobytes() for row in down[4 * first : 4 * first + 4, HEAD:]]
        assert got == pool[3::-1]
        assert ends[begun[read]] == digests(pool[:4], segment)
    for first, written in ((0, 1), (2, 4)):
        loaded = [row[HEAD:].tobytes() for row in up[first : first + 2]]
        assert ends[begun[written]] == digests(loaded, segment)
    assert [bench.page(number) for number in (4, 6, 5, 7)] == [
        row.tobytes() for row in up[:4, HEAD:]
    ]


def test_memory_is_pinned_in_pieces_as_it_is_used_and_unpinned_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, 0)
    memory = bench.memory(100)
    registered = bench.device.live["registered"]
    assert not registered
    bench.read([1], memory, [1])()
    assert len(registered) == 1
    bench.read([1, 2], memory, [97, 99])()
    assert len(registered) == 3
    bench.backend.close()
    assert not registered


def test_memory_that_the_system_does_not_pin_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, 0)
    memory = bench.memory(4)
    bench.device.refuses = 304
    found = bench.copies._memory.pin(memory, np.arange(4))
    assert found.tolist() == [row.ctypes.data for row in memory]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not bench.device.live["registered"]


def test_pages_whose_memory_is_not_pinned_are_copied_by_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, 0)
    memory = bench.memory(4)
    bench.copies._memory.is_pinned = False
    bench.read([6], memory, [1])
    bench.write([6], memory, [1])
    base, host = bench.backend.kv.k, memory[1].ctypes.data + HEAD
    both = [(host + layer * 2048, base + (8 * layer + 6) * 2048) for layer in range(2)]
    down, up = bench.device.copies[-4:-2], bench.device.copies[-2:]
    assert [(copy.to, copy.source, copy.size) for copy in down] == [(*one, 2048) for one in both]
    assert [(copy.source, copy.to, copy.size) for copy in up] == [(*one, 2048) for one in both]


def test_places_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    places = PagePlaces(bench.memory(4), np.array([1, 3]), HEAD)
    assert not bench.copies.is_prepared(places)
    bench.copies.prepare(places)
    assert bench.copies.is_prepared(places)


def test_other_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    with pytest.raises(ValueError, match="not memory for page copies"):
        bench.read([1], np.zeros((1, HEAD + PAGE), np.uint8), [0])
    with pytest.raises(ValueError, match="pages"):
        bench.read([8], bench.memory(1), [0])
    with pytest.raises(ValueError, match="bytes of a page"):
        bench.read([1], bench.copies.memory(1, PAGE), [0])


def test_a_lost_device_fails_copies_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.backend import DeviceLost

    bench = Bench(monkeypatch, 0)
    memory, after = bench.memory(1), bench.copies.mark()
    bench.backend._lost = "lost"
    with pytest.raises(DeviceLost):
        bench.copies.mark()
    with pytest.raises(DeviceLost):
        bench.copies.read(int32([1]), PagePlaces(memory, np.arange(1), HEAD), after)


def test_freed_pinned_memory_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests have their places as long as the copies run: dropped waits free nothing."""
    bench = Bench(monkeypatch, 3)
    memory = bench.memory(8)
    for _ in range(3):
        bench.read(list(range(8)), memory, range(8))
    bench.device.run()
    places = list(memory[:, HEAD:])
    assert not any((place == FREED).all() for place in places)
    assert [place.tobytes() for place in places] == [bench.page(number) for number in range(8)]
