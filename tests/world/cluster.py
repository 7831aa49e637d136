"""The cluster's world: engines, doors with routers, and callers, in one thread, by a seed.

Engines die, stall, drain and restart; doors are killed. Callers of a namespace share ids. What they
see must be linearizable, and at the end nothing but what they made may be left.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import sys
from collections.abc import Iterable, Sequence, Set
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from attnd import AsyncClient
from attnd.http import async_transport

from config.settings import ServerSettings
from service.cluster.membership import members
from service.cluster.membership.members import POLL_S
from service.cluster.membership.members_file import MemberEntry
from service.cluster.routing.router import Router
from service.doors.http.door import Door
from service.doors.http.protocol.connection import Connection
from service.doors.kit import problems
from service.doors.kit.problems import ProblemText, document_of
from service.engine.store.moves import HIDDEN
from service.errors import AttndError
from service.operations.table import BY_NAME
from service.tenants import OPEN, SCOPES, Tenant, tenant_of
from tests.images import write_image
from tests.world.calls import NOT_NOW, Op, Outcome, Rows, Sequences, Step, check
from tests.world.clients import HttpLoop, SimPoll, call_with, client_of, http_door, serve
from tests.world.history import FOREVER, Effect, History
from tests.world.model import Namespace
from tests.world.network import SimSocket
from tests.world.programs import Program
from tests.world.simulation import LONGEST_S, SPACES, EngineProcess, Plan, Simulation
from tests.world.world import parse

SECRET: Final = "a secret of the cluster's world"
UNCERTAIN_S: Final = 20.0
"""For how long a call whose answer was lost may take effect: the engines' deadline, and a door's
grace."""
REFUSALS: Final = frozenset({"sequence_moving", "not_ready", "overloaded", "out_of_pages"})
"""Errors that may come at any time while engines come and go; the call has changed nothing."""
CHANGING: Final = ("truncate", "delete_sequence", "delete_sequences")
LOST: Final = ("lost", "deadline_exceeded", "cancelled")
SETTLED_S: Final = 75.0
"""After which nothing of a dead door is left: its copies live for 30 s."""
IDLE_POLL_S: Final = 2.0
"""Between two polls meanwhile: most turns of a run were those of polls."""
DOOR: Final[contextvars.ContextVar[DoorProcess]] = contextvars.ContextVar("DOOR")


class DoorProcess:
    """A door's router, and the connections that it makes."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world, self.name = world, name
        self.context = contextvars.copy_context()
        self.context.run(DOOR.set, self)
        self.sockets: list[SimSocket] = []
        self.calls: dict[asyncio.Task[Any], None] = {}
        self.is_dead = False
        self.http: Door | None = None
        if world.has_http:
            self.http = self.context.run(http_door, world.settings, lambda _: world.keys)
        make = partial(Router, world.settings.server, world.has_keys)
        self.router: Any = self.http.link if self.http is not None else self.context.run(make)
        known = self.router.members
        known.door, known.secret = name, SECRET
        entries = [MemberEntry(one, one) for one in world.names]
        self.context.run(known.update, entries)

    def kill(self) -> None:
        """kill -9: nothing that it does afterwards reaches an engine."""
        self.is_dead = True
        for sock in self.sockets:
            if not sock.is_closed:
                sock.kill()
        for task in list(self.calls):
            task.cancel()
        if self.http is not None:
            self.http.sweeping.cancel()
        self.context.run(self.router.close)

    def start(self, *call: Any) -> asyncio.Task[Any]:
        """A call that ends with this door."""
        task = self.world.loop.create_task(self.call(*call), context=self.context)
        self.calls[task] = None
        task.add_done_callback(self.calls.pop)
        return task

    async def call(self, name: str, fields: Any, arrays: Any, tenant: Tenant) -> Any:
        """Code ("ok" for none), fields or problem, tensors."""
        router = self.router
        try:
            request = write_image(fields, arrays)
            slot, length = router.arena.lay([request])
            try:
                answered, answer = await router.call(
                    BY_NAME[name], slot, length, 2**17, 0, b"", tenant
                )
            finally:
                router.arena.give_back(slot)
        except (AttndError, ProblemText) as error:
            document = document_of(error, b"")
            return document["code"], document, {}
        found = parse(answered.status, bytes(answered.image))
        router.arena.give_back(answer)
        return found


