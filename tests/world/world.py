"""The world of one engine: its real loop and both real ends of the road, by a seed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from math import inf
from random import Random
from typing import Any, Final
from zlib import crc32

import numpy as np
from attnd.wire import frames as f
from attnd.wire.images import PROBLEM, RESPONSE

from config.settings import ServerSettings
from service.errors import DeadlineExceeded, NotReady, Unauthorized
from service.operations.step import ALIGNMENT
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered, Pending, RoadCaller
from service.road.caller_end.slots import ArenaFull
from service.road.engine_end.session import Session, problem_image
from tests.images import read_image, write_image
from tests.world.network import NEVER, Replaced, SimSocket
from tests.world.oracle.calls import SPACES, Answer, Op, Wrong, call, check
from tests.world.oracle.followers import Follower
from tests.world.oracle.model import Model
from tests.world.programs import Program
from tests.world.simulation import EngineProcess, Plan, Simulation, keys_of

ARENA_BYTES: Final = 2**18
ANSWER_BYTES: Final = 2**13
STEP_BYTES: Final = 2**13  # of a step's tensors
SCRIBBLE: Final = 0xA5  # what a caller puts into slots that the engine must not use any more
ANSWER_S: Final = 60.0  # virtual time after which a call without an answer is a bug


class StepCaller(RoadCaller):
    """A caller with a lane for steps, in its arena."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.opening: list[asyncio.Future[None]] = []  # requests for the lane without a reply

    def on_message(self, kind: int, payload: bytes) -> None:
        if kind == f.DEVICE_ARENA:
            self.opening.pop(0).set_result(None)
        elif kind not in (f.OPENED, f.DONE):
            super().on_message(kind, payload)

    def lose(self, reason: str) -> None:
        super().lose(reason)
        for lane in self.opening:
            lane.cancel()
        self.opening = []

    async def open_lane(self) -> None:
        """A lane without flags of an aborted step."""
        self.send(f.json_frame(f.DEVICE, {"arena_bytes": ARENA_BYTES}))
        self.opening.append(self.loop.create_future())
        await asyncio.shield(self.opening[-1])

    async def step(self, op: Op, order: Random, *slots: Any) -> Answered:
        """A step whose layers become ready one after another, some of them never."""
        self.last_id = number = self.last_id + 1
        future: asyncio.Future[Answered] = self.loop.create_future()
        for slot in slots:
            slot.holds += 1
        self.pending[number] = Pending(future, *slots, inf)
        description = f.dump_json(op.fields).encode()
        self.send(f.step_frame(number, int(op.deadline_s * 1e6), f.NO_REQUEST_ID, description))
        try:
            if op.plan is not None:
                flat = np.concatenate([mask.reshape(-1) for mask in op.plan])
                np.ndarray(flat.shape, bool, self.mapping.memory, op.fields["mask"])[:] = flat
            for at, (layer, places) in enumerate(zip(op.layers, op.fields["slots"], strict=True)):
                if order.random() < 0.5:
                    await asyncio.sleep(order.choice((0.0, 1e-4, 0.003, 0.1)))
                if order.random() < 0.04 or future.done():
                    break
                for name, arrays in op.tensors.items():
                    view_at(self.mapping.memory, places[name], arrays[at].shape)[...] = arrays[at]
                self.send(f.layer_frame(f.READY, number, layer))
            return await future
        except asyncio.CancelledError:
            if number in self.pending:
                with suppress(NotReady):
                    self.send(f.cancel_frame(number))
            raise


def view_at(memory: Any, offset: int, shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, np.float32, memory, offset)


