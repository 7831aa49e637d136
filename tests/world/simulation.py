"""What every world is made of: one run by a seed, its faults, virtual time, and engines."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest.mock import patch

from config.sections import CacheSettings
from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from kernels.backend import PoolGeometry
from service.engine.loop.engine import Engine
from service.engine.store.store import FATAL
from service.keys import line_of
from service.metrics import Metrics
from service.road.caller_end import caller as caller_end
from service.road.engine_end.session import Session
from service.tenants import SCOPES
from tests.world.device import WorldDevice
from tests.world.network import NEVER, Clock, Listener, Network, Replaced, SimSelector, virtual
from tests.world.oracle.calls import NUM_LAYERS, SPACES, Wrong, check
from tests.world.oracle.history import Unclear
from tests.world.tiers import TierPlan

LONGEST_S: Final = 3000.0  # the clock, which begins at 1000 s, at the end of the longest run


class Over(Exception):
    """The run has failed, and ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed decides. A shrunk run has fewer statements, callers or faults."""

    seed: int
    callers: int = 4
    statements: int = 40
    faults: bool = True
    skipped: frozenset[int] = frozenset()  # numbers of statements that are left out
    world: str = "engine"


@dataclass(slots=True)
class Result:
    """What a run did; `unclear` is 1 where it was given up, as too much may have happened."""

    plan: Plan
    error: str | None = None
    seconds: float = 0.0
    rounds: int = 0
    calls: int = 0
    unclear: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of its trace: equal runs have equal ones."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class Run:
    """One run: faults happen by luck, and a trace is kept. A world adds `run`."""

    intensity = 1.0

    def __init__(self, plan: Plan) -> None:
        self.plan, self.result = plan, Result(plan)
        self.luck = random.Random(f"{plan.seed} faults")
        self.faults: list[str] = []  # their names, in the order in which they happened

    def fault(self, name: str, share: float) -> bool:
        """Whether a fault happens now, by its share of the cases."""
        if not self.plan.faults or self.luck.random() >= share * self.intensity:
            return False
        self.faults.append(name)
        self.note(name)
        return True

    def count(self, operation: str, code: str, since: int) -> None:
        """An operation ended that began when so far `since` faults had happened."""
        for what in (code, *set(self.faults[since:])):
            self.result.coverage[operation, what] += 1

    def note(self, text: str) -> None:
        self.result.trace.append(text)

    def fail(self, error: BaseException) -> None:
        """The first failure counts."""
        if isinstance(error, Unclear):
            self.note(f"given up: {error}")
            self.result.unclear = 1
        elif self.result.error is None:
            self.result.error = f"{type(error).__name__}: {error}"
            self.note(f"FAILED {self.result.error}")
            if not isinstance(error, Wrong):
                traceback.print_exception(error)


def keys_of(names: Iterable[str]) -> bytes:
    """A key file; each namespace's key is its name."""
    return "\n".join(line_of(name, name, SCOPES) for name in names).encode()


