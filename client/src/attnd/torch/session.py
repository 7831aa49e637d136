"""`TorchSession`: a `Session` whose steps take and give torch tensors in shared memory.

`Placement` says where the engine's GPU is, and how long a layer's round trip takes.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from attnd import Session
from attnd.results import Info
from attnd.session import stepper_of
from attnd.steps.host import HostArena
from attnd.steps.lane import Lane
from attnd.steps.layout import NAMES
from attnd.steps.stepper import Stepper
from attnd.torch import driver
from attnd.torch.arena import TORCH, DeviceArena, host_view
from attnd.wire.frames import dump_json

Kind = Literal[
    "host",
    "other_gpu_nvlink",
    "other_gpu_pcie",
    "same_gpu_mps",
    "same_gpu_time_sliced",
    "same_process",
]
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
    if "address" in engine:
        return Placement("same_process", hand_over_us)
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


ECHOES: Final = 48
"""Minimum number of round trips that are measured at the start."""


class TorchSession(Session):
    """A `Session` whose steps go through the layers of a torch model; for one thread.

    On CUDA, `device` may be the engine's GPU or another one that reaches it; nothing but entering a
    step waits on the host. With an engine on the CPU tensors are torch's CPU tensors, and each
    layer waits. Other calls run in order with the steps.

    `path`, `port` and `api_key` are as in `Session`. `arena_bytes` hold q, k, v and o of slots;
    where they do not suffice while slots are in use, `slots` opens a larger arena beside it. Raises
    `Overloaded` where the engine has no room for another such session.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        port: int = 8080,
        timeout: float = 30.0,
        api_key: str | None = None,
        device: torch.device | str | int | None = None,
        arena_bytes: int = 64 * 2**20,
    ) -> None:
        super().__init__(path, port=port, timeout=timeout, api_key=api_key)
        self._arena_bytes = arena_bytes
        try:
            self._info = info = self.info()
            self.device = chosen_device(device) if info.backend == "cuda" else torch.device("cpu")
            self.placement: Placement = self._measure()
        except BaseException:
            self.close()
            raise

    def take_over(self) -> None:
        """From now on this session is for the calling thread, and no longer for another one."""

    def _new_stepper(self, info: Info) -> Stepper[torch.Tensor]:
        return stepper_of(self, info, self._make_arena, TORCH, arena_bytes=self._arena_bytes)

    def _make_arena(
        self, lane: Lane[torch.Tensor], size: int
    ) -> DeviceArena | HostArena[torch.Tensor]:
        """Ask for an arena, and map it."""
        if self._info.backend != "cuda":
            return HostArena(lane, size, host_view)
        description = lane.request_arena(size)
        return DeviceArena(lane.connection, description, self._info.num_layers, self.device)

    def _measure(self) -> Placement:
        """Measure the round trip of layers that compute nothing."""
        lane = self._stepper().lanes[0]
        room = lane.room
        if room is None:
            raise RuntimeError("a lane was opened without an arena: this is a bug")
        layers, arena = list(range(self._info.num_layers)), room.arena
        slot = dict.fromkeys(NAMES, room.spare)
        fields = {"op": "echo", "layers": layers, "flags": arena.flags, "slots": [slot]}
        number = arena.array(room.spare, torch.float32, (1,), None)
        best = float("inf")
        for _ in range(2 + ECHOES // len(layers)):
            call = lane.connection.send_step(dump_json(fields).encode(), 0, lane.ends())
            call.opened(lane.ends())
            started = time.perf_counter()
            for layer in layers:
                number.mul_(1.0)  # both ends have a kernel to run, as in a real step
                if isinstance(arena, HostArena):
                    call.wait_layer(layer, call.begin_layer(layer, lane.ends()), lane.ends())
                else:
                    arena.hand_over(layer)
            arena.settle()
            best = min(best, (time.perf_counter() - started) / len(layers))
            call.result(lane.ends())
        engine = arena.description if isinstance(arena, DeviceArena) else {"kind": "host"}
        return find_placement(engine, self.device, best * 1e6)


def chosen_device(device: torch.device | str | int | None) -> torch.device:
    """The caller's GPU, with its number."""
    found = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    )
    if found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
