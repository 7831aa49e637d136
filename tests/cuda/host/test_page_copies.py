"""Copies of pages on the fake device: their order with other calls, and the memory they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from fake_device import FREED, FakeDevice
from faked_backend import Kernels, fake_backend

from kernels.backend import Int32
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device import lazy_pinned
from kernels.cuda.device.host_memory import address_of
from kernels.cuda.pages import copies as copies_module

SLOTS = 4
HALF = np.dtype(np.float16)
PAGE = 2 * 2048
"""Bytes of a page, both layers."""


class Bench:
    """A backend on a fake device, with chunks of `chunk` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, chunk: int = 3 * PAGE) -> None:
        monkeypatch.setattr(copies_module, "CHUNK", chunk)
        monkeypatch.setattr(lazy_pinned, "PIECE", 4096)
        self.device = FakeDevice(seed)
        self.rng = np.random.default_rng(seed)
        self.backend: CudaBackend
        self.kernels: Kernels
        self.backend, self.kernels = fake_backend(monkeypatch, self.device)
        self.copies = self.backend.page_copies
        self.kernels.pool[...] = self.values(*self.kernels.pool.shape)

    def values(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(HALF)

    def memory(self, count: int) -> list[Any]:
        """Places for pages, apart by an odd number of bytes: as behind headers."""
        whole = self.copies.memory(count * (PAGE + 64))
        return [row[64:] for row in whole.reshape(count, -1)]

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


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_a_page_is_read_after_the_appends_before_it(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bench = Bench(monkeypatch, seed)
    (place,) = bench.memory(1)
    rows = bench.append(3)
    wait = bench.copies.read(int32([3]), [place], bench.copies.mark())
    wait()
    assert place.tobytes() == rows.tobytes()
    bench.append(3)
    bench.device.run()
    assert place.tobytes() == rows.tobytes()


@SEEDS
def test_a_page_is_written_after_the_calls_before_it_and_before_those_after_its_end(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bench = Bench(monkeypatch, seed)
    (place,) = bench.memory(1)
    place[...] = np.frombuffer(bench.values(2, 2, SLOTS, 2, 64).tobytes(), np.uint8)
    old = bench.page(5)
    reading = bench.gather(5)
    wait = bench.copies.write(int32([5]), [place], bench.copies.mark())
    assert reading() == old
    wait()
    assert bench.gather(5)() == place.tobytes()


@SEEDS
@pytest.mark.parametrize("chunk", [2048, PAGE, 3 * PAGE])
def test_many_calls_in_flight_both_ways_share_the_chunks(
    monkeypatch: pytest.MonkeyPatch, seed: int, chunk: int
) -> None:
    bench = Bench(monkeypatch, seed, chunk)
    pool = [bench.page(number) for number in range(8)]
    down, up = bench.memory(16), bench.memory(8)
    for place in up:
        place[...] = bench.rng.integers(0, 100, PAGE, np.uint8)
    waits = []
    for first in (0, 2, 1):  # pages 0 to 3 go down, 4 to 7 are overwritten
        places = down[4 * first : 4 * first + 4]
        waits.append(bench.copies.read(int32([0, 1, 2, 3]), places, bench.copies.mark()))
        if first < 2:
            pages = int32([4 + first, 6 + first])
            data = up[2 * first : 2 * first + 2]
            waits.append(bench.copies.write(pages, data, bench.copies.mark()))
    bench.rng.shuffle(waits)  # type: ignore[arg-type]
    for wait in waits:
        wait()
    for first in (0, 2, 1):
        got = [place.tobytes() for place in down[4 * first : 4 * first + 4]]
        assert got == pool[:4]
    assert [bench.page(number) for number in (4, 6, 5, 7)] == [one.tobytes() for one in up[:4]]


def test_memory_is_pinned_in_pieces_as_it_is_used_and_unpinned_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, 0)
    places = bench.memory(100)
    registered = bench.device.live["registered"]
    assert not registered
    bench.copies.read(int32([1]), places[:1], bench.copies.mark())()
    assert 0 < len(registered) <= 2
    bench.copies.read(int32([1, 2]), places[98:], bench.copies.mark())()
    assert len(registered) <= 6
    bench.backend.close()
    assert not registered


def test_memory_that_the_system_does_not_pin_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, 0)
    places = bench.memory(4)
    bench.device.refuses = 304
    parts = [part for place in places for part in bench.copies._memory.pin(address_of(place), PAGE)]
    assert sum(size for _, size in parts) == 4 * PAGE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not bench.device.live["registered"]


def test_other_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    with pytest.raises(ValueError, match="not in memory for page copies"):
        bench.copies.read(int32([1]), [np.zeros(PAGE, np.uint8)], bench.copies.mark())
    with pytest.raises(ValueError, match="pages"):
        bench.copies.read(int32([8]), bench.memory(1), bench.copies.mark())


def test_a_lost_device_fails_copies_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.backend import DeviceLost

    bench = Bench(monkeypatch, 0)
    bench.backend._lost = "gone"
    with pytest.raises(DeviceLost):
        bench.copies.mark()
    with pytest.raises(DeviceLost):
        bench.copies.read(int32([1]), bench.memory(1), None)


def test_freed_pinned_memory_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks live as long as the copies: dropped waits free nothing."""
    bench = Bench(monkeypatch, 3)
    places = bench.memory(8)
    for _ in range(3):
        bench.copies.read(int32(range(8)), places, bench.copies.mark())
    bench.device.run()
    assert not any((place == FREED).all() for place in places)
    assert [place.tobytes() for place in places] == [bench.page(number) for number in range(8)]
