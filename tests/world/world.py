"""The world of one engine: its real loop and both real ends of the road, by a seed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final
from zlib import crc32

from attnd.wire.images import PROBLEM, RESPONSE

from service.errors import DeadlineExceeded, NotReady
from service.image.json_body import fields_text, read_header
from service.image.reading import Layout, place, read_entry
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import ArenaFull, Slot
from service.road.engine_end.session import Session, problem_image
from tests.images import write_image
from tests.world.calls import Op, Sequences, Wrong, check
from tests.world.model import Model
from tests.world.network import SimSocket
from tests.world.programs import SHORT_S, Program
from tests.world.simulation import SPACES, EngineProcess, Plan, Simulation

ARENA_BYTES: Final = 2**18
ANSWER_BYTES: Final = 2**13
SCRIBBLE: Final = 0xA5
"""What a caller puts into slots that the engine must not use any more."""
ANSWER_S: Final = 60.0
"""Virtual time after which a call without an answer is a bug."""


class CallerProcess(Program):
    """A caller: its session, and the program that it runs. It reconnects for ever."""

    def __init__(self, world: World, number: int) -> None:
        model = world.model
        super().__init__(world, model.space(SPACES[number % 2]), model.rows, number)
        self.road: RoadCaller | None = None
        self.pair = 0
        self.connecting = asyncio.Lock()

    def held(self) -> Sequences:
        return self.space.sequences

    def sweep(self) -> Op:
        return Op("delete_sequences", {"prefix": self.order.choice(("s0", "s1", "s", "none"))})

    def extended(self, new: dict[str, Any]) -> dict[str, Any]:
        ttl = {"ttl_s": self.order.choice(SHORT_S)} if self.order.random() < 0.12 else {}
        return new | ttl

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

    def strike(self) -> None:
        world = self.world
        if self.road is not None and world.fault("caller dies", 0.01):
            sock: Any = self.road.sock
            sock.kill()
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
            reply = await asyncio.wait_for(task, ANSWER_S)
            found = bytes(reply.image)
            code, fields, tensors = parse(reply.status, found)
            if op.reply is None:
                check(code != "ok", f"{op.name} was answered before the engine did so")
            else:
                check((code, found) == op.reply, f"the answer to {op.name} changed on its way")
            return code, fields, {name: value.copy() for name, value in tensors.items()}
        except TimeoutError:
            raise Wrong(f"{op.name}: no answer within {ANSWER_S:g} s") from None
        except (asyncio.CancelledError, NotReady, DeadlineExceeded):
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


class World(Simulation):
    """One run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.model = Model(self.geometry, self.faults)
        self.calls: dict[tuple[int, int], Op] = {}
        self.callers: list[CallerProcess] = []
        self.spaces = [self.model.space(name) for name in SPACES]

    @property
    def engine(self) -> EngineProcess:
        return self.engines["engine"]

    def begin(self) -> None:
        self.engines["engine"] = EngineProcess(self)

    def ended(self, engine: EngineProcess) -> None:
        self.model.clear()

    async def dial(self, path: str) -> SimSocket:
        return self.engine.listener.dial()

    def patches(self) -> Iterable[tuple[Any, str, Any]]:
        answer, send_problem = Session.answer, Session.fail

        def answered(session: Any, call: Any, status: int, length: int, *rest: Any) -> None:
            self.answered(call, "ok", bytes(call.answer[:length]))
            answer(session, call, status, length, *rest)

        def failed(session: Any, call: Any, error: BaseException, *rest: Any, **named: Any) -> None:
            status, image = problem_image(error)
            self.answered(call, parse(status, image)[0], image)
            send_problem(session, call, error, *rest, **named)

        more = [(Session, "answer", answered), (Session, "fail", failed)]
        return [*super().patches(), *more]

    def wait(self, timeout: float | None) -> None:
        if self.engine.is_over:
            self.begin()
        super().wait(timeout)

    def device_fault(self, name: str, share: float) -> bool:
        """A driver that fails while kept rows move loses the pool, so it does not fail then."""
        if name in ("launch fails", "kernel fails") and any(
            op.fields.get("keep") for op in self.model.outstanding
        ):
            return False
        return self.fault(name, share)

    # The engine's answers.

    def answered(self, call: Any, code: str, image: bytes) -> None:
        """The engine answers a call: the model does the same."""
        op = self.calls.pop((call.session.sock.pair, call.id), None)
        if op is None or self.engine.is_over or op not in self.model.outstanding:
            return
        self.count(op, code)
        text, seen = json.dumps(op.fields, default=str)[:300], crc32(image)
        self.note(f"  {call.tenant.namespace} {op.name} {code} {seen:08x} {text}")
        op.reply = code, image
        _, fields, tensors = parse(200 if code == "ok" else 400, image)
        try:
            self.model.apply(op, code, fields, tensors, self.clock.now)
        except Exception as error:
            self.fail(error)

    # The run.

    async def main(self) -> None:
        self.callers = [CallerProcess(self, number) for number in range(self.plan.callers)]
        await asyncio.gather(*(one.run() for one in self.callers))
        if self.result.error is None:
            await self.settle()

    async def settle(self) -> None:
        """Faults end; what is left agrees with the model, and can all be given back."""
        self.end_faults()
        await asyncio.sleep(6.0)
        for caller in self.callers[:2]:
            for name in list(caller.space.sequences):
                await caller.gather_all(name)
            await caller.send(Op("delete_sequences", {"prefix": ""}))
            for key in list(caller.space.pins):
                await caller.send(Op("unpin", {"page_key": key}))
            await caller.send(Op("evict", {"num_pages": self.geometry.num_pages}))
        live = set[int]()
        for caller in self.callers:
            if caller.road is not None and not caller.road.lost:
                live.add(caller.pair)
                caller.road.close()
        await asyncio.sleep(2.0)
        engine = self.engine.engine
        self.engine.check_empty()
        check(not engine.store.next_end < self.clock.now, "something expires late")
        check(not engine.callers.sessions, "sessions are left")
        left = [op.name for op in self.model.outstanding if op.session in live]
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