def lay_step(op: Op, begin: int) -> int:
    """Gives a step's tensors places in an arena from an offset on; their end."""
    at, slots = -(-begin // ALIGNMENT) * ALIGNMENT, list[dict[str, int]]()
    for q, k in zip(op.tensors["q"], op.tensors["k"], strict=True):
        sizes = {"q": q.nbytes, "k": k.nbytes, "v": k.nbytes, "o": q.nbytes, "lse": q.nbytes}
        places = {}
        for name, size in sizes.items():
            places[name], at = at, at + max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        slots.append(places)
    op.fields["slots"], op.fields["flags"] = slots, at
    if op.plan is not None:
        op.fields["mask"] = at = at + ALIGNMENT
    return at + ALIGNMENT


class CallerProcess(Program):
    """A caller: its session, and the program that it runs. It reconnects for ever."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.road: Any = None
        self.connecting, self.stepping = asyncio.Lock(), asyncio.Lock()

    async def connected(self) -> Any:
        async with self.connecting:
            while self.road is None or self.road.lost:
                with suppress(OSError, NotReady, Unauthorized):
                    self.road = await StepCaller.connect("world", ARENA_BYTES, key=self.space.name)
                    break
                await asyncio.sleep(0.05)
            return self.road

    async def send(self, op: Op) -> Answer | None:
        """The answer of a call, which is what the engine answered."""
        world, order = self.world, self.order
        op.space = self.space
        road = await self.connected()
        is_step = op.name == "step"
        image = bytes(STEP_BYTES) if is_step else write_image(op.fields, op.tensors)
        try:
            request, answer = road.take(len(image)), road.take(ANSWER_BYTES)
        except (ArenaFull, NotReady):
            return None
        request.view(len(image))[:] = image
        if is_step:
            lay_step(op, request.offset)
            op.deadline_s = order.choice((0.05, 1.0))
        if world.plan.faults and order.random() < 0.03:
            op.deadline_s = order.choice((0.0001, 0.005))

        async def called() -> Answered:
            if is_step:
                async with self.stepping:
                    await road.open_lane()
                    note()
                    return await road.step(op, order, request, answer)
            note()
            number, deadline_us = BY_NAME[op.name].number, int(op.deadline_s * 1e6)
            return await road.call(number, request, len(image), answer, deadline_us=deadline_us)

        def note() -> None:
            op.sent, op.faults = world.clock.now, len(world.faults)
            if not road.lost:
                op.session, op.number = road.sock.pair, road.last_id + 1
                world.calls[op.session, op.number] = op
                world.model.outstanding.add(op)
                world.result.calls += 1

        def cancel() -> None:
            op.is_cancelled = op.is_cancelled or not task.done()
            task.cancel()

        task = asyncio.ensure_future(called())
        share = 0.12 if op.name in ("append", "prefill", "create_sequences", "step") else 0.03
        if world.fault("caller cancels", share):
            world.loop.call_later(order.choice((0.0, 1e-4, 0.003, 0.05)), cancel)
        try:
            reply = await asyncio.wait_for(task, ANSWER_S)
            found = reply.status, bytes(reply.image)
            check(op.reply or found[0] >= 400, f"{op.name} has an answer before the engine's")
            check(op.reply in (None, found), f"the answer to {op.name} changed on its way")
            return op.answer
        except TimeoutError:
            raise Wrong(f"{op.name}: no answer within {ANSWER_S:g} s") from None
        except (asyncio.CancelledError, NotReady, DeadlineExceeded):
            return None
        finally:
            for slot in (request, answer):
                if slot.holds == 1:  # the engine does not use it any more
                    slot.view()[:] = bytes([SCRIBBLE]) * slot.size
                slot.free()


class EventReader:
    """Reads a namespace's events on a session of its own, and reconnects for ever."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.road: Any = None
        self.follower = Follower(name, world.plan.seed, self.ask)

    async def ask(self, after: int) -> dict[str, Any] | None:
        with suppress(OSError, NotReady, Unauthorized, DeadlineExceeded, ArenaFull, TimeoutError):
            if self.road is None or self.road.lost:
                self.road = await RoadCaller.connect("world", ARENA_BYTES, key=self.name)
            image = write_image({"after": after, "limit": 5}, {})
            request, answer = self.road.take(len(image)), self.road.take(2**16)
            try:
                request.view(len(image))[:] = image
                number = BY_NAME["events"].number
                calling = self.road.call(number, request, len(image), answer)
                reply = await asyncio.wait_for(calling, ANSWER_S)
                return None if reply.status >= 400 else read_image(reply.image, RESPONSE).fields
            finally:
                request.free()
                answer.free()
        return None


class World(Simulation):
    """One run."""

    has_tiers = True
    server = ServerSettings()  # with snapshots

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.model = Model(self.geometry, self.clock, self.faults, self.tiers)
        self.rows, self.spaces = self.model.rows, list(self.model.spaces.values())
        self.calls: dict[tuple[int, int], Op] = {}
        self.routers = [EventReader(self, space.name) for space in self.spaces]

    def begin(self) -> None:
        self.engine = self.engines["engine"] = EngineProcess(self)
        self.model.begin(self.engine.engine.store)
        for router in self.routers:
            router.follower.watch(self.engine.engine.store)

    def ended(self, engine: EngineProcess) -> None:
        self.model.clear(is_graceful=engine.how == "end" and not engine.device.is_lost)

    async def dial(self, path: str) -> SimSocket:
        return self.engine.listener.dial()

    def patches(self) -> list[Replaced]:
        answer, fail = Session.answer, Session.fail

        def answered(session: Any, call: Any, status: int, length: int, *rest: Any) -> None:
            self.answered(call, status, bytes(call.answer[:length]))
            answer(session, call, status, length, *rest)

        def failed(session: Any, call: Any, error: BaseException, *rest: Any, **named: Any) -> None:
            self.answered(call, *problem_image(error))
            fail(session, call, error, *rest, **named)

        return [*super().patches(), (Session, "answer", answered), (Session, "fail", failed)]

    def after_round(self) -> None:
        self.model.look_at_pins()
        is_read = len(self.keys) < len(keys_of(SPACES)) and not self.engine.engine._must_read_keys
        if is_read and self.revoked_at == NEVER and self.engine.keys == self.keys:
            self.revoked_at = self.clock.now
            self.faults.append("a key is revoked")  # the engine ends its sessions now

    def wait(self, timeout: float | None) -> None:
        if self.engine.is_over:
            self.begin()
        super().wait(timeout)

    def strike(self, caller: CallerProcess) -> None:
        """What may happen to processes before a statement."""
        process, road = self.engine, getattr(caller, "road", None)
        if road is not None and self.fault("caller dies", 0.01):
            road.sock.kill()
            road.lose("it died")
        elif process.is_over:
            return
        elif self.fault("engine dies", 0.002):
            process.kill()
        elif self.tiers.has_disk and self.fault("power is lost", 0.002):
            process.kill("power loss")
        elif self.tiers.has_disk and self.fault("disk dies", 0.01):
            self.tiers.files.is_dead = True
        elif self.fault("engine drains", 0.002):
            self.model.is_draining = True
            process.engine.drain()
        elif self.fault("key file breaks", 0.005):
            process.keys = b"unreadable"
            process.engine.read_keys_again()
            self.loop.call_later(0.5, self.restore_keys)  # what it held was perhaps not read yet
        elif self.fault("a key is revoked", 0.004):
            self.revoke(caller.space.name)
        elif self.fault("device lost", 0.001):
            self.model.is_draining = process.device.is_lost = True

    def reread(self) -> None:
        self.engine.keys = self.keys
        if not self.engine.is_over:
            self.engine.engine.read_keys_again()

    def device_fault(self, name: str, share: float) -> bool:
        """A driver that fails while kept rows move loses the pool, so it does not fail then."""
        moving = any(op.fields.get("keep") for op in self.model.outstanding)
        is_fatal = moving and name in ("launch fails", "kernel fails")
        return not is_fatal and self.fault(name, share)

    def answered(self, call: Any, status: int, image: bytes) -> None:
        """The engine answers a call: the model does the same."""
        op = self.calls.pop((call.session.sock.pair, call.id), None)
        if op is None or self.engine.is_over or op not in self.model.outstanding:
            return
        code, *answer = parse(status, image)
        if op.name == "step" and code == "ok":
            answer[1] = results_of(op, call.session.arena.memory)
        self.count(op.name, code, op.faults)
        is_revoked = op.space.name == self.revoked and op.sent > self.revoked_at
        check(not is_revoked, f"{op.name} was answered to a key that was revoked before it")
        text, seen = json.dumps(op.fields, default=str)[:300], crc32(image)
        self.note(f"  {call.tenant.namespace} {op.name} {code} {seen:08x} {text}")
        op.reply = status, image
        try:
            self.model.apply(op, code, *answer)
        except Exception as error:
            self.fail(error)

    async def main(self) -> None:
        """Faults end; what is left agrees with the model, and can all be given back."""
        callers = [CallerProcess(self, number) for number in range(self.plan.callers)]
        following = [self.loop.create_task(one.follower.run()) for one in self.routers]
        await asyncio.gather(*(one.run() for one in callers))
        self.end_faults()
        self.restore_keys()
        await asyncio.sleep(6.0)
        for router in self.routers:
            router.follower.is_over = True
        await asyncio.gather(*following)
        for caller in callers[:2]:
            for name in list(caller.space.held):
                await caller.gather_all(name)
            await caller.send(call("delete_sequences", prefix=""))
            for key in list(caller.space.pins):
                await caller.send(call("unpin", page_key=key))
            await caller.send(call("evict", num_pages=self.geometry.num_pages))
        await asyncio.sleep(1.0)
        for router in self.routers:
            await router.follower.read_all()
            router.road.close()
        roads = [one.road for one in callers if one.road is not None and not one.road.lost]
        live = {road.sock.pair for road in roads}
        for road in roads:
            road.close()
        await asyncio.sleep(2.0)
        engine = self.engine.engine
        self.engine.check_empty()
        check(not engine.store.next_end < self.clock.now, "something expires late")
        check(not engine.callers.sessions, "sessions are left")
        left = [op.name for op in self.model.outstanding if op.session in live]
        check(not left, "calls wait", left)


def results_of(op: Op, memory: Any) -> dict[str, Any]:
    """o and lse of a step's layers, in the arena."""
    both = list(zip(op.fields["slots"], op.tensors["q"], strict=True))
    return {
        "o": [view_at(memory, at["o"], q.shape).copy() for at, q in both],
        "lse": [view_at(memory, at["lse"], q.shape[:2]).copy() for at, q in both],
    }


def parse(status: int, image: bytes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """An answer's code ("ok" for none), fields and tensors."""
    if not image:
        return "ok", {}, {}
    found = read_image(image, PROBLEM if status >= 400 else RESPONSE)
    return found.fields["code"] if status >= 400 else "ok", found.fields, found.tensors
