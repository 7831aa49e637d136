"""The arena that a `TorchSession` shares with its engine, and the flags at its beginning.

A thread sleeps until the engine ends, and then unblocks the waiting stream.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch

from attnd.road.arena import Arena as SharedMemory
from attnd.road.connection import Connection
from attnd.steps.layout import Dtypes
from attnd.steps.slots import FLAG_BYTES
from attnd.torch import driver
from attnd.torch.driver import device_bytes, mapped

AGAIN_S: Final = 0.005
"""Seconds between two settings of the flags after the engine's end: the stream may reach another
wait."""


class Watch:
    """Without it a stream that waits for the engine would wait for ever, and its process with it.

    The layers' `o` is then undefined, and the session's next call raises.
    """

    def __init__(
        self, connection: Connection, device: torch.device, unblock_waits: Callable[[int], None]
    ) -> None:
        """`unblock_waits` sets all flags on a stream of `device`."""
        self._device, self._unblock_waits = device, unblock_waits
        self._fd = os.dup(connection.fileno())
        self._woken, self._wake = os.pipe()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake, b"\0")
        self._thread.join()
        for fd in (self._fd, self._woken, self._wake):
            os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.register(self._woken, select.POLLIN)
        poll.poll()
        if self._closed.is_set():
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            while not self._closed.wait(AGAIN_S):
                self._unblock_waits(stream.cuda_stream)


TORCH: Final = Dtypes(
    wire={torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    pool={"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16},
    bf16=torch.bfloat16,
    float32=torch.float32,
    boolean=torch.bool,
    uint8=torch.uint8,
    read=lambda dtype: dtype,
)


class DeviceArena:
    """Device memory of the engine, mapped here. Its layers are released to the engine by flags."""

    def __init__(
        self,
        connection: Connection,
        description: dict[str, Any],
        num_layers: int,
        device: torch.device,
    ) -> None:
        """`description` is the engine's DEVICE_ARENA."""
        self.description = description
        self.size = int(description["arena_bytes"])
        self.device = device
        self.num_layers = num_layers
        self.flags = 0
        self.memory: object = None
        """Keeps the memory of an engine in this process beyond its end."""
        with torch.cuda.device(device):
            self.address = description.get("address") or mapped(
                bytes.fromhex(description["handle"]), device
            )
        self._turns = [driver.operations(turn(self.ready(layer))) for layer in range(num_layers)]
        self._done = driver.operations(
            [
                (driver.WRITE, self.address + FLAG_BYTES * layer + 4, 1)
                for layer in range(num_layers)
            ]
        )
        self._watch = Watch(connection, device, self.unblock_waits)

    def ready(self, layer: int) -> int:
        """Address of a layer's first flag; the second, done, is behind it."""
        return self.address + FLAG_BYTES * layer

    def hand_over(self, layer: int) -> None:
        """On torch's current stream of this device."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if torch.cuda.current_device() == self.device.index:
            self._turns[layer](stream)
        else:  # the driver takes stream 0, the default one, as the current device's
            with torch.cuda.device(self.device):
                self._turns[layer](stream)

    def unblock_waits(self, stream: int) -> None:
        """Unblock every wait for the engine, which has ended."""
        self._done(stream)

    def settle(self) -> None:
        """Wait for all work of the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode(False)
    def array(self, offset: int, dtype: Any, shape: tuple[int, ...], owner: object) -> torch.Tensor:
        held = device_bytes(self.address + offset, prod(shape) * dtype.itemsize, self.device)
        held.untyped_storage().owner = owner, self.memory  # type: ignore[attr-defined]
        return plain(held, dtype, shape)

    def close(self) -> None:
        """Ends the watch. The memory stays mapped, for tensors that are still in use."""
        self._watch.close()
        self._turns = [refuse] * self.num_layers


def refuse(stream: int) -> None:
    """In place of a turn, for which a stream would wait for ever."""
    raise RuntimeError("the arena of these slots is closed: make new ones")


def turn(ready: int) -> list[tuple[int, int, int]]:
    """Releases a layer to the engine on a stream: sets the ready flag at an address, waits for the
    done flag behind it, and clears that."""
    done = ready + 4
    return [(driver.WRITE, ready, 1), (driver.WAIT, done, 1), (driver.WRITE, done, 0)]


@torch.inference_mode(False)  # made within it, tensors could be written to only there
def host_view(
    shared: SharedMemory, offset: int, dtype: Any, shape: tuple[int, ...], owner: object
) -> torch.Tensor:
    """A tensor over the session's shared memory."""
    held = shared.hold(offset, prod(shape) * dtype.itemsize, owner)
    return plain(torch.frombuffer(held, dtype=torch.uint8), dtype, shape)


def plain(held: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over all the bytes of another, and no view of it: `detach_` works."""
    return held.view(dtype).view(shape).detach()