class ClusterCaller(Program):
    """Runs statements at one door after another, and reports to the namespace's history."""

    world_number = 1

    def __init__(self, world: ClusterWorld, number: int) -> None:
        name = SPACES[number % len(SPACES)] if world.has_keys else "default"
        self.history = world.histories[name]
        super().__init__(world, world.spaces[number % len(world.spaces)], world.rows, number)
        self.tenant = tenant_of(name, SCOPES) if world.has_keys else OPEN
        self.clients: dict[str, AsyncClient] = {}
        self.imports: dict[str, Effect] = {}
        """Imports under way, by the ids that they make."""

    def held(self) -> Sequences:
        return self.history.held()

    def is_certain(self, name: str) -> bool:
        return name in self.own and self.history.is_certain(name)

    def sweep(self) -> Op:
        return Op("delete_sequences", {"ids": sorted(set(self.order.choices(self.names, k=3)))})

    def extended(self, new: dict[str, Any]) -> dict[str, Any]:
        draw = self.order.random()
        if draw < 0.2 and new.keys() == {"id"}:
            return {} if draw < 0.1 else new | {"ranks": 2}
        return new

    async def statement(self, name: str) -> None:
        await super().statement(name)
        for effect in self.imports.values():
            self.history.lost(effect, UNCERTAIN_S)
        self.imports = {}
        if self.order.random() < 0.7:
            await self.resolve()

    async def resolve(self) -> None:
        """Looks what has become of calls without an answer: else all that may have is kept."""
        names = {
            name
            for one in self.history.pending.values()
            if one.ends < FOREVER and not one.text.startswith("loss")
            for name in one.names
        }
        for name in sorted(names - self.world.abandoned)[:3]:
            await self.send(Op("get_sequence", {"id": name}))

    def strike(self) -> None:
        self.world.strike()

    # Calls.

    async def send(self, op: Op) -> Any:
        """Code, fields, tensors; the code is `lost` where no answer came."""
        world = self.world
        op.faults, effects = len(world.faults), self._effects(op)
        world.result.calls += 1
        code, found, tensors = answer = await self._call(op)
        shown = {one: found[one] for one in ("detail", "done", "lengths") if one in found}
        world.count(op, code)
        world.note(f"  {self.number} {op.name} {op.fields} {code} {shown}")
        if code == "ok":
            op.answer = found, tensors
            for effect in effects:
                effect.names = frozenset(effect.step.names)
        if op.name == "match_prefix" and code == "ok" and found["lease"] is not None:
            self.space.leases[found["lease"]["id"]] = [], 0.0, 0.0
        elif op.name == "import_sequence":
            name, is_done = op.fields["id"], found.get("state") == "done"
            if name in self.imports and (is_done or code == "sequence_exists"):
                self.settle([self.imports.pop(name)], answer)
        elif op.name == "delete_sequences" and code != "ok":
            self.settle(effects, ("lost", {}, {}))  # each is there or is not
        else:
            self.settle(effects, answer)
        if code == "ok" and op.name == "export_sequence":
            op.seen = self.held()[op.ids[0]].rows
        if code in LOST and op.plan and op.new:
            world.abandoned.add(op.made[0])  # how many rows it has is not known
            self.own = tuple(f"{one}{self.number}" for one in self.own)
        if code in REFUSALS:
            await asyncio.sleep(self.order.choice((0.02, 0.3, 1.0)))
        return answer

    def _effects(self, op: Op) -> list[Effect]:
        if op.name == "import_sequence" and "header" not in op.fields:
            return []  # one effect from the beginning to the end
        is_read = not (op.made or op.rows or op.name in CHANGING)
        # the router deletes until nothing is left; the client sends a lost truncation again
        repeats = op.name == "delete_sequences" or (op.name == "truncate" and self.world.has_http)
        effects = [
            self.history.begin(
                step.text,
                step.names,
                step.apply,
                is_read=is_read,
                makes=step.name if op.made else "",
                repeats=repeats,
                step=step,
            )
            for step in op.steps
        ]
        if op.name == "import_sequence":
            (self.imports[op.fields["id"]],) = effects
        return effects

    async def _call(self, op: Op) -> Any:
        world, door = self.world, await self.world.door(self.number)
        if world.has_http:
            key = self.space.name if world.has_keys else ""
            client = self.clients.setdefault(door.name, client_of(door.name, key))
            task = world.loop.create_task(call_with(client, op.name, op.fields, op.tensors))
        else:
            task = door.start(op.name, op.fields, op.tensors, self.tenant)
        if world.plan.faults and self.order.random() < 0.03 and world.fault("caller cancels", 1.0):
            world.loop.call_later(self.order.choice((0.0, 1e-4, 0.003)), task.cancel)
        done, _ = await asyncio.wait([task], timeout=60.0)
        check(done, f"{op.name}: no answer", op.fields)
        if task.cancelled() or (door.is_dead and not world.has_http):
            task.cancelled() or task.exception()
            return "lost", {}, {}
        return task.result()

    def _may_exist(self, effect: Effect) -> bool:
        """Whether another call makes it, or a door has died while it moved one of the id: its
        import lasts for some seconds."""
        stores = [one.engine.store for one in self.world.engines.values()]
        name = self.tenant.prefix + effect.makes
        return (
            self.history.is_contended(effect)
            or effect.makes in self.world.abandoned
            or any(store.imports.find(name) for store in stores)
        )

    def _is_being_made(self, names: Set[str]) -> bool:
        """Whether a call that has no answer yet makes one of them from cached pages."""
        making = [one for one in self.history.pending.values() if one.makes in names]
        return any(one.step.op.new and one.step.op.plan for one in making)

    def settle(self, effects: Sequence[Effect], answer: Any) -> None:
        """What an answer says of each effect."""
        code, found, _ = answer
        text = f"{code} {found if code != 'ok' else ''}"
        listed = found.get("sequences") or found.get("lengths") or {str(found.get("value"))}
        every = {name for effect in effects for name in effect.names}
        named = set() if code == "ok" else every & set(listed)
        for effect in effects:
            own, step = f"{effect.text}: {text}", effect.step

            def is_right(seen: Outcome, step: Step = step) -> bool:
                right = code != "ok" or len(seen) < 2 or step.is_right(seen[1], self.rows)
                return seen[0] == "ok" and right

            if effect.is_read and code == "ok" and self._is_being_made(effect.names):
                self.history.refused(effect, own)  # how many rows it has comes with that answer
            elif code == "ok" or effect.names & set(found.get("done", ())):
                self.history.answered(effect, is_right, own)
            elif code in LOST:
                self.history.lost(effect, UNCERTAIN_S)
            elif code in REFUSALS | {"length_mismatch", "sequence_changed"} or (
                code == "internal" and self.world.has_broken()
            ):
                self.history.refused(effect, own)
                check(not self.world.is_settled, "refused after all faults ended:", own)
            elif (
                (named and not effect.names & named)
                or found.get("field") in ("layers", "q", "sequences")
                or (code == "sequence_exists" and self._may_exist(effect))
            ):
                self.history.refused(effect, own)
            else:
                wanted = "unknown_sequence" if code == "lost_sequence" else code
                self.history.answered(effect, lambda seen, wanted=wanted: wanted in seen, own)


