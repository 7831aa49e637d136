"""What every world is made of: engines, virtual time, faults, and one run by a seed."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from config.sections import CacheSettings
from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from kernels.backend import PoolGeometry
from service.core.pool.allocator import PageAllocator
from service.engine.loop.engine import Engine
from service.engine.store.store import FATAL
from service.keys import line_of
from service.metrics import Metrics
from service.road.caller_end import caller as caller_end
from service.road.engine_end.session import Session
from tests.world.calls import NUM_LAYERS, Op, Wrong, check
from tests.world.clock import Clock, replaced, virtual
from tests.world.device import WorldDevice
from tests.world.history import Unclear
from tests.world.network import Listener, Network, SimSelector, SimSocket

LONGEST_S: Final = 3000.0
"""The clock, which begins at 1000 s, at the end of the longest run."""
SPACES: Final = ("ours", "theirs")
SCOPES: Final = ("read", "append", "move", "admin")


class Over(Exception):
    """The run has failed, and ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed decides. A shrunk run has fewer statements, callers or faults."""

    seed: int
    callers: int = 4
    statements: int = 40
    faults: bool = True
    skipped: frozenset[int] = frozenset()
    """Numbers of statements that are left out."""
    world: str = "engine"


@dataclass(slots=True)
class Result:
    """What a run did. `error` is None where all was right."""

    plan: Plan
    error: str | None = None
    seconds: float = 0.0
    rounds: int = 0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    is_unclear: bool = False
    """Whether it was given up, since too much may have happened."""

    @property
    def digest(self) -> str:
        """Of its trace: equal runs have equal ones."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class EngineProcess:
    """The engine, with its listener and device; it can die at any frame, and start again."""

    def __init__(self, world: Simulation, secret: str = "") -> None:
        self.world, self.due, self.stalled_until = world, 0.0, 0.0
        self.keys = world.keys
        self.listener = Listener(world.network)
        self.device = WorldDevice(world.geometry, world.clock, world.order, world.device_fault)
        self.selector = SimSelector(world.network, world.order)
        listener: Any = self.listener
        self.engine = Engine(
            listener,
            world.settings,
            self.device,
            Metrics(),
            secret,
            read_file=lambda _: self.keys,
            selector=self.selector,
        )
        self.device.run(float("inf"))
        self.device.is_armed = world.plan.faults
        world.devices[id(self.engine.store.tree.allocator)] = self.device
        self.is_over = False

    def round(self) -> None:
        """One round of the loop; afterwards `due` is when the next one is.

        A round that changed nothing and waits for the device is mostly repeated when the device is
        done, or when bytes arrive: most of the time would go into such rounds.
        """
        world, before = self.world, self._state()
        try:
            self.engine.round()
            world.result.rounds += 1
            if self.engine.is_drained():
                check(not self.engine.jobs, "a drain ended before calls that were accepted")
                self.end()
                return
        except FATAL as error:
            check(self.device.is_lost, f"the engine lost its pool: {error!r}")
            self.end()
            return
        self.due = world.clock.now + self.engine.wait_s()
        if self.device.stream and self._state() == before and world.order.random() < 0.9:
            self.due = max(self.due, self.device.stream[0].due)
        if world.fault("engine stalls", 0.01):
            self.due += world.order.choice((0.01, 0.5, 4.0))
            self.stalled_until = self.due

    def _state(self) -> tuple[int, int, int]:
        """Changes when a round has accepted a call, begun one, started a kernel, or answered."""
        waiting = self.engine.scheduler.queue.count
        return len(self.engine.jobs), waiting, self.device.num_launched

    def next_due(self) -> float:
        if self.is_over:
            return float("inf")
        if self.stalled_until > self.world.clock.now:
            return self.stalled_until
        return min(self.due, self.selector.ready_at())

    def kill(self) -> None:
        """kill -9: nothing is sent any more."""
        self._over()
        for session in list(self.engine.callers.sessions):
            sock: Any = session.sock
            sock.kill()
            session.live.clear()
        self.engine.close()

    def end(self) -> None:
        """A graceful end, or that of a lost device."""
        self.engine.close()
        self._over()

    def check_empty(self) -> None:
        """Nothing is left of what callers did and gave back."""
        store = self.engine.store
        store.tree.check_integrity()
        left = {
            "sequences": [leaf.id for leaf in store.tree.books],
            "missing pages": store.geometry.num_pages - store.tree.allocator.num_free,
            "imports": store.imports.count(None),
            "leases": store.tree.cache.num_leases,
            "marks": store.move_marks.marks,
            "work": self.engine.scheduler.is_busy,
        }
        check(not any(left.values()), "something is left:", left)

    def _over(self) -> None:
        self.is_over = True
        self.listener.close()
        self.world.ended(self)


