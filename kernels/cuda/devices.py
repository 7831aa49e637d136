"""Which CUDA devices answer, asked without assuming that there are any."""

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
