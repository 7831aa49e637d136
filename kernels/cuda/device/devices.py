"""Counts CUDA devices, without assuming that there are any, and reads their free memory."""

from __future__ import annotations


def count() -> int:
    """How many CUDA devices answer; 0 without cupy, a driver or a device."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def free_bytes(device: int) -> int:
    """Bytes of memory that are free on one device now."""
    import cupy

    with cupy.cuda.Device(device):
        return int(cupy.cuda.runtime.memGetInfo()[0])