class Simulation(ABC):
    """One run. A world adds who calls, and what must be right."""

    server = ServerSettings(live=False)
    has_keys = True

    def __init__(self, plan: Plan) -> None:
        self.plan, self.result, self.is_over = plan, Result(plan), False
        self.order = random.Random(f"{plan.seed} world")
        order = self.order
        stalls = order.choice((0.0, 0.0002, 0.003)) if plan.faults else 0.0
        self.clock = Clock(random.Random(f"{plan.seed} clock"), stalls)
        self.faults: list[str] = []
        self.luck = random.Random(f"{plan.seed} faults")
        self.intensity = self.luck.choice((0.3, 1.0, 3.0))
        self.network = Network(self.clock, plan.seed, self.fault)
        self.geometry = PoolGeometry(NUM_LAYERS, order.choice((20, 40, 80)), 4, 1, 4, dtype="fp32")
        self.devices: dict[int, WorldDevice] = {}
        lines = [line_of(name, name, SCOPES) for name in SPACES]
        self.keys = "\n".join(lines).encode()
        self.settings = Settings(
            server=self.server,
            engine=EngineSettings(slice_ms=order.choice((1e-5, 0.001, 0.05, 20.0))),
            cache=CacheSettings(
                high_watermark=order.choice((0.5, 0.9, 1.0)), events_history=order.choice((0, 64))
            ),
            auth=AuthSettings(keys_file="keys" if self.has_keys else None),
        )
        self.selector = SimSelector(self.network, order, self.wait)
        self.loop = self.make_loop()
        self.engines: dict[str, EngineProcess] = {}

    def make_loop(self) -> asyncio.SelectorEventLoop:
        return asyncio.SelectorEventLoop(self.selector)

    @abstractmethod
    async def main(self) -> None:
        """All callers, and the checks at the end."""

    @abstractmethod
    def begin(self) -> None:
        """Starts the processes."""

    @abstractmethod
    def ended(self, engine: EngineProcess) -> None:
        """An engine has ended, or died."""

    @abstractmethod
    async def dial(self, path: str) -> SimSocket:
        """A connection to the engine that listens there."""

    def patches(self) -> Iterable[tuple[Any, str, Any]]:
        """What is replaced in the service: the connections' end, and what sees freed pages."""
        release = PageAllocator.release

        def released(allocator: Any, pages: Any) -> None:
            before = allocator.num_free
            release(allocator, pages)
            if (device := self.devices.get(id(allocator))) is not None:
                device.free(allocator._stack[before : allocator.num_free].copy())

        return [
            (PageAllocator, "release", released),
            (caller_end, "connected", self.dial),
            (Session, "__hash__", lambda session: session.sock.pair),  # sets keep their order
        ]

    def fault(self, name: str, share: float) -> bool:
        """Whether a fault happens now."""
        if not self.plan.faults or self.luck.random() >= share * self.intensity:
            return False
        self.faults.append(name)
        self.note(name)
        return True

    def end_faults(self) -> None:
        self.plan = replace(self.plan, faults=False)
        for engine in self.engines.values():
            engine.device.is_armed, engine.stalled_until = False, 0.0

    def count(self, op: Op, code: str) -> None:
        """A call was answered."""
        for fault in set(self.faults[op.faults :]):
            self.result.coverage[op.name, fault] += 1
        self.result.coverage[op.name, code] += 1

    def device_fault(self, name: str, share: float) -> bool:
        return self.fault(name, share)

    def note(self, text: str) -> None:
        self.result.trace.append(f"{self.clock.now - 1000:.6f} {text}")

    def fail(self, error: BaseException) -> None:
        """The first failure counts."""
        if isinstance(error, Unclear):
            self.note(f"given up: {error}")
            self.is_over = self.result.is_unclear = True
        elif self.result.error is None:
            self.result.error = f"{type(error).__name__}: {error}"
            self.note(f"FAILED {self.result.error}")
            if not isinstance(error, Wrong):
                traceback.print_exception(error)

    # Time.

    def wait(self, timeout: float | None) -> None:
        """The callers' loop has nothing to do for `timeout` seconds: engines run until then."""
        clock, engines = self.clock, list(self.engines.values())
        if self.is_over or self.result.error is not None:
            raise Over
        check(clock.now < LONGEST_S, "the run does not end")
        if timeout is not None and timeout <= 0:
            ready = [one for one in engines if one.next_due() <= clock.now]
            if ready and self.order.random() < 0.5:
                self.run_engine(ready)
            return
        ends = float("inf") if timeout is None else clock.now + timeout
        while clock.now < ends:
            if self.is_over or self.result.error is not None:
                raise Over
            if self.selector.ready_at() <= clock.now:
                return
            now, dues = clock.now, [one.next_due() for one in engines]
            if ready := [one for one, due in zip(engines, dues, strict=True) if due <= now]:
                self.run_engine(ready)
                continue
            clock.advance(min(*dues, ends, self.selector.ready_at()))

    def run_engine(self, ready: list[EngineProcess]) -> None:
        try:
            (ready[0] if len(ready) == 1 else self.order.choice(ready)).round()
        except Exception as error:
            self.fail(error)

    def run(self) -> Result:
        """Run the world by its plan; equal plans give equal results."""
        gc.disable()
        gc.freeze()  # to look through all modules would take as long as the run
        logging.disable(logging.CRITICAL)
        try:
            with (
                virtual(self.clock, random.Random(f"{self.plan.seed} entropy")),
                replaced(*self.patches()),
            ):
                began = self.clock.now
                try:
                    self.begin()
                    self.loop.run_until_complete(self.main())
                except Over:
                    pass
                except Exception as error:
                    self.fail(error)
                self.result.seconds = self.clock.now - began
        finally:
            self.loop.set_exception_handler(lambda *_: None)
            for task in asyncio.all_tasks(self.loop):
                left: Any = task
                left._log_destroy_pending = False
                with suppress(Exception):  # here, not when it is collected, in another run
                    left.get_coro().close()
            self.loop.close()
            gc.collect()  # what a run leaves behind must not act in the next one
            gc.enable()
            logging.disable(logging.NOTSET)
        self.result.faults = Counter(self.faults)
        return self.result
