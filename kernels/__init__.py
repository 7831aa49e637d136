"""Backends: the pool on a device, and the kernels that read and write it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Literal

from kernels.backend import Backend, DeviceLost, Numerics, PoolGeometry

BackendKind = Literal["cpu", "cuda", "auto", "none"]


def make_backend(
    kind: BackendKind,
    geometry: PoolGeometry,
    device: int = 0,
    *,
    poison: bool = False,
    numerics: Numerics = "fast",
) -> Backend:
    """A ready backend with an allocated pool; `auto` is cuda if a device responds, else cpu.

    torch and cupy are imported only by the backend that needs them. `poison` fills the pool with
    0xFF bytes, a NaN in every storage dtype, so that reads of unwritten slots show. Raises
    `ValueError` for an unknown kind, `Unsupported` for a geometry that the backend does not
    support, and `DeviceLost` without such a device.
    """
    match kind:
        case "cpu":
            return _make(".cpu", "CpuBackend", geometry, device, poison, numerics)
        case "cuda":
            if not cuda_devices():
                raise DeviceLost(
                    f"backend.kind = cuda: {why_no_device()}, or set backend.kind: cpu"
                )
            name = ".cuda.backend", "CudaBackend"
            return _make(*name, geometry, device, poison, numerics)
        case "none":
            without: Backend = importlib.import_module(".no_pool", __package__).NoPool()
            return without
        case "auto":
            chosen: BackendKind = "cuda" if cuda_devices() else "cpu"
            return make_backend(chosen, geometry, device, poison=poison, numerics=numerics)
    raise ValueError(f"backend.kind = {kind}: must be cpu, cuda, auto or none")


def cuda_devices() -> int:
    """Number of CUDA devices that respond; 0 without cupy, a driver or a device."""
    count: int = devices().count()
    return count


def driver_problem() -> str:
    """Why the driver that this machine has cannot be used, with a remedy; else empty."""
    problem: str = devices().driver_problem()
    return problem


def make_thread_own(kind: BackendKind, device: int) -> object:
    """Before this thread makes a backend in a process whose other threads use the device, too: its
    current stream is none of theirs, and captures of theirs do not restrict its calls. Keep the
    result as long as the thread runs."""
    return devices().make_thread_own(device) if kind == "cuda" else None


def devices() -> Any:
    return importlib.import_module(".cuda.device.devices", __package__)


def why_no_device() -> str:
    """The reason why CUDA is unavailable, with its remedy."""
    if find_spec("cupy") is None:
        return (
            "CuPy is not installed: pip install 'cupy-cuda13x[ctk]' cuda-bindings (CUDA 12: "
            "'cupy-cuda12x[ctk]' 'cuda-bindings<13')"
        )
    return driver_problem() or (
        "no CUDA device responds on this machine: check that nvidia-smi lists one and that "
        "CUDA_VISIBLE_DEVICES does not hide it"
    )


def _make(
    module: str,
    cls: str,
    geometry: PoolGeometry,
    device: int,
    poison: bool,
    numerics: Numerics,
) -> Backend:
    backend: Backend = getattr(importlib.import_module(module, __package__), cls)(
        geometry, device=device, poison=poison, numerics=numerics
    )
    return backend
