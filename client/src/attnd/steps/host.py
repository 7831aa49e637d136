"""Arenas in host memory, for engines without a device: part of a connection's shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnd.road.arena import Arena as SharedMemory
from attnd.steps.lane import Lane
from attnd.steps.layout import A, Dtypes

View = Callable[[SharedMemory, int, Any, tuple[int, ...], object], A]
"""Makes an array over shared memory: offset, dtype, shape, and an object to keep alive."""

BF16: Final = np.dtype(ml_dtypes.bfloat16)
F16: Final = np.dtype(np.float16)
F32: Final = np.dtype(np.float32)
NUMPY: Final = Dtypes(
    wire={F32: "F32", F16: "F16", BF16: "BF16"},
    pool={"fp32": F32, "fp16": F16, "bf16": BF16},
    bf16=BF16,
    float32=F32,
    boolean=np.dtype(np.bool_),
    uint8=np.dtype(np.uint8),
    read=np.dtype,
)


class HostArena(Generic[A]):
    """The engine runs a layer on request, and the caller waits for it."""

    def __init__(self, lane: Lane[A], size: int, view: View[A]) -> None:
        """`size` bytes of the connection's memory, which grows for them. Raises `ArenaFull`."""
        shared = lane.connection.arena
        self._place = lane.connection.take(size)
        self._lane, self._shared, self._view = lane, shared, view
        self.flags = self._place.offset
        self.size = self._place.offset + self._place.size
        lane.request_arena(shared.slots.size)

    def begin_layer(self, layer: int) -> Callable[[], None]:
        """Requests a layer; returns a function that waits for it."""
        return self._lane.begin_layer(layer)

    def hand_over(self, layer: int) -> None:
        self.begin_layer(layer)()

    def settle(self) -> None:
        """No work is outstanding here."""

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...], owner: object) -> A:
        return self._view(self._shared, offset, dtype, shape, (owner, self._place))

    def close(self) -> None:
        """The memory is freed with its connection."""


def numpy_view(
    shared: SharedMemory, offset: int, dtype: Any, shape: tuple[int, ...], owner: object
) -> NDArray[Any]:
    """An array that keeps its bytes of the arena taken."""
    made: np.dtype[Any] = np.dtype(dtype)
    length = made.itemsize * int(np.prod(shape))
    return np.ndarray(shape, made, shared.hold(offset, length, owner))
