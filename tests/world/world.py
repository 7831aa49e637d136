"""The world: one engine's real loop and both real ends of the road, in one thread, by a seed."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from config.sections import CacheSettings
from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from kernels.backend import PoolGeometry
from service.core.pool.allocator import PageAllocator
from service.engine.loop.engine import Engine
from service.engine.store.store import FATAL
from service.errors import DeadlineExceeded, NotReady
from service.image.json_body import fields_text, read_header
from service.image.reading import Layout, place, read_entry
from service.image.writing import PROBLEM, RESPONSE
from service.keys import line_of
from service.metrics import Metrics
from service.operations.table import BY_NAME
from service.road.caller_end import caller as caller_end
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import ArenaFull, Slot
from service.road.engine_end.session import Session, problem_image
from tests.images import write_image
from tests.world.clock import Clock, replaced, virtual
from tests.world.device import WorldDevice
from tests.world.model import Model, Op, Wrong, check
from tests.world.network import Listener, Network, SimSelector, SimSocket
from tests.world.programs import Program

ARENA_BYTES: Final = 2**18
ANSWER_BYTES: Final = 2**13
SCRIBBLE: Final = 0xA5
"""What a caller puts into slots that the engine must not use any more."""
PATIENCE_S: Final = 60.0
"""Virtual time after which a call without an answer is a bug."""
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


@dataclass(slots=True)
class Result:
    """What a run did. `error` is None where all was right."""

    plan: Plan
    error: str | None = None
    seconds: float = 0.0
    rounds: int = 0
    calls: int = 0
    digest: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


class EngineProcess:
    """The engine, with its listener and device; it can die at any frame, and start again."""

    def __init__(self, world: World) -> None:
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
        return self.world.clock.now if self.selector.is_ready() else self.due

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

    def _over(self) -> None:
        self.is_over = True
        self.listener.close()
        self.world.model.clear()


class CallerProcess:
    """A caller: its session, and the program that it runs. It reconnects for ever."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.space = world.model.space(SPACES[number % 2])
        self.order = random.Random(f"{world.plan.seed} caller {number}")
        self.road: RoadCaller | None = None
        self.pair = 0
        self.connecting = asyncio.Lock()
        self.program = Program(world.model, self.space, number, self.order, self.send)
        self.tasks: set[asyncio.Task[None]] = set()

    async def connected(self) -> RoadCaller:
        async with self.connecting:
            while self.road is None or self.road.lost:
                with suppress(OSError, NotReady):
                    self.road = await RoadCaller.connect("world", ARENA_BYTES, key=self.space.name)
                    sock: Any = self.road.sock
                    self.pair = sock.pair
                    break
                await asyncio.sleep(0.05)
            return self.road

    async def run(self) -> None:
        """All statements, some before the one before them has ended."""
        plan = self.world.plan
        for number in range(plan.statements):
            if plan.callers * number + self.number in plan.skipped:
                continue
            order = self.program.order = random.Random(f"{plan.seed} {self.number} {number}")
            name = self.program.draw()
            if plan.faults:
                self._faults()
            together = order.random() < 0.4 and name not in ("commit", "rest")
            if not together and self.tasks:
                await asyncio.wait(self.tasks)
            task = asyncio.create_task(self.statement(name))
            self.tasks.add(task)
            task.add_done_callback(self._ended)
            if not together or len(self.tasks) > 3:
                await asyncio.wait(self.tasks)
            if self.world.result.error:
                return
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def statement(self, name: str) -> None:
        self.world.note(f"caller {self.number}: {name}")
        await self.program.statement(name)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(error)

    def _faults(self) -> None:
        """What may happen to processes before a statement."""
        world = self.world
        if self.road is not None and world.fault("caller dies", 0.01):
            sock: Any = self.road.sock
            sock.kill()
            for (pair, _), op in world.calls.items():
                op.is_lost = op.is_lost or pair == sock.pair
            self.road.lose("it died")
        elif world.engine.is_over:
            return
        elif world.fault("engine dies", 0.002):
            world.engine.kill()
        elif world.fault("engine drains", 0.002):
            world.model.is_draining = True
            world.engine.engine.drain()
        elif world.fault("key file breaks", 0.005):
            world.engine.keys = b"unreadable"
            world.engine.engine.read_keys_again()
        elif world.fault("device lost", 0.001):
            world.model.is_draining = world.engine.device.is_lost = True

    async def send(self, op: Op) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
        """The answer of a call, which is what the engine answered; None where none came."""
        world, order = self.world, self.order
        op.space = self.space
        road = await self.connected()
        image = write_image(op.fields, op.tensors)
        try:
            request, answer = road.take(len(image)), road.take(ANSWER_BYTES)
        except (ArenaFull, NotReady):
            return None
        request.view(len(image))[:] = image
        if world.plan.faults and order.random() < 0.03:
            op.deadline_s = order.choice((0.0001, 0.005))
        task = asyncio.ensure_future(self._call(road, op, request, len(image), answer))
        share = 0.12 if op.name in ("append", "prefill", "create_sequences") else 0.03
        if world.plan.faults and world.fault("caller cancels", share):
            after = order.choice((0.0, 1e-4, 0.003, 0.05))
            world.loop.call_later(after, self._cancel, op, task)
        try:
            reply = await asyncio.wait_for(task, PATIENCE_S)
            found = bytes(reply.image)
            code, fields, tensors = parse(reply.status, found)
            if op.reply is None:
                check(code != "ok", f"{op.name} was answered before the engine did so")
            else:
                check((code, found) == op.reply, f"the answer to {op.name} changed on its way")
            return code, fields, {name: value.copy() for name, value in tensors.items()}
        except asyncio.CancelledError:
            return None
        except TimeoutError:
            raise Wrong(f"{op.name}: no answer within {PATIENCE_S:g} s") from None
        except (NotReady, DeadlineExceeded):
            op.is_lost = True  # it may have arrived, and be answered
            return None
        finally:
            for slot in (request, answer):
                if slot.holds == 1:  # the engine does not use it any more
                    slot.view()[:] = bytes([SCRIBBLE]) * slot.size
                slot.free()

    async def _call(
        self, road: RoadCaller, op: Op, request: Slot, length: int, answer: Slot
    ) -> Answered:
        world, number = self.world, BY_NAME[op.name].number
        op.sent, op.faults = world.clock.now, len(world.faults)
        if not road.lost:
            op.session, op.number = self.pair, road.last_id + 1
            world.calls[op.session, op.number] = op
            world.model.outstanding.add(op)
            world.result.calls += 1
        deadline_us = int(op.deadline_s * 1e6)
        return await road.call(number, request, length, answer, deadline_us=deadline_us)

    def _cancel(self, op: Op, task: asyncio.Task[Any]) -> None:
        if not task.done():
            op.is_cancelled = True
            task.cancel()