class EngineProcess:
    """An engine, with its listener and device; it can die at any frame."""

    def __init__(self, world: Simulation, secret: str = "") -> None:
        self.world, self.keys = world, world.keys
        self.due = self.stalled_until = 0.0
        self.is_over = False
        self.how = "end"  # in which it is over: "kill" or "power loss" otherwise
        self.device = WorldDevice(world.geometry, world.clock, world.order, world.device_fault)
        self.selector = SimSelector(world.network, world.order)
        self.listener: Any = Listener(world.network)
        seams: Any = {"read_file": lambda _: self.keys, "selector": self.selector}
        self.engine = Engine(self.listener, world.settings, self.device, Metrics(), secret, **seams)
        self.device.run(NEVER)
        self.device.is_armed = world.plan.faults
        allocator: Any = self.engine.store.tree.allocator
        release = allocator.release

        def released(pages: Any) -> None:
            before = allocator.num_free
            release(pages)
            self.device.free(allocator._stack[before : allocator.num_free].copy())

        allocator.release = released

    def round(self) -> None:
        """One round of the loop; then `due` is when the next one is. Most rounds that only wait for
        the device are left out: they would take most of the time."""
        world, before = self.world, self._state()
        try:
            for worker in self.selector.workers:
                worker.advance(world.clock.now)
            self.engine.round()
            world.result.rounds += 1
            world.after_round()
            ends = self.engine.is_drained()
            check(not (ends and self.engine.jobs), "a drain ended before calls that were accepted")
        except FATAL as error:
            check(self.device.is_lost, f"the engine lost its pool: {error!r}")
            ends = True
        if ends:
            self.engine.close()
            self._over()
            return
        self.due = world.clock.now + self.engine.wait_s()
        if self.device.stream and self._state() == before and world.order.random() < 0.9:
            self.due = max(self.due, self.device.stream[0].due)
        if world.fault("engine stalls", 0.01):
            self.due += world.order.choice((0.01, 0.5, 4.0))
            self.stalled_until = self.due

    def _state(self) -> tuple[int, int, int]:
        """Changes when a round has accepted a call, begun one, started a kernel, or answered."""
        engine = self.engine
        return len(engine.jobs), engine.scheduler.queue.count, self.device.num_launched

    def next_due(self) -> float:
        if self.is_over:
            return NEVER
        if self.stalled_until > self.world.clock.now:
            return self.stalled_until
        dues = (worker.next_due() for worker in self.selector.workers)
        return min(self.due, self.selector.ready_at(), *dues)

    def kill(self, how: str = "kill") -> None:
        """kill -9, or a loss of power: nothing is sent any more."""
        self.how = how
        self._over()
        self.world.tiers.end(self.engine, how)
        for session in list[Any](self.engine.callers.sessions):
            session.sock.kill()
            session.live.clear()
        self.engine.close()

    def _over(self) -> None:
        self.is_over = True
        self.listener.close()
        self.world.ended(self)

    def check_empty(self) -> None:
        """Nothing is left of what callers did and gave back."""
        store = self.engine.store
        store.tree.check_integrity()
        left = {
            "sequences": [leaf.id for leaf in store.tree.books],
            "missing pages": store.geometry.num_pages - store.tree.allocator.num_free,
            "imports": store.imports.count(None),
            "leases": store.tree.cache.num_leases,
            "work": self.engine.scheduler.is_busy,
            "uses by steps": self.engine.scheduler.steps._users,
            "loads": store.loading is not None and store.loading._by_id,
            "sums of what is left behind": +store.ledger._totals,
        }
        check(not any(left.values()), "something is left:", left)
        check(not store.ledger._counts, "left behind:", store.ledger._counts)


