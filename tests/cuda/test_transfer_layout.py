"""Where uploads lie, with pinned and device memory that are plain host memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from kernels.cuda import transfer as transfer_module
from kernels.cuda.transfer import Transfers


class Stream:
    """Runs everything at once."""

    ptr = 3

    def __init__(self, **_: Any) -> None:
        """As CuPy's, options and all."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is entered."""

    def record(self, event: Any) -> Any:
        return event

    def wait_event(self, event: Any) -> None:
        """What is waited for is done."""


class Bytes(np.ndarray[Any, Any]):
    """Memory with an address, as CuPy hands it out."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    def allocate(size: int) -> Bytes:
        return np.full(size, 0xEE, np.uint8).view(Bytes)

    cuda = SimpleNamespace(
        Stream=Stream,
        Event=lambda **_: SimpleNamespace(done=True),
        alloc=allocate,
        alloc_pinned_memory=allocate,
    )
    runtime = SimpleNamespace(
        memcpyHostToDevice=1,
        memcpyAsync=lambda to, source, size, *_: ctypes.memmove(to, source, size),
    )
    monkeypatch.setattr(transfer_module, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(transfer_module, "runtime", runtime)
    return Transfers()


def test_arrays_of_any_kind_are_uploaded_side_by_side(transfers: Transfers) -> None:
    arrays = [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.zeros((0, 4), np.int64),
        np.arange(24, dtype=np.int64).reshape(4, 6)[:, ::2],
    ]
    buffer, at = transfers.upload(arrays)
    for array, address in zip(arrays, at, strict=True):
        assert (address - buffer.ptr) % 256 == 0
        assert ctypes.string_at(address, array.nbytes) == array.tobytes()


def test_integers_are_uploaded_back_to_back(transfers: Transfers) -> None:
    arrays = [np.arange(n, dtype=np.int32) for n in (8, 0, 3, 1)]
    buffer, at = transfers.upload_ints(arrays)
    assert [address - buffer.ptr for address in at] == [0, 32, 32, 44]
    assert buffer.nbytes == 48
    assert buffer.view(np.int32).tolist() == [*range(8), *range(3), 0]


def test_uploads_of_nothing_are_legal(transfers: Transfers) -> None:
    assert len(transfers.upload([np.zeros((0, 2), np.float32)])[1]) == 1
    assert len(transfers.upload_ints([np.zeros(0, np.int32)])[1]) == 1