class World:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.result = plan, Result(plan)
        self.order = random.Random(f"{plan.seed} world")
        order = self.order
        stalls = order.choice((0.0, 0.0002, 0.003)) if plan.faults else 0.0
        self.clock = Clock(random.Random(f"{plan.seed} clock"), stalls)
        self.faults: list[str] = []
        self.luck = random.Random(f"{plan.seed} faults")
        self.intensity = self.luck.choice((0.3, 1.0, 3.0))
        self.network = Network(self.clock, plan.seed, self.fault)
        self.geometry = PoolGeometry(2, order.choice((20, 40, 80)), 4, 1, 4, dtype="fp32")
        self.model = Model(self.geometry, self.faults)
        self.devices: dict[int, WorldDevice] = {}
        self.calls: dict[tuple[int, int], Op] = {}
        lines = [line_of(name, name, SCOPES) for name in SPACES]
        self.keys = "\n".join(lines).encode()
        self.settings = Settings(
            server=ServerSettings(live=False),
            engine=EngineSettings(slice_ms=order.choice((1e-5, 0.001, 0.05, 20.0))),
            cache=CacheSettings(
                high_watermark=order.choice((0.5, 0.9, 1.0)), events_history=order.choice((0, 64))
            ),
            auth=AuthSettings(keys_file="keys"),
        )
        selector = SimSelector(self.network, order, self.wait)
        self.loop = asyncio.SelectorEventLoop(selector)
        self.engine: EngineProcess
        self.callers: list[CallerProcess] = []
        self._digest = hashlib.sha256()

    def fault(self, name: str, share: float) -> bool:
        """Whether a fault happens now."""
        if not self.plan.faults or self.luck.random() >= share * self.intensity:
            return False
        self.faults.append(name)
        self.note(name)
        return True

    def device_fault(self, name: str, share: float) -> bool:
        """A driver that fails while kept rows move loses the pool, so it does not fail then."""
        if name in ("launch fails", "kernel fails") and any(
            op.fields.get("keep") for op in self.model.outstanding
        ):
            return False
        return self.fault(name, share)

    def note(self, text: str) -> None:
        line = f"{self.clock.now - 1000:.6f} {text}"
        self._digest.update(line.encode())
        self.result.trace.append(line)

    def fail(self, error: BaseException) -> None:
        """The first failure counts."""
        if self.result.error is None:
            self.result.error = f"{type(error).__name__}: {error}"
            self.note(f"FAILED {self.result.error}")
            if not isinstance(error, Wrong):
                logging.getLogger("world").error("", exc_info=error)

    # Time.

    def wait(self, timeout: float | None) -> None:
        """The callers' loop has nothing to do for `timeout` seconds: others run until then."""
        clock = self.clock
        if self.result.error is not None:
            raise Over
        check(clock.now < LONGEST_S, "the run does not end")
        if self.engine.is_over:
            self.engine = EngineProcess(self)
        if timeout is not None and timeout <= 0:
            if self.engine.next_due() <= clock.now and self.order.random() < 0.5:
                self.run_engine()
            return
        ends = float("inf") if timeout is None else clock.now + timeout
        while clock.now < ends:
            if self.result.error is not None:
                raise Over
            if self.loop_selector_ready():
                return
            due = self.engine.next_due()
            if due <= clock.now:
                self.run_engine()
                continue
            clock.advance(min(due, ends, self.network.next_due()))

    def loop_selector_ready(self) -> bool:
        selector: Any = self.loop._selector  # type: ignore[attr-defined]
        return bool(selector.is_ready())

    def run_engine(self) -> None:
        try:
            self.engine.round()
        except Exception as error:
            self.fail(error)

    # The engine's answers.

    def answered(self, call: Any, code: str, image: bytes) -> None:
        """The engine answers a call: the model does the same."""
        op = self.calls.pop((call.session.sock.pair, call.id), None)
        if op is None or self.engine.is_over or op not in self.model.outstanding:
            return
        for name in set(self.faults[op.faults :]):
            self.result.coverage[op.name, name] += 1
        self.result.coverage[op.name, code] += 1
        self._digest.update(image)
        text = json.dumps(op.fields, default=str)[:300]
        self.note(f"  {call.tenant.namespace} {op.name} {code} {text}")
        op.reply = code, image
        _, fields, tensors = parse(200 if code == "ok" else 400, image)
        try:
            self.model.apply(op, code, fields, tensors, self.clock.now)
        except Exception as error:
            self.fail(error)

    # The run.

    async def main(self) -> None:
        self.callers = [CallerProcess(self, number) for number in range(self.plan.callers)]
        tasks = [asyncio.create_task(one.run()) for one in self.callers]
        done, _ = await asyncio.wait(tasks)
        for task in done:
            if task.exception() is not None:
                self.fail(task.exception() or RuntimeError())
        if self.result.error is None:
            await self.settle()

    async def settle(self) -> None:
        """Faults end; what is left agrees with the model, and can all be given back."""
        self.plan = Plan(self.plan.seed, faults=False)
        self.engine.device.is_armed = False
        await asyncio.sleep(6.0)
        for caller in self.callers[:2]:
            for name in list(caller.space.sequences):
                for layer in range(self.geometry.num_layers):
                    await caller.program.send(
                        Op("gather", {"layer": layer, "sequences": [name], "dtype": "fp32"})
                    )
            await caller.program.send(Op("delete_sequences", {"prefix": ""}))
            for key in list(caller.space.pins):
                await caller.program.send(Op("unpin", {"page_key": key}))
            await caller.program.send(Op("evict", {"num_pages": self.geometry.num_pages}))
        for caller in self.callers:
            if caller.road is not None:
                caller.road.close()
        await asyncio.sleep(2.0)
        engine = self.engine.engine
        engine.store.tree.check_integrity()
        check(engine.store.tree.allocator.num_free == self.geometry.num_pages, "pages are missing")
        check(not engine.store.next_end < self.clock.now, "something expires late")
        check(not engine.scheduler.is_busy, "the engine is busy")
        check(not engine.callers.sessions, "sessions are left")
        check(not engine.store.tree.cache.num_leases, "leases are left")
        check(not engine.store.imports.count(None), "imports are left")
        left = [op.name for op in self.model.outstanding if not op.is_lost]
        check(not left, "calls wait", left)