class Simulation(Run):
    """One run of engines. A world adds `begin`, which starts the processes, `main` with the callers
    and the checks at the end, `ended` for engines that end or die, and `dial`."""

    server = ServerSettings(live=False)
    has_keys = True
    has_tiers = False
    device_fault = Run.fault

    def after_round(self) -> None:
        """An engine has had a round of its loop."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.order = order = random.Random(f"{plan.seed} world")
        stalls = order.choice((0.0, 0.0002, 0.003)) if plan.faults else 0.0
        self.clock = Clock(random.Random(f"{plan.seed} clock"), stalls)
        self.intensity = self.luck.choice((0.3, 1.0, 3.0))
        self.network = Network(self.clock, plan.seed, self.fault)
        self.geometry = PoolGeometry(NUM_LAYERS, order.choice((20, 40, 80)), 4, 1, 4, dtype="fp32")
        self.keys = keys_of(SPACES)
        self.revoked, self.revoked_at = "", NEVER  # the namespace, since engine or door know
        engine = EngineSettings(slice_ms=order.choice((1e-5, 0.001, 0.05, 20.0)))
        watermark, history = order.choice((0.5, 0.9, 1.0)), order.choice((1, 64))
        cache = CacheSettings(high_watermark=watermark, events_history=history)
        self.tiers = TierPlan(self)
        cache = self.tiers.settings(cache)
        auth = AuthSettings(keys_file="keys" if self.has_keys else None)
        self.settings = Settings(server=self.server, engine=engine, cache=cache, auth=auth)
        self.selector = SimSelector(self.network, order, self.wait)
        self.loop = asyncio.SelectorEventLoop(self.selector)
        self.engines: dict[str, EngineProcess] = {}

    def reread(self) -> None:
        """Processes read their keys again."""

    def revoke(self, name: str) -> None:
        """A namespace has no key for some time; in a file that can be read."""
        self.keys, self.revoked = keys_of(one for one in SPACES if one != name), name
        self.revoked_at = NEVER
        self.reread()
        self.loop.call_later(self.order.choice((0.05, 0.5, 3.0)), self.restore_keys)

    def restore_keys(self) -> None:
        self.keys, self.revoked_at = keys_of(SPACES), NEVER
        self.reread()

    def patches(self) -> list[Replaced]:
        """What is replaced in the service."""
        return [
            (caller_end, "connected", self.dial),
            (Session, "__hash__", lambda session: session.sock.pair),  # sets keep their order
            *self.tiers.patches(),
        ]

    def end_faults(self) -> None:
        self.plan = replace(self.plan, faults=False)
        for engine in self.engines.values():
            engine.device.is_armed, engine.stalled_until = False, 0.0

    def note(self, text: str) -> None:
        super().note(f"{self.clock.now - 1000:.6f} {text}")

    def wait(self, timeout: float | None) -> None:
        """The callers' loop has nothing to do for `timeout` seconds: engines run until then."""
        clock, engines = self.clock, list(self.engines.values())
        check(clock.now < LONGEST_S, "the run does not end")
        ends = NEVER if timeout is None else clock.now + timeout
        is_busy = ends <= clock.now
        while not self.is_over and (is_busy or self.selector.ready_at() > clock.now):
            now, dues = clock.now, [one.next_due() for one in engines]
            ready = [one for one, due in zip(engines, dues, strict=True) if due <= now]
            if ready and (not is_busy or self.order.random() < 0.5):
                (ready[0] if len(ready) == 1 else self.order.choice(ready)).round()
            elif not is_busy:
                clock.advance(min(*dues, ends, self.selector.ready_at()))
            if clock.now >= ends:
                break
        if self.is_over:
            raise Over

    @property
    def is_over(self) -> bool:
        """Whether the run has failed, or was given up."""
        return self.result.error is not None or self.result.unclear > 0

    def run(self) -> Result:
        """Run the world by its plan; equal plans give equal results."""
        gc.disable()
        gc.freeze()  # to look through all modules would take as long as the run
        logging.disable(logging.CRITICAL)
        entropy, began = random.Random(f"{self.plan.seed} entropy"), self.clock.now
        state = random.getstate()
        random.seed(entropy.getrandbits(64))
        try:
            with ExitStack() as stack, suppress(Over):
                for replaced in (*virtual(self.clock, entropy), *self.patches()):
                    stack.enter_context(patch.object(*replaced))
                self.begin()
                self.loop.run_until_complete(self.main())
        except Exception as error:
            self.fail(error)
        finally:
            self.result.seconds, self.result.faults = self.clock.now - began, Counter(self.faults)
            self.loop.set_exception_handler(lambda *_: None)
            for task in list[Any](asyncio.all_tasks(self.loop)):
                task._log_destroy_pending = False
                with suppress(Exception):  # here, not when it is collected, in another run
                    task.get_coro().close()
            self.loop.close()
            self.tiers.folder.cleanup()
            gc.collect()  # what a run leaves behind must not act in the next one
            gc.enable()
            random.setstate(state)
            logging.disable(logging.NOTSET)
        return self.result
