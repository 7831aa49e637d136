"""An adversarial device: work completes late, out of step with the host, or fails.

Arguments are read and results written when a kernel runs, not when it is launched; freed pages are
overwritten in the order of the stream. What no kernel writes stays what the memory held before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from typing import Any, Final

import numpy as np

from kernels.backend import Attend, DeviceLost, Done, DType, Int32, PoolGeometry, Unsupported
from kernels.errors import NoMemory
from kernels.pending import StageSeconds
from tests.engine.fake_backend import FakeBackend, written
from tests.world.network import NEVER, Clock, Fault
from tests.world.tiers import SimCopies

FREED: Final = np.nan  # what freed pages hold: attention to one shows at once
LONGEST_S: Final = 0.05
READING: Final = ("attend", "gather", "read_stored")  # operations whose kernels may fail
STORED: Final = ("read_stored", "write_stored")
SUDDEN: Final = (0.01, 0.1, 0.3)  # shares of looks at late work that find it done already


@dataclass(eq=False, slots=True)
class Work:
    """One kernel in the stream."""

    device: WorldDevice
    kernel: Callable[[], Any]
    due: float
    error: Exception | None = None
    value: Any = None
    has_run: bool = False
    seconds: StageSeconds = field(default_factory=StageSeconds)

    @property
    def done(self) -> bool:
        """It may become so between any two looks."""
        device = self.device
        device.check()
        is_sudden = not self.has_run and device.order.random() < device.sudden
        device.run(max(self.due, device.clock.now) if is_sudden else device.clock.now)
        return self.has_run

    def result(self) -> Any:
        self.device.check()
        self.device.clock.advance(self.due)
        self.device.run(self.due)
        if self.error is not None:
            raise self.error
        return self.value


class WorldDevice(FakeBackend):
    """The device of one engine."""

    name = "world"
    device = "adversary"
    unsupported = ()

    def __init__(
        self, geometry: PoolGeometry, clock: Clock, order: random.Random, fault: Fault
    ) -> None:
        super().__init__(geometry)
        self.clock, self.order, self.fault = clock, order, fault
        self.stream: deque[Work] = deque()
        self.sudden = order.choice(SUDDEN)
        self.is_armed = self.is_lost = False
        self.num_launched = 0
        self._free_at = 0.0
        self.page_copies = SimCopies(self)

    def check(self) -> None:
        if self.is_lost:
            raise DeviceLost("the device fell off the bus")

    def run(self, until: float) -> None:
        """Run the kernels that are due."""
        while self.stream and self.stream[0].due <= until:
            work = self.stream.popleft()
            if work.error is None and (made := work.kernel()) is not None:
                work.value = made.result()
            work.has_run = True

    def free(self, pages: Int32) -> None:
        """Freed pages hold nothing any more."""
        size = self.geometry.page_size
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        if pages.size:
            self._launch("free", setitem, self.pool, np.s_[:, :, slots], FREED)

    def append(self, layer: int, k: Any, v: Any, slots: Int32) -> Any:
        return self._launch("append", super().append, layer, k, v, slots.copy())

    def write_stored(self, layer: int, k: Any, v: Any, slots: Int32) -> Any:
        return self._launch("write_stored", super().write_stored, layer, k, v, slots.copy())

    def copy_rows(
        self, src_pages: Int32, dst_pages: Int32, num_rows: Int32, group: int = 0
    ) -> None:
        arrays = (one.copy() for one in (src_pages, dst_pages, num_rows))
        self._launch("copy_rows", super().copy_rows, *arrays, group)

    def attend(self, requests: Sequence[Attend]) -> Any:
        def kernel() -> Any:
            return Done([written(self._attend(one), one.out) for one in requests])

        return self._launch("attend", kernel)

    def attend_ragged(self, request: Any) -> Any:
        return self._launch("attend_ragged", super().attend_ragged, request)

    def merge(self, *given: Any, **named: Any) -> Any:
        return self._launch("merge", partial(super().merge, *given, **named))

    def gather(self, layer: int, slots: Int32, dtype: DType, out: Any = None) -> Any:
        return self._launch("gather", super().gather, layer, slots.copy(), dtype, out)

    def read_stored(self, layer: int, slots: Int32, out: Any) -> Any:
        return self._launch("read_stored", super().read_stored, layer, slots.copy(), out)

    def close(self) -> None:
        self.run(NEVER)

    def _launch(self, name: str, call: Callable[..., Any], *args: Any) -> Work:
        """A kernel starts now or later, in the order of the stream, or it does not."""
        self.check()
        order, is_armed = self.order, self.is_armed and name != "free"
        # a driver that cannot copy rows for a truncation loses the pool
        if is_armed and name != "copy_rows" and self.fault("launch fails", 0.005):
            raise RuntimeError(f"{name}: a fault of the driver")
        if is_armed and self.fault("no memory", 0.03 if name in STORED else 0.005):
            raise NoMemory(f"{name}: no memory")
        if is_armed and name == "attend" and self.fault("unsupported", 0.005):
            raise Unsupported("q", "odd", "not here")
        late = 1e-6 * 10.0 ** (4.5 * order.random()) if order.random() < 0.7 else 0.0
        self._free_at = max(self.clock.now, self._free_at) + min(late, LONGEST_S)
        work = Work(self, partial(call, *args), self._free_at)
        if is_armed and name in READING and self.fault("kernel fails", 0.02):
            work.error = RuntimeError(f"{name}: a fault of the device")
        self.stream.append(work)
        self.num_launched += 1
        return work
