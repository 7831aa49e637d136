"""A device that is host memory: streams run late, and as far out of step as events allow.

Every copy is checked when it runs: it is within one live allocation on each side, of the kind
that it says, and no copy touches pageable memory. Memory that is freed is overwritten at once, and
every later use of it fails: pinned memory when its last reference goes, device memory when the
stream whose pool it came from gets there, as CuPy's pools reuse it.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from cupy.cuda import runtime as real_runtime

from kernels.tensor import DeviceTensor

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
FREED = 0xDB


class Memory(np.ndarray[Any, Any]):
    """Bytes with an address, as CuPy hands them out."""

    @property
    def ptr(self) -> int:
        address: int = self.ctypes.data
        return address


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy as it was asked for."""

    to: int
    source: int
    size: int
    kind: int
    stream: int


class Event:
    """Passes when its stream comes to where it was recorded; at once if it never was."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.ptr, self.done = device, len(device.events), True
        device.events.append(self)

    def synchronize(self) -> None:
        self.device.run(until=lambda: self.done)


class Stream:
    """A queue of work."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name, self.ptr = device, name, 100 + len(device.streams)
        self.queue: deque[tuple[Event | None, Callable[[], None]]] = deque()
        self.urgency = device.order.random()
        device.streams.append(self)

    def __enter__(self) -> Stream:
        self.device.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.device.entered.pop()

    def record(self, event: Event) -> Event:
        event.done = False
        self.queue.append((None, lambda: setattr(event, "done", True)))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, lambda: None))

    def synchronize(self) -> None:
        self.device.run(until=lambda: not self.queue)


