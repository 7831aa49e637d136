"""`CudaBackend` on a `FakeDevice`, with kernels that are a few lines of numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice
from numpy_states import merge_ragged_states
from xxhash import xxh3_128_digest

from kernels.backend import NUMPY_DTYPES, AttentionState, DType, Mask, Plan, PoolGeometry, Scoring
from kernels.cuda import backend as backend_module
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device import host_memory, transfer
from kernels.cuda.device.transfer import Transfers
from kernels.cuda.merge import merger
from kernels.cuda.pages import copies
from kernels.cuda.rows import mover
from kernels.masks import packbits

GEOMETRY = PoolGeometry(2, 8, 4, 2, 64, "NHD", "fp16")
SCORING = Scoring(1.0)
FLOAT32 = np.dtype(np.float32)


@dataclass(eq=False)
class FakePlan:
    """A plan on the device: `content` is at address `at` of `buffer`, which kernels read."""

    num_rows: int
    buffer: Any
    at: int
    content: Any


@dataclass
class Planner:
    """`AttentionRunner` of plans whose arrays are uploaded as real ones are, and never cached."""

    kernels: Kernels
    transfers: Transfers
    made: int = 0

    def find(self, plans: Any, config: Any) -> None:
        return None

    def make(self, plans: Any, config: Any) -> FakePlan:
        self.made += 1
        rows = sum(len(plan.positions) for _, plan in plans)
        content = np.arange(self.made, self.made + 8 + rows, dtype=np.int32)
        buffer, (at,) = self.transfers.upload_ints([content])
        self.kernels.plans.append(at)
        return FakePlan(rows, buffer, at, content)

    def enqueue(self, *call: Any) -> None:
        self.kernels.attend(*call)


@dataclass
class Kernels:
    """Fake kernels, and records of their arguments."""

    device: FakeDevice
    pool: Any = field(default_factory=lambda: np.zeros((2, 2, 32, 2, 64), np.float32))
    attended: list[tuple[int, int, int]] = field(default_factory=list)
    appended: list[tuple[Sequence[int], bool]] = field(default_factory=list)
    merged: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)

    def attend(
        self,
        device_plan: Any,
        config: Any,
        layer: Any,
        where: tuple[int, int, int],
        mask: Any = (0, 0),
        sinks: tuple[int, int] = (0, 0),
    ) -> None:
        q, o, lse = where
        self.attended.append(where)
        compute, kv = NUMPY_DTYPES[config.compute], config.kv
        shape = (device_plan.num_rows, config.num_qo_heads, kv.head_dim)
        at, content = device_plan.at, device_plan.content

        def kernel() -> None:
            assert np.array_equal(self.device.view(at, content.shape, np.int32), content)
            values = self.device.view(q, shape, compute)
            bit = self.device.view(mask[0], (1,), np.uint8)[0] if config.masked else 0
            keys = (
                [
                    self.device.view(at, (kv.num_pages, kv.num_kv_heads, kv.head_dim), compute)
                    for at in (kv.k, kv.v)
                ]
                if kv.contiguous
                else []
            )
            made = attention(values, keys, bit)
            self.device.view(o, shape, compute)[...] = made[0]
            self.device.view(lse, shape[:2], np.float32)[...] = made[1]

        self.device.launch(kernel)

    def rows(
        self,
        entry: str,
        layer: int,
        dtype: DType,
        count: int,
        at: Sequence[int],
        overlap: bool = True,
    ) -> None:
        self.appended.append((at, overlap))

        def kernel() -> None:
            slots = self.device.view(at[2], (count,), np.int32)
            for half in range(2):
                values = self.device.view(at[half], (count, 2, 64), NUMPY_DTYPES[dtype])
                if entry == "append_rows":
                    self.pool[layer, half, slots] = values
                else:
                    values[...] = self.pool[layer, half, slots]

        self.device.launch(kernel)

    def pages(self, entry: str, blocks: int, pages: Any, hosts: Any, digests: int) -> None:
        """Copies of pages between the pool and host memory, and their digests."""
        size = GEOMETRY.segment_pieces * GEOMETRY.piece_bytes
        numbers, addresses = pages.tolist(), hosts.tolist()

        def kernel() -> None:
            stored = self.pool.reshape(2, 2, 8, 4, 2, 64).transpose(2, 0, 1, 3, 4, 5)
            found = b""
            for page, host in zip(numbers, addresses, strict=True):
                self.device.check("host", host, GEOMETRY.payload_bytes)
                place = (ctypes.c_char * GEOMETRY.payload_bytes).from_address(host)
                if entry == "load_pages":
                    stored[page] = np.frombuffer(place, np.float16).reshape(stored.shape[1:])
                elif entry == "store_pages":
                    place.raw = stored[page].astype(np.float16).tobytes()
                else:
                    row = stored[page].astype(np.float16).tobytes()
                    parts = (row[at : at + size] for at in range(0, len(row), size))
                    found += b"".join(map(xxh3_128_digest, parts))
            self.device.check("host", digests, len(found))
            ctypes.memmove(digests, found, len(found))

        if numbers:
            self.device.launch(kernel)

    def merge(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        members: Sequence[int],
        where: Sequence[int],
        longest: int,
        into: bool = False,
        sinks: int = 0,
    ) -> None:
        self.merged.append((members, where))

        def kernel() -> None:
            kind, view = NUMPY_DTYPES[dtype], self.device.view
            ends = view(members[2], (shape[0] + 1,), np.int32)
            o = view(members[0], (ends[-1], *shape[1:]), kind)
            lse = view(members[1], (ends[-1], shape[1]), np.float32)
            place = AttentionState(view(where[0], shape, kind), view(where[1], shape[:2], FLOAT32))
            made = merging(o, lse, ends, place if into else None)
            place.o[...], place.lse[...] = made.o, made.lse

        self.device.launch(kernel)


class Chip(nullcontext[None]):
    """The device, as CuPy has it."""

    def use(self) -> None:
        return None


def attention(q: Any, keys: Sequence[Any] = (), bit: int = 0) -> tuple[Any, Any]:
    """The fake kernel's result (o, lse) for q in its compute dtype."""
    extra = sum((float(x.astype(np.float32).sum()) for x in keys), float(bit))
    o = (q.astype(np.float32) * 2 + extra).astype(q.dtype)
    return o, q.astype(np.float32).sum(-1) + np.float32(extra)


