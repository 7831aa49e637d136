"""Counts CUDA devices, without assuming that there are any, and reads their free memory."""

from __future__ import annotations

from ctypes import CDLL, byref, c_char_p, c_int
from typing import Final

DRIVER: Final = "libcuda.so.1"
NO_DEVICE: Final = 100
"""`CUDA_ERROR_NO_DEVICE`."""


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


def driver_problem() -> str:
    """Why the driver's library cannot be used, in its own words, with a remedy; empty where there
    is no library, where it has no device, and without cupy."""
    try:
        import cupy

        driver = CDLL(DRIVER)
    except (ImportError, OSError):
        return ""
    version, text, needed = c_int(), c_char_p(), cupy.cuda.runtime.runtimeGetVersion() // 1000
    driver.cuDriverGetVersion(byref(version))
    if version.value // 1000 < needed:
        found = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        older = "" if needed <= 12 else ", or CuPy for CUDA 12: 'cupy-cuda12x[ctk]'"
        return (
            f"the NVIDIA driver supports {found}, and CuPy needs CUDA {needed}: install a driver "
            f"of CUDA {needed} or newer{older}"
        )
    if (code := driver.cuInit(0)) in (0, NO_DEVICE):
        return ""
    driver.cuGetErrorString(code, byref(text))
    reason = (text.value or b"unknown error").decode(errors="replace")
    return (
        f"the NVIDIA driver reports error {code}, {reason}: run nvidia-smi, restart the machine if "
        "the driver was updated, else install the driver again"
    )


RELAXED: Final = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED`: captures prohibit no calls of the thread."""


def make_thread_own(device: int) -> object:
    """`kernels.make_thread_own`: the default stream would wait for all that torch does there."""
    import cupy

    cupy.cuda.Device(device).use()
    relax_captures()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    return stream


def relax_captures() -> None:
    """Captures of other threads, torch's in global mode, do not restrict this thread's calls."""
    mode = c_int(RELAXED)
    if status := CDLL(DRIVER).cuThreadExchangeStreamCaptureMode(byref(mode)):
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed: error {status}")


def free_bytes(device: int) -> int:
    """Bytes of memory that are free on one device now."""
    import cupy

    with cupy.cuda.Device(device):
        return int(cupy.cuda.runtime.memGetInfo()[0])