@dataclass
class FakeDevice:
    """`cupy` and `runtime` replace the modules; `copies` are all that were asked for."""

    seed: int = 0
    streams: list[Stream] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    entered: list[Stream] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    live: dict[str, dict[int, int]] = field(
        default_factory=lambda: {"device": {}, "pinned": {}, "registered": {}}
    )
    refuses: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.order = random.Random(self.seed)
        pool = SimpleNamespace(free_all_blocks=lambda: None)
        self.cupy = SimpleNamespace(
            get_default_memory_pool=lambda: pool,
            cuda=SimpleNamespace(
                Stream=lambda **_: self.stream(),
                Event=lambda **_: Event(self),
                alloc=lambda size: self.allocate("device", size, self.entered[-1]),
                alloc_pinned_memory=lambda size: self.allocate("pinned", size),
                get_current_stream=lambda: self.entered[-1],
            ),
        )
        self.runtime = SimpleNamespace(
            CUDARuntimeError=real_runtime.CUDARuntimeError,
            memcpyHostToDevice=TO_DEVICE,
            memcpyDeviceToHost=TO_HOST,
            memcpyDeviceToDevice=ON_DEVICE,
            memcpyAsync=self._memcpy,
            eventQuery=lambda ptr: self.failed or (0 if self.events[ptr].done else 600),
            eventRecord=lambda ptr, stream: self.of(stream).record(self.events[ptr]),
            streamWaitEvent=lambda stream, ptr: self.of(stream).wait_event(self.events[ptr]),
            hostRegister=self._register,
            hostUnregister=lambda address: self.live["registered"].pop(address),
        )

    def stream(self, name: str = "") -> Stream:
        return Stream(self, name)

    def of(self, ptr: int) -> Stream:
        return next(stream for stream in self.streams if stream.ptr == ptr)

    def allocate(self, kind: str, size: int, pool: Stream | None = None) -> Memory:
        """Aligned bytes of 0xEE, known to be live until the last reference goes.

        `pool`: the stream whose pool takes them back, in its order; None: they are freed at once.
        """
        whole = np.empty(size + 256, np.uint8)
        if size < 1 << 20:  # larger allocations are only reserves
            whole.fill(0xEE)
        begin = -whole.ctypes.data % 256
        memory = whole[begin : begin + size].view(Memory)
        address = memory.ptr
        self.live[kind][address] = address + size

        def overwrite(freed: Any) -> None:
            """`check` finds out who uses it later, before it is touched."""
            if size < 1 << 20:
                freed.fill(FREED)
            self.live[kind].pop(address)

        def free(freed: Any) -> None:
            if pool is None:
                overwrite(freed)
            else:
                pool.queue.append((None, lambda: overwrite(freed)))

        weakref.finalize(memory, free, whole)
        return memory

    def tensor(self, values: Any, stream: Stream, offset: int = 0) -> DeviceTensor:
        """A tensor that the stream writes when it gets to it; NaN until then."""
        memory = self.allocate("device", values.nbytes + offset)
        memory[:] = 0xFF
        address = memory.ptr + offset
        tensor = DeviceTensor(values.dtype, values.shape, address, stream.ptr, memory)
        self.write(tensor, values)
        return tensor

    def write(self, tensor: DeviceTensor, values: Any) -> None:
        """Put values there, in the order of the tensor's stream; its writer keeps it till then."""

        def write() -> None:
            self.view(tensor.address, tensor.shape, tensor.dtype)[...] = values

        self.of(tensor.stream).queue.append((None, write))

    def read(self, tensor: DeviceTensor) -> Any:
        """What later work in the tensor's stream reads."""
        return self.reading(tensor)()

    def reading(self, tensor: DeviceTensor) -> Callable[[], Any]:
        """Read it in the order of its stream, as of now; the values are there when called for."""
        found: list[bytes] = []
        read = lambda: found.append(ctypes.string_at(tensor.address, tensor.nbytes))  # noqa: E731
        self.of(tensor.stream).queue.append((None, read))

        def values() -> Any:
            self.run(until=lambda: bool(found))
            return np.frombuffer(found[0], tensor.dtype).reshape(tensor.shape)

        return values

    def view(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Device memory as an array, for kernels; it must be live when they run."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.check("device", address, size)
        if size == 0:
            return np.zeros(shape, dtype)
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)

    def launch(self, kernel: Callable[[], None]) -> None:
        """A kernel on the current stream."""
        self.entered[-1].queue.append((None, kernel))

    def convert(self, to: int, dtype: Any, tensor: DeviceTensor) -> None:
        """As `transfer.convert`."""

        def kernel() -> None:
            source = self.view(tensor.address, tensor.shape, tensor.dtype)
            self.view(to, tensor.shape, dtype)[...] = source.astype(dtype)

        self.launch(kernel)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run what may run until it holds or nothing is left, some streams far ahead of others."""
        while not until():
            ready = [s for s in self.streams if s.queue and (s.queue[0][0] or _PASSED).done]
            if not ready:
                left = {stream.ptr: len(stream.queue) for stream in self.streams if stream.queue}
                assert not left, f"streams wait for each other: {left}"
                return
            stream = max(ready, key=lambda s: s.urgency)
            if self.order.random() < 0.1:
                stream = self.order.choice(ready)
            stream.queue.popleft()[1]()

    def check(self, kind: str, address: int, size: int) -> None:
        """Check that bytes are in one live allocation or range of a kind."""
        spaces = ("pinned", "registered") if kind == "host" else (kind,)
        if size and not any(
            begin <= address and address + size <= end
            for space in spaces
            for begin, end in self.live[space].items()
        ):
            raise AssertionError(f"{size} bytes at {address:#x} are no live {kind} memory")

    def _memcpy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self.copies.append(Copy(to, source, size, kind, stream))

        def copy() -> None:
            self.check("host" if kind == TO_HOST else "device", to, size)
            self.check("host" if kind == TO_DEVICE else "device", source, size)
            ctypes.memmove(to, source, size)

        self.of(stream).queue.append((None, copy))

    def _register(self, address: int, size: int, flags: int) -> None:
        if self.refuses:
            raise real_runtime.CUDARuntimeError(self.refuses)
        self.live["registered"][address] = address + size


_PASSED = SimpleNamespace(done=True)