def merging(o: Any, lse: Any, ends: Any, into: AttentionState | None) -> AttentionState:
    if into is None:
        return merge_ragged_states(o, lse, ends)
    lists = len(ends) - 1
    order = np.argsort(
        np.concatenate([np.repeat(np.arange(lists), np.diff(ends)), np.arange(lists)]),
        kind="stable",
    )
    all_o = np.concatenate([o, np.array(into.o)])[order]
    all_lse = np.concatenate([lse, np.array(into.lse)])[order]
    return merge_ragged_states(all_o, all_lse, ends + np.arange(lists + 1, dtype=np.int32))


def plan_of(count: int) -> Plan:
    """A plan of `rows` rows; the keys do not matter here."""
    return Plan((), np.zeros(count, np.int32))


def mask_of(count: int) -> Mask:
    return Mask(packbits(np.ones(8, bool)), np.zeros(count, np.int64))


def fake_backend(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> tuple[CudaBackend, Kernels]:
    """A backend whose every module sees the fake device."""
    kernels = Kernels(device)
    for module in (transfer, host_memory, copies):
        monkeypatch.setattr(module, "cupy", device.cupy)
        monkeypatch.setattr(module, "runtime", device.runtime)
    monkeypatch.setattr(transfer, "convert", device.convert)
    monkeypatch.setattr(
        backend_module, "AttentionRunner", lambda _, transfers, *__: Planner(kernels, transfers)
    )
    monkeypatch.setattr(
        backend_module,
        "Library",
        lambda *_: SimpleNamespace(arch="sm_80", overlaps=True, prepare=lambda _: None),
    )
    monkeypatch.setattr(backend_module, "device_arch", lambda _: "sm_80")
    chip = Chip()
    device.cupy.cuda.Device = lambda *_: chip
    monkeypatch.setattr(backend_module, "cupy", device.cupy)
    monkeypatch.setattr(mover.RowMover, "enqueue", lambda _, *a, **named: kernels.rows(*a, **named))
    on_pages = lambda _, *call: kernels.pages(*call)  # noqa: E731
    monkeypatch.setattr(copies.CudaPageCopies, "enqueue", on_pages)
    monkeypatch.setattr(merger.Merger, "enqueue", lambda _, *a: kernels.merge(*a))
    device.runtime.getDeviceProperties = lambda _: {"name": b"fake", "multiProcessorCount": 8}
    monkeypatch.setattr(backend_module, "runtime", device.runtime)
    return CudaBackend(GEOMETRY), kernels