def parse(status: int, image: bytes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """An answer's code ("ok" for none), fields and tensors."""
    if not image:
        return "ok", {}, {}
    document, start = read_header(image)
    if status >= 400:
        problem = json.loads(fields_text(document, PROBLEM))
        return problem["code"], problem, {}
    names = [name for name in document if name != "__metadata__"]
    room = len(image) - start
    layout = Layout({}, tuple(read_entry(name, document[name], room)[0] for name in names))
    return "ok", json.loads(fields_text(document, RESPONSE)), place(image, start, layout)


def run(plan: Plan) -> Result:
    """Run the world by a plan; equal plans give equal results."""
    world = World(plan)
    answer, send_problem, release = Session.answer, Session.fail, PageAllocator.release

    def answered(session: Any, call: Any, status: int, length: int, *rest: Any) -> None:
        world.answered(call, "ok", bytes(call.answer[:length]))
        answer(session, call, status, length, *rest)

    def failed(session: Any, call: Any, error: BaseException, *rest: Any, **named: Any) -> None:
        status, image = problem_image(error)
        world.answered(call, parse(status, image)[0], image)
        send_problem(session, call, error, *rest, **named)

    def released(allocator: Any, pages: Any) -> None:
        before = allocator.num_free
        release(allocator, pages)
        if (device := world.devices.get(id(allocator))) is not None:
            device.free(allocator._stack[before : allocator.num_free].copy())

    async def dial(_: str) -> SimSocket:
        return world.engine.listener.dial()

    gc.disable()
    log = logging.getLogger("attnd")
    before, log.disabled = log.disabled, True
    for name in ("attnd.engine", "attnd.keys", "attnd.watchdog"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with (
            virtual(world.clock, random.Random(f"{plan.seed} entropy")),
            replaced(
                (Session, "answer", answered),
                (Session, "fail", failed),
                (PageAllocator, "release", released),
                (caller_end, "connected", dial),
            ),
        ):
            began = world.clock.now
            world.engine = EngineProcess(world)
            try:
                world.loop.run_until_complete(world.main())
            except Over:
                for task in asyncio.all_tasks(world.loop):
                    vars_of: Any = task
                    vars_of._log_destroy_pending = False
            except Exception as error:
                world.fail(error)
            world.result.seconds = world.clock.now - began
    finally:
        world.loop.close()
        gc.enable()
        log.disabled = before
    world.result.faults = Counter(world.faults)
    world.result.digest = world._digest.hexdigest()[:16]
    return world.result
