"""The arena that a `TorchSession` shares with its engine, and the flags at its beginning."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from attnd.errors import ArenaFull
from attnd.road import arena as road_arena
from attnd.road.arena import ALIGNMENT
from attnd.torch import driver
from attnd.torch.memory import device_bytes, mapped
from attnd.torch.slots import Shapes, Slots

PAGE: Final = 4096
FLAG_BYTES: Final = 8
"""Of a layer: ready and done, 32 bits each."""
DONE: Final = ((driver.WAIT, 1), (driver.WRITE, 0))


class DeviceArena:
    """Device memory of the engine, mapped here. Its slots are handed over by flags."""

    def __init__(self, told: dict[str, Any], num_layers: int, device: torch.device) -> None:
        self.size = int(told["arena_bytes"])
        self.device = device
        self.num_layers = num_layers
        self.flags = 0
        with torch.cuda.device(device):
            self.address = mapped(bytes.fromhex(told["handle"]), device)
        self.memory = device_bytes(self.address, self.size, device)
        self._turns = [together([self], layer) for layer in range(num_layers)]
        self._done = driver.operations(
            [
                (driver.WRITE, self.address + FLAG_BYTES * layer + 4, 1)
                for layer in range(num_layers)
            ]
        )

    def ready(self, layer: int) -> int:
        """Address of a layer's first flag; the second, done, is behind it."""
        return self.address + FLAG_BYTES * layer

    def hand_over(self, layer: int) -> None:
        """On torch's current stream."""
        self._turns[layer](torch.cuda.current_stream(self.device).cuda_stream)

    def free_waits(self, stream: int) -> None:
        """Let everything go on that waits for the engine: it is gone."""
        self._done(stream)

    def settle(self) -> None:
        """Wait until the current stream has gone through all that it was given."""
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        driver.close_memory(self.address)


def together(arenas: Sequence[DeviceArena], layer: int) -> Callable[[int], None]:
    """What hands a layer over to several engines at once, on a stream: say ready to them all, then
    wait until all are done, and set that back."""
    places = [arena.ready(layer) for arena in arenas]
    says = [(driver.WRITE, ready, 1) for ready in places]
    done = [(kind, ready + 4, value) for ready in places for kind, value in DONE]
    return driver.operations([*says, *done])


class HostArena:
    """Part of the session's own shared memory: for engines without a device."""

    def __init__(
        self,
        memory: torch.Tensor,
        begin: int,
        size: int,
        begin_layer: Callable[[int], Callable[[], None]],
    ) -> None:
        self.memory = memory
        self.flags = begin
        self.size = begin + size
        self.begin_layer = begin_layer
        """Hands a layer over; what that gives waits for it."""

    def hand_over(self, layer: int) -> None:
        self.begin_layer(layer)()

    def free_waits(self, stream: int) -> None:
        """Nothing waits but the host, which is told."""

    def settle(self) -> None:
        """Nothing runs here by itself."""

    def close(self) -> None:
        """The memory goes with its session."""


class Room:
    """Which stretches of an arena are taken by slots."""

    def __init__(self, arena: DeviceArena | HostArena, num_layers: int) -> None:
        self.arena = arena
        begin = arena.flags + -(-(FLAG_BYTES * num_layers + ALIGNMENT) // PAGE) * PAGE
        self._begin = begin
        self.spare = begin - ALIGNMENT
        """Where a number lies that nobody needs: something for an echo to work on."""
        self._free = road_arena.Slots(arena.size - begin)
        self._made: weakref.WeakSet[Slots] = weakref.WeakSet()

    @property
    def is_free(self) -> bool:
        """Whether no slots are left that anybody has."""
        return len(self._made) == 0

    @property
    def size(self) -> int:
        return self._free.size

    def slots(self, shapes: Shapes, rotation: int) -> Slots | None:
        """Slots for these shapes; None when there is no room for them."""
        places, size = shapes.layout(rotation)
        taken = self._free.take(size)
        if taken is None:
            return None
        begin = self._begin + taken.offset
        at = tuple({name: begin + offset for name, offset in place.items()} for place in places)
        tensors = tuple(shapes.tensors(self.arena.memory, place) for place in at)
        inputs = tuple(self.arena.memory[place["q"] : place["o"]].view(torch.int32) for place in at)
        made = Slots(taken, tensors, inputs, self.arena, at)
        self._made.add(made)
        return made


def full(needed: int, room: Room) -> ArenaFull:
    return ArenaFull(
        f"slots of {needed} bytes do not fit the arena of {room.size}, which cannot be made anew "
        "while others of its slots are in use: open the session with a larger arena_bytes"
    )
