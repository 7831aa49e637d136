"""Where the engine's GPU is relative to the caller's, and the cost of a layer's round trip."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from attnd.torch import driver

Kind = Literal["host", "other_gpu_nvlink", "other_gpu_pcie", "same_gpu_mps", "same_gpu_time_sliced"]
SLOW_US: Final = 120.0
"""A longer round trip on one GPU includes a switch between processes."""
REMEDY: Final = (
    "the engine and this process take turns on one GPU: {us:.0f} us for every layer's round trip. "
    "Run an MPS daemon for the two of them, or give the engine a GPU of its own "
    "(docs/operations.md, beside a model runner)"
)


class TimeSliced(RuntimeWarning):
    """Engine and caller share a GPU without MPS."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`hand_over_us` is a layer's way to the engine and back, without any attention: measured."""

    kind: Kind
    hand_over_us: float


def find_placement(engine: dict[str, Any], device: torch.device, hand_over_us: float) -> Placement:
    """From the engine's description of its GPU and the measured time; warns of time slicing."""
    if engine.get("kind") != "cuda":
        return Placement("host", hand_over_us)
    index = device.index or 0
    if engine.get("uuid") != driver.uuid_of(index):
        theirs = [
            i for i in range(torch.cuda.device_count()) if driver.uuid_of(i) == engine["uuid"]
        ]
        linked = bool(theirs) and driver.has_nvlink(index, theirs[0])
        return Placement("other_gpu_nvlink" if linked else "other_gpu_pcie", hand_over_us)
    if driver.has_mps(index) and engine.get("mps"):
        return Placement("same_gpu_mps", hand_over_us)
    if hand_over_us < SLOW_US:
        return Placement("same_gpu_mps", hand_over_us)
    warnings.warn(REMEDY.format(us=hand_over_us), TimeSliced, stacklevel=4)
    return Placement("same_gpu_time_sliced", hand_over_us)
