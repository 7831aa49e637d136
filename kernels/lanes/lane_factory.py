"""`make_lanes`: the lanes that fit a backend."""

from __future__ import annotations

import importlib

from kernels.backend import Backend
from kernels.lanes.host_lanes import HostLanes
from kernels.lanes.lane import Lanes


def make_lanes(backend: Backend, device_bytes: int, most: int, queues: int) -> Lanes:
    """The lanes of a backend: at most `most` at a time, with `device_bytes` of arenas in total.

    `queues` is the number of hardware queues of a device.
    """
    if backend.name == "cuda":
        made: Lanes = importlib.import_module("..cuda.lanes.lanes", __package__).CudaLanes(
            backend, device_bytes, most, queues
        )
        return made
    return HostLanes(backend)
