"""A backend on a fake device, and tensors of every kind for it."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice
from faked_backend import SCORING, attention, fake_backend, plan_of

from kernels.backend import NUMPY_DTYPES, Attend, AttentionState, Pending, RaggedAttend
from kernels.tensor import DeviceTensor, PinnedArray, Tensor

HALF = NUMPY_DTYPES["fp16"]
ROOM = 1 << 20
KINDS = ("host", "pinned", "device", "odd")


CALLS = ("append", "attend", "attend_ragged", "copy_rows", "gather", "merge")


class Rig:
    """A fake device, a backend on it, and tensors of all kinds for them.

    Calls are never alone: each has one of another shape in flight before it and one behind it,
    which are checked too, and the device has come some way, unless `alone`.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, alone: bool = False
    ) -> None:
        self.device = FakeDevice(seed)
        self.backend, self.kernels = fake_backend(monkeypatch, self.device)
        self.rng = np.random.default_rng(seed)
        self._neighbours: list[tuple[Pending[AttentionState], Any]] = []
        if not alone:
            for name in CALLS:
                monkeypatch.setattr(self.backend, name, self._among_others(name))
        self.arena = np.frombuffer(mmap.mmap(-1, ROOM), np.uint8)
        self.begin, self.used = self.arena.ctypes.data, 0
        assert self.backend.register(self.begin, ROOM)
        self.device.copies.clear()

    def _among_others(self, name: str) -> Any:
        """The backend's method, between two calls of others."""
        call = getattr(self.backend, name)
        ragged = self.backend.attend_ragged

        def neighbour() -> None:
            rows, keys = (int(n) for n in self.rng.integers(1, 9, 2))
            q, k, v = self.values(rows, 4, 64), self.values(keys, 2, 64), self.values(keys, 2, 64)
            ends = np.array([0, rows], np.int32), np.array([0, keys], np.int32)
            attended = len(self.kernels.attended)
            request = RaggedAttend(q.copy(), k.copy(), v.copy(), *ends, False, SCORING)
            self._neighbours.append((ragged(request), attention(q, (k, v))))
            del self.kernels.attended[attended:]

        def among(*given: Any, **named: Any) -> Any:
            neighbour()
            self.device.run(until=lambda: self.device.order.random() < 0.1)
            made = call(*given, **named)
            neighbour()
            self.settle(4)
            return made

        return among

    def settle(self, left: int = 0) -> None:
        """Check what neighbours were answered, but for the latest."""
        while len(self._neighbours) > left:
            pending, (o, lse) = self._neighbours.pop(0)
            state = pending.result()
            assert np.array_equal(state.o, o)
            assert np.array_equal(state.lse, lse)

    def values(self, *shape: int, dtype: Any = HALF) -> Any:
        return self.rng.standard_normal(shape, np.float32).astype(dtype)

    def pinned(self, values: Any) -> PinnedArray:
        end = self.used + values.nbytes
        given = self.arena[self.used : end].view(values.dtype).reshape(values.shape)
        given[...] = values
        self.used = -(-end // 64) * 64
        return given.view(PinnedArray)

    def give(self, kind: str, values: Any) -> Tensor:
        """`odd` is a device tensor where no kernel can read it."""
        if kind == "host":
            return np.array(values)
        if kind == "pinned":
            return self.pinned(values)
        return self.device.tensor(values, self.device.stream(), 8 if kind == "odd" else 0)

    def state(self, kind: str, shape: tuple[int, ...], dtype: Any = HALF) -> AttentionState:
        o, lse = np.full(shape, np.nan, dtype), np.full(shape[:-1], np.nan, np.float32)
        return AttentionState(self.give(kind, o), self.give(kind, lse))

    def read(self, tensor: Tensor) -> Any:
        return self.device.read(tensor) if isinstance(tensor, DeviceTensor) else np.array(tensor)

    def readings(self, place: AttentionState) -> tuple[Any, Any]:
        """The content of arrays; of device memory as its stream finds it from now on."""
        o, lse = (
            self.device.reading(tensor)
            if isinstance(tensor, DeviceTensor)
            else partial(np.array, tensor)
            for tensor in (place.o, place.lse)
        )
        return o, lse

    def spoil(self, tensor: Tensor) -> None:
        """Overwrite inputs, as their owner is allowed to."""
        if isinstance(tensor, DeviceTensor):
            self.device.write(tensor, np.full(tensor.shape, np.nan, tensor.dtype))
        elif not isinstance(tensor, PinnedArray):
            tensor[...] = np.nan

    def of_kind(self, kind: int) -> list[Any]:
        """Copies of tensors, without copies of plans."""
        plans = self.kernels.plans
        return [copy for copy in self.device.copies if copy.kind == kind and copy.to not in plans]


def attend(q: Tensor, out: AttentionState | None = None, mask: Any = None) -> Attend:
    return Attend(0, q, plan_of(len(q)), SCORING, mask, out)


def address(array: Any) -> int:
    return int(array.ctypes.data)