class ClusterWorld(Simulation):
    """One run."""

    server = ServerSettings(
        live=False,
        allowed_hosts=("door-0", "door-1"),
        deadline_s=5.0,
        max_body_bytes=2**17,
        max_json_bytes=2**17,
        max_answer_bytes=2**17,
        max_inflight_bytes=2**21,
    )

    def __init__(self, plan: Plan) -> None:
        luck = random.Random(f"{plan.seed} kind")
        self.has_keys, self.has_http = luck.random() < 0.5, luck.random() < 0.4
        self.drained_share = luck.choice((0.015, 0.08))
        super().__init__(plan)
        spaces = SPACES if self.has_keys else ("default",)
        self.rows = Rows(self.geometry)
        self.spaces = [Namespace(name) for name in spaces]
        self.histories = {space: History(lambda: self.clock.now) for space in spaces}
        self.doors: dict[str, DoorProcess] = {}
        self.is_settled = False
        self.abandoned: set[str] = set()
        """Sequences whose rows are not known, since an answer was lost."""
        self.names = [f"engine-{number}" for number in range(self.order.choice((2, 3, 3)))]
        self.drains: dict[str, float] = {}
        """Engines that are being drained, and since when."""

    def begin(self) -> None:
        for name in self.names:
            self.engines[name] = EngineProcess(self, SECRET)

    async def dial(self, path: str) -> SimSocket:
        door = DOOR.get()
        if door.is_dead:
            raise ConnectionRefusedError(111, "this door is dead")
        sock = self.engines[path].listener.dial()
        door.sockets.append(sock)
        return sock

    def dial_http(self, host: str) -> SimSocket:
        """A client's connection to a door."""
        door = self.doors[host]
        if door.is_dead or door.http is None:
            raise ConnectionRefusedError(111, "this door is dead")
        here, there = self.network.pair()
        door.sockets.append(there)
        door.context.run(serve, door.http, self.loop, there)
        return here

    def patches(self) -> Iterable[tuple[Any, str, Any]]:
        select = SimpleNamespace(POLLIN=1, poll=lambda: SimPoll(self.network))
        poll = (members, "POLL_S", POLL_S)
        by_pair = (Connection, "__hash__", lambda one: hash(one.peer))
        bugs = [(members.LOG, "exception", self.logged), (problems.LOG, "error", self.logged)]
        return [*super().patches(), *bugs, (async_transport, "select", select), by_pair, poll]

    def logged(self, *_: Any, exc_info: Any = None, **__: Any) -> None:
        """Routers and doors log the traceback of a bug, and go on. A killed one has no arena."""
        if not DOOR.get().is_dead:
            self.fail(exc_info or sys.exc_info()[1])

    def make_loop(self) -> asyncio.SelectorEventLoop:
        loop = HttpLoop(self.selector)
        loop.dial_http = self.dial_http
        return loop

    async def door(self, number: int) -> DoorProcess:
        """The door of a caller, which is started again where it has died."""
        name = f"door-{number // 2 % 2}"
        while self.doors[name].is_dead and not self.has_http:
            await asyncio.sleep(0.05)
        return self.doors[name]

    def ended(self, engine: EngineProcess) -> None:
        """Its sequences may be lost; those that move may be at another one."""
        self.note(f"  at its end: {[leaf.id for leaf in engine.engine.store.tree.books]}")
        for leaf in engine.engine.store.tree.books:
            space, _, name = leaf.id.rpartition("/")
            if leaf.id.startswith(HIDDEN):
                continue
            history = self.histories[space or "default"]
            if leaf.shard is not None:  # the others stay where no door knows them
                self.abandoned.add(name)

            def apply(there: Sequences, number: int, name: str = name) -> Outcome:
                if name not in there or there[name].made > number:
                    return NOT_NOW
                del there[name]
                return ("ok",)

            history.lost(history.begin(f"loss of {name}", [name], apply), LONGEST_S)

    def fail(self, error: BaseException) -> None:
        for name, process in self.engines.items():
            books = process.engine.store.tree.books
            self.note(f"{name} has {[leaf.id for leaf in books]}")
        super().fail(error)

    def has_broken(self) -> bool:
        """Whether a device's fault explains an internal error."""
        return bool({"kernel fails", "launch fails"} & set(self.faults))

    # Faults.

    def strike(self) -> None:
        """What may happen to processes before a statement."""
        order = self.order
        name, door = order.choice(self.names), order.choice(list(self.doors))
        engine, after = self.engines[name], order.choice((0.01, 0.3, 1.0, 4.0))
        if engine.is_over:
            return
        if self.fault("engine dies", 0.004):
            engine.kill()
            self.loop.call_later(after, self.restart, name)
        elif not self.doors[door].is_dead and self.fault("door dies", 0.01):
            self.doors[door].kill()
            self.loop.call_later(after, self.open, door)
        elif self.fault("engine stalls long", 0.004):
            engine.stalled_until = self.clock.now + order.choice((0.5, 4.0, 9.0))
        elif self.fault("engine is emptied", self.drained_share):
            self.loop.create_task(self.drain(name, door, stop=False))
        elif name in self.drains and self.fault("emptying ends", 4 * self.drained_share):
            self.loop.create_task(self.drain(name, door, stop=True))

    def restart(self, name: str) -> None:
        if self.engines[name].is_over:
            self.engines[name] = EngineProcess(self, SECRET)
            self.drains.pop(name, None)

    def open(self, name: str) -> None:
        self.doors[name] = DoorProcess(self, name)

    async def drain(self, name: str, door: str, *, stop: bool) -> str:
        """Has a door empty an engine, or end that."""
        process = self.doors[door]
        if process.is_dead:
            return "lost"
        fields = {"name": name, "stop": stop}
        task = process.start("drain_engine", fields, {}, process.router.members.tenant)
        await asyncio.wait([task])
        code = "lost" if task.cancelled() else str(task.result()[0])
        self.note(f"  drain {name} by {door}, stop {stop}: {code}")
        if code == "ok" and stop:
            self.drains.pop(name, None)
        elif code == "ok":
            self.drains.setdefault(name, self.clock.now)
        return code

    # The run.

    async def main(self) -> None:
        for number in range(2):
            self.open(f"door-{number}")
        for door in self.doors.values():
            while len(door.router.members.engines) < len(self.names):
                await asyncio.sleep(0.01)
        callers = [ClusterCaller(self, number) for number in range(self.plan.callers)]
        await asyncio.gather(*(one.run() for one in callers))
        if self.result.error is None:
            await self.settle(callers)

    async def settle(self, callers: list[ClusterCaller]) -> None:
        """Faults end; then every sequence is in one place, nothing else is left, and all can be
        given back."""
        self.end_faults()
        for name in self.names:
            self.restart(name)
        await asyncio.sleep(5.0)
        await self.drained()
        members.POLL_S = IDLE_POLL_S
        await asyncio.sleep(SETTLED_S)
        members.POLL_S = POLL_S
        self.is_settled = True
        for caller in callers:
            caller.order = random.Random(f"{self.plan.seed} {caller.number} end")
            for name in sorted(caller.history.every_name()):
                if (await caller.send(Op("get_sequence", {"id": name})))[0] == "ok":
                    await caller.gather_all(name)
        self.check_places()
        for caller in callers:
            await caller.send(Op("delete_sequences", {"prefix": ""}))
            code, found, _ = await caller.send(Op("holds", {}))
            check(code == "ok", "holds", found)
            check(not found["holds"], "leases or pins are left", found)
            await caller.send(Op("clear", {}))
        for door in self.doors.values():
            door.router.close()  # also its polls
        await asyncio.sleep(2.0)
        for process in self.engines.values():
            process.check_empty()

    async def drained(self) -> None:
        """Every drain ends: an engine is emptied where others have room, and takes part again."""
        drained = list(self.drains)
        for name in self.names:
            check(await self.drain(name, "door-1", stop=True) == "ok", "a drain does not stop")
        for name in drained:
            await self.drain(name, "door-0", stop=False)
            ends = self.clock.now + 60.0
            while self.left(name) and self.clock.now < ends:
                await asyncio.sleep(0.5)
            is_full = any(code == "out_of_pages" for _, code in self.result.coverage)
            others = [one.engine.store for each, one in self.engines.items() if each != name]
            room = max(store.numbers()["available"] for store in others)
            is_full |= room < self.engines[name].engine.store.tree.books.num_pages.max()
            check(is_full or not self.left(name), "a drain does not end:", name, self.left(name))
            await self.drain(name, "door-0", stop=True)

    def left(self, name: str) -> list[str]:
        """What an engine has that others can take: of two engines none takes the other's shard, and
        a shard whose others are lost stays."""
        store, stays = self.engines[name].engine.store, self.abandoned
        left = [
            leaf.id
            for leaf in store.tree.books
            if not leaf.shard or (len(self.names) > 2 and leaf.id.rpartition("/")[2] not in stays)
        ]
        return (
            left
            + ["imports"] * store.imports.count(None)
            + ["leases"] * store.tree.cache.num_leases
        )

    def check_places(self) -> None:
        """Each sequence is at one engine, or has all its shards, each at one."""
        for space, history in self.histories.items():
            places: dict[str, list[Any]] = {}
            for name, process in self.engines.items():
                store = process.engine.store
                for leaf in store.tree.books:
                    if (mark := store.move_marks.marks.get(leaf.id)) and mark.is_handed:
                        continue  # it answers no calls until a door settles it or it expires
                    owner, _, shown = leaf.id.lstrip(HIDDEN).rpartition("/")
                    if (owner or "default") == space:
                        places.setdefault(shown, []).append((name, leaf.shard))
            known = history.every_name() | self.abandoned
            extra = {one for one in places.keys() - known if not one.startswith("seq-")}
            check(
                not extra, "sequences that no caller made are left:", {n: places[n] for n in extra}
            )
            for shown, some in places.items():
                shards = [shard for _, shard in some if shard is not None]
                ranks = {(one.layout.rank, one.layout.ranks) for one in shards}
                whole = len(some) == 1 and not shards
                sharded = (
                    len(shards) == len(some) == len(ranks) == max((r for _, r in ranks), default=0)
                )
                right = whole or sharded or (shards and shown in self.abandoned)
                check(right, "a sequence is at several engines:", shown, some)
