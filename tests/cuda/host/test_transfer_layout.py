"""The layout of uploads on the device, and the copies for them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from fake_device import FakeDevice

from kernels.cuda.device import host_memory
from kernels.cuda.device import transfer as transfer_module
from kernels.cuda.device.inputs import as_is, upload
from kernels.cuda.device.staging import Copy, Span, stage
from kernels.cuda.device.transfer import Transfers


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    for module in (transfer_module, host_memory):
        monkeypatch.setattr(module, "cupy", device.cupy)
        monkeypatch.setattr(module, "runtime", device.runtime)
    return device


@pytest.fixture
def transfers(device: FakeDevice) -> Transfers:
    return Transfers()


def test_arrays_of_any_kind_are_uploaded_side_by_side(
    device: FakeDevice, transfers: Transfers
) -> None:
    arrays = [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.zeros((0, 4), np.int64),
        np.arange(24, dtype=np.int64).reshape(4, 6)[:, ::2],
    ]
    uploaded = upload(transfers, as_is(*arrays))
    device.run()
    for array, address in zip(arrays, uploaded.at, strict=True):
        assert (address - uploaded.at[0]) % 256 == 0
        assert ctypes.string_at(address, array.nbytes) == array.tobytes()


def test_integers_are_uploaded_back_to_back(device: FakeDevice, transfers: Transfers) -> None:
    arrays = [np.arange(n, dtype=np.int32) for n in (8, 0, 3, 1)]
    buffer, at = transfers.upload_ints(arrays)
    device.run()
    assert [address - buffer.ptr for address in at] == [0, 32, 32, 44]
    assert buffer.nbytes == 48
    assert buffer.view(np.int32).tolist() == [*range(8), *range(3), 0]


def test_uploads_of_nothing_are_legal(device: FakeDevice, transfers: Transfers) -> None:
    assert len(upload(transfers, as_is(np.zeros((0, 2), np.float32))).at) == 1
    assert len(transfers.upload_ints([np.zeros(0, np.int32)])[1]) == 1
    device.run()


def test_neighbours_go_together_and_a_stranger_between_them_keeps_them_apart() -> None:
    staged = stage([Span(0, 0, 100), Span(1, 256, 40), Span(3, 300, 8), Span(4, 1024, 8)])
    assert staged.copies == [Copy(0, 0, 296), Copy(300, 512, 8), Copy(1024, 768, 8)]
    assert staged.offsets == [0, 256, 512, 768]
    assert staged.size == 776
    assert stage([]) == ([], [], 0)
