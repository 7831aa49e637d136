"""What all specialisations have in common: formats, sizes, shared memory per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kernels.backend import DType
from kernels.compile import Spec

HEAD_DIMS: Final = (64, 80, 96, 128, 192, 256)
FORMATS: Final[dict[DType, int]] = {"fp16": 0, "bf16": 1, "fp32": 2, "fp8_e4m3": 4, "fp8_e5m2": 5}
"""The numbers by which the sources know memory formats."""

SHARED_PER_MULTIPROCESSOR: Final = {
    "sm_80": 167936,
    "sm_86": 102400,
    "sm_87": 167936,
    "sm_89": 102400,
    "sm_90a": 233472,
    "sm_100": 233472,
    "sm_103": 233472,
    "sm_120": 102400,
    "sm_121": 102400,
}
"""Bytes; each block also takes `RESERVED` of it."""
LEAST_SHARED: Final = 102400
"""Assumed value for architectures that are not listed."""
RESERVED: Final = 1024


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that the blocks of a multiprocessor have together."""
    return SHARED_PER_MULTIPROCESSOR.get(arch, LEAST_SHARED)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One attention specialisation and how to launch it; it takes `tile_keys` keys at a time."""

    spec: Spec
    entry: str
    rows: int
    threads: int
    shared_bytes: int
    blocks: int
    tile_keys: int


def definitions(head_dim: int, compute: DType, storage: DType) -> dict[str, int]:
    """The `-D` names of shape.cuh, which every attention specialisation has."""
    fp8 = FORMATS[storage] if storage.startswith("fp8") else 0
    return {"HEAD_DIM": head_dim, "BF16": int(compute == "bf16"), "FP8": fp8}
