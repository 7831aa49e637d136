"""Flags on the device: 32-bit words that streams wait for and set, in the order of their work.

Needs the driver's stream memory operations, which CuPy has no binding of. A write is seen after
everything that its stream did before it; a wait holds up what the stream is given behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import CDLL, byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p, create_string_buffer
from struct import Struct
from typing import Any, Final, NamedTuple

from cupy_backends.cuda.api import driver

from kernels.lanes.lane import FLAG_BYTES, LAYER_FLAGS

UNSET: Final = 0
SET: Final = 1
WAIT: Final = 1
WRITE: Final = 2
EQUAL: Final = 1
"""Flag of a wait: until the word is equal to the value."""
MPS_ENABLED: Final = 133
_OPERATION: Final = Struct("<I4xQQI20x")
"""`CUstreamBatchMemOpParams`: what, where, the value, flags."""
MOST_AT_ONCE: Final = 128


class Operation(NamedTuple):
    """A wait for a word to be `value`, or a write of it."""

    kind: int
    address: int
    value: int


@functools.cache
def _batch() -> Any:
    batch = CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    batch.argtypes = (c_void_p, c_uint, c_char_p, c_uint)
    return batch


class Operations:
    """Waits and writes that go to a stream together, as often as they are called."""

    __slots__ = ("_parts",)

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._parts = []
        for first in range(0, len(operations), MOST_AT_ONCE):
            some = operations[first : first + MOST_AT_ONCE]
            packed = b"".join(
                _OPERATION.pack(op.kind, op.address, op.value, EQUAL if op.kind == WAIT else 0)
                for op in some
            )
            self._parts.append((len(some), create_string_buffer(packed, len(packed))))

    def __call__(self, stream: int) -> None:
        """Enqueue on a stream."""
        for count, part in self._parts:
            driver.check_status(_batch()(stream, count, part, 0))


class Flags:
    """The two flags of every layer, from `base` on: ready and done."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._turns: dict[tuple[int | None, int | None], Operations] = {}

    def turn(self, before: int | None, after: int | None) -> Operations:
        """Say that layer `before` is done, and wait until `after` is ready; None for neither.

        The waiting side resets the flag.
        """
        found = self._turns.get((before, after))
        if found is None:
            operations = []
            if before is not None:
                operations.append(Operation(WRITE, self._done(before), SET))
            if after is not None:
                operations.append(Operation(WAIT, self._ready(after), SET))
                operations.append(Operation(WRITE, self._ready(after), UNSET))
            found = self._turns[before, after] = Operations(operations)
        return found

    def all_ready(self, layers: Sequence[int]) -> Operations:
        return Operations([Operation(WRITE, self._ready(layer), SET) for layer in layers])

    def all_done(self, layers: Sequence[int]) -> Operations:
        return Operations([Operation(WRITE, self._done(layer), SET) for layer in layers])

    def all_unset(self, layers: Sequence[int]) -> Operations:
        words = [at for layer in layers for at in (self._ready(layer), self._done(layer))]
        return Operations([Operation(WRITE, at, UNSET) for at in words])

    def _ready(self, layer: int) -> int:
        return self._base + LAYER_FLAGS * FLAG_BYTES * layer

    def _done(self, layer: int) -> int:
        return self._ready(layer) + FLAG_BYTES


def uuid_of(device: int) -> str:
    """The GPU's own id, the same in every process."""
    uuid = (c_ubyte * 16)()
    driver.check_status(CDLL("libcuda.so.1").cuDeviceGetUuid_v2(uuid, device))
    return bytes(uuid).hex()


def has_mps(device: int) -> bool:
    """Whether this process reaches the device through MPS."""
    value = c_int()
    attribute = CDLL("libcuda.so.1").cuDeviceGetAttribute
    return attribute(byref(value), MPS_ENABLED, device) == 0 and value.value != 0
