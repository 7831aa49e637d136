"""The cluster's world: engines, a router and callers, in one thread, by a seed.

Callers of a namespace share ids. What they see must be linearizable, while engines end and the
router ends and starts again.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from attnd import AsyncClient
from attnd.http import async_transport

from config.settings import ServerSettings
from service.cluster.membership import sessions
from service.doors.kit import problems
from service.engine.store.imports import HIDDEN
from service.tenants import OPEN, SCOPES, Tenant, tenant_of
from tests.harness.router import blocks_of
from tests.world.doors import DOOR, SECRET, DoorProcess, SimPoll, attach, call_with
from tests.world.network import NEVER, READ, Replaced, SimSocket
from tests.world.oracle.calls import (
    SPACES,
    Answer,
    Op,
    Outcome,
    Rows,
    Step,
    call,
    check,
    is_right_of_several,
)
from tests.world.oracle.followers import Follower
from tests.world.oracle.history import Effect, History
from tests.world.programs import Program
from tests.world.simulation import LONGEST_S, EngineProcess, Plan, Simulation, keys_of

UNCERTAIN_S: Final = 20.0  # a lost call may act as late: engines' deadline, and a door's grace
REFUSALS: Final = frozenset({"not_ready", "overloaded", "out_of_pages"})
"""Errors that may come at any time while engines come and go; the call has changed nothing."""
LOST: Final = ("lost", "deadline_exceeded", "cancelled")
SETTLED_S: Final = 25.0  # after which no call of a dead router acts any more
IDLE_POLL_S: Final = 2.0  # between two polls meanwhile: most turns of a run were those of polls
ROUTER: Final = "door-0"


class ClusterCaller(Program):
    """Runs statements at the router, and reports to the namespace's history."""

    in_cluster = True

    def __init__(self, world: ClusterWorld, number: int) -> None:
        super().__init__(world, number)
        self.tenant = world.tenant(self.space.name)
        self.client: AsyncClient | None = None
        self.imports: dict[str, Effect] = {}  # imports under way, by the ids that they make

    async def statement(self, name: str) -> None:
        """Looks then what has become of calls without an answer: else all outcomes are kept."""
        await super().statement(name)
        for effect in self.imports.values():
            self.space.lost(effect, UNCERTAIN_S)
        self.imports = {}
        if self.order.random() < 0.7:
            pending = [one for one in self.space.pending.values() if one.step.op.name != "loss"]
            names = {name for one in pending if one.ends < NEVER for name in one.names}
            for name in sorted(names - self.world.abandoned)[:3]:
                await self.send(call("get_sequence", id=name))

    async def send(self, op: Op) -> Answer | None:
        world, op.faults, op.sent = self.world, len(self.world.faults), self.world.clock.now
        # the router deletes until nothing is left; the client sends a lost truncation again
        repeats = op.name == "delete_sequences" or (op.name == "truncate" and world.has_http)
        is_later = op.name == "import_sequence" and "header" not in op.fields
        effects = [self.space.begin(step, repeats) for step in op.steps if not is_later]
        if op.name == "import_sequence":  # one effect from the beginning to the end
            self.imports |= {effect.makes: effect for effect in effects}
        if op.name == "export_sequence":
            op.seen = self.every(op.ids[0])  # while its engine lives
        world.result.calls += 1
        code, found, tensors = await self._call(op)
        shown = {one: found[one] for one in ("detail", "done", "lengths") if one in found}
        world.count(op.name, code, op.faults)
        world.note(f"  {self.number} {op.name} {op.fields} {code} {shown}")
        if (is_revoked := self.space.name == world.revoked) and op.sent > world.revoked_at:
            check(
                code in ("unauthorized", "lost"), f"{op.name} was answered to a revoked key", code
            )
        is_lawful = is_revoked and world.restored_at > op.sent
        check(code != "unauthorized" or is_lawful, f"{op.name}: the key is not known")
        if code == "ok" and op.name in ("ragged_prefill", "merge"):
            op.answer = found, tensors
            check(is_right_of_several(op, self.rows, {}), "wrong attention:", op.fields)
        if code == "ok":
            op.answer = found, tensors
            for effect in effects:
                effect.names = frozenset(effect.step.names)
        if op.name == "match_prefix" and code == "ok" and found["lease"] is not None:
            self.space.leases[found["lease"]["id"]] = None
        elif op.name == "import_sequence":
            is_over = found.get("state") == "done" or code == "sequence_exists"
            ended = op.made if is_over else ()
            effects = [self.imports.pop(name) for name in ended if name in self.imports]
        if op.name == "delete_sequences" and code != "ok":
            self.settle(effects, "lost", {})  # each is there or is not
        else:
            self.settle(effects, code, found)
        if code in LOST and op.plan and op.new:
            world.abandoned.add(op.made[0])  # how many rows it has is not known
            self.own = tuple(f"{one}{self.number}" for one in self.own)
        if code in REFUSALS or code == "unauthorized":
            await asyncio.sleep(self.order.choice((0.02, 0.3, 1.0)))
        return op.answer

    async def _call(self, op: Op) -> Any:
        """Code ("ok" for none), fields or problem, tensors; `lost` where no answer came."""
        world = self.world
        while (door := world.doors[ROUTER]).is_dead and not world.has_http:  # it is started again
            await asyncio.sleep(0.05)
        given = op.name, op.fields, op.tensors
        if world.has_http:
            if self.client is None:
                key = self.space.name if world.has_keys else None
                self.client = AsyncClient(f"http://{ROUTER}:80", api_key=key, timeout=30.0)
            task = world.loop.create_task(call_with(self.client, *given))
        else:
            task = door.start(*given, self.tenant)
        if world.plan.faults and self.order.random() < 0.03 and world.fault("caller cancels", 1.0):
            world.loop.call_later(self.order.choice((0.0, 1e-4, 0.003)), task.cancel)
        done, _ = await asyncio.wait([task], timeout=60.0)
        check(done, f"{op.name}: no answer", op.fields)
        if task.cancelled() or (door.is_dead and not world.has_http):
            return "lost", {}, {}
        return task.result()

    def _may_exist(self, effect: Effect) -> bool:
        """Whether another call makes it, or a door that has died has left an import of it."""
        name, engines = self.tenant.prefix + effect.makes, self.world.engines.values()
        is_importing = any(one.engine.store.imports.find(name) for one in engines)
        is_abandoned = effect.makes in self.world.abandoned
        return is_importing or is_abandoned or self.space.is_contended(effect)

    def settle(self, effects: Sequence[Effect], code: str, found: dict[str, Any]) -> None:
        """What an answer says of each effect."""
        history = self.space
        listed = found.get("sequences") or found.get("lengths") or {str(found.get("value"))}
        named = {name for effect in effects for name in effect.names if name in listed}
        may_be_refused = REFUSALS | {"length_mismatch", "sequence_changed", "unauthorized"}
        if {"kernel fails", "launch fails"} & set(self.world.faults):
            may_be_refused |= {"internal"}
        for effect in effects:
            text = f"{effect.step.text}: {code} {found if code != 'ok' else ''}"

            def is_right(seen: Outcome, step: Step = effect.step) -> bool:
                right = code != "ok" or len(seen) < 2 or step.is_right(seen[1], self.rows)
                return seen[0] == "ok" and right

            makers = [one.step.op for one in history.pending.values() if one.makes in effect.names]
            if effect.is_read and code == "ok" and any(op.new and op.plan for op in makers):
                history.refused(effect, text)  # how many are cached comes with the maker's answer
            elif code == "ok" or effect.names & set(found.get("done", ())):
                history.answered(effect, is_right, text)
            elif code in LOST:
                history.lost(effect, UNCERTAIN_S)
            elif code in may_be_refused:
                history.refused(effect, text)
                check(not self.world.is_settled, "refused after all faults ended:", text)
            elif (
                (named and not effect.names & named)
                or found.get("field") in ("layers", "q", "sequences")
                or (code == "sequence_exists" and self._may_exist(effect))
            ):
                history.refused(effect, text)
            else:
                wanted = "unknown_sequence" if code == "lost_sequence" else code
                history.answered(effect, lambda seen, wanted=wanted: wanted in seen, text)


class ClusterWorld(Simulation):
    """One run."""

    server = ServerSettings(
        live=False,
        allowed_hosts=(ROUTER,),
        deadline_s=5.0,
        max_inflight_bytes=2**21,
        **dict.fromkeys(("max_body_bytes", "max_answer_bytes"), 2**17),
    )

    def __init__(self, plan: Plan) -> None:
        luck = random.Random(f"{plan.seed} kind")
        self.has_keys, self.has_http = luck.random() < 0.5, luck.random() < 0.4
        self.drained_share = luck.choice((0.015, 0.08))
        super().__init__(plan)
        self.rows = Rows(self.geometry)
        names = SPACES if self.has_keys else ("default",)
        self.spaces = [History(name, self.clock) for name in names]
        self.followers = [self.follower(name) for name in names]
        self.doors: dict[str, DoorProcess] = {}
        self.is_settled = False
        self.abandoned: set[str] = set()  # their rows are not known, since an answer was lost
        self.names = [f"engine-{number}" for number in range(self.order.choice((2, 3, 3)))]
        self.drains: dict[str, None] = {}  # engines that are being drained
        self.restored_at = NEVER  # when the key that was revoked last came back

    def begin(self) -> None:
        self.engines |= {name: EngineProcess(self, SECRET) for name in self.names}

    def tenant(self, namespace: str) -> Tenant:
        return tenant_of(namespace, SCOPES) if self.has_keys else OPEN

    def follower(self, name: str) -> Follower:
        """Follows the router's events; two calls of it after a restart can reach two routers."""

        async def ask(after: int) -> Any:
            door, fields = self.doors[ROUTER], {"after": after, "limit": 5}
            if door.is_dead:
                return None
            task = door.start("events", fields, {}, self.tenant(name))
            await asyncio.wait([task])
            is_over = door.is_dead or task.cancelled()
            code, page, _ = ("lost", {}, {}) if is_over else task.result()
            return page if code == "ok" else None

        return Follower(name, self.plan.seed, ask)

    async def dial(self, path: str) -> SimSocket:
        door = DOOR.get()
        if door.is_dead:
            raise ConnectionRefusedError(111, "this door is dead")
        sock = self.engines[path].listener.dial()
        door.sockets.append(sock)
        return sock

    async def dial_http(self, make: Any, host: Any = None, *_: Any, **__: Any) -> Any:
        return await attach(self.loop, self.doors[host].dial(), make())

    def patches(self) -> list[Replaced]:
        poll = SimpleNamespace(POLLIN=READ, poll=lambda: SimPoll(self.network))
        return [
            *super().patches(),
            (asyncio.SelectorEventLoop, "create_connection", self.dial_http),
            (sessions.LOG, "exception", self.logged),
            (problems.LOG, "error", self.logged),
            (async_transport, "select", poll),
        ]

    def logged(self, *_: Any, exc_info: Any = None, **__: Any) -> None:
        """Routers and doors log the traceback of a bug, and go on. A killed one has no arena."""
        if not DOOR.get().is_dead:
            self.fail(exc_info or sys.exc_info()[1])

    def leaves(self, engine: EngineProcess) -> list[tuple[History, str, Any]]:
        """The sequences of an engine, also hidden ones: history, name, and how it is kept."""
        by_name = {space.name: space for space in self.spaces}
        books = engine.engine.store.tree.books
        split = ((leaf, *leaf.id.lstrip(HIDDEN).rpartition("/")) for leaf in books)
        return [(by_name[space or "default"], name, leaf) for leaf, space, _, name in split]

    def ended(self, engine: EngineProcess) -> None:
        """Its sequences are lost."""
        leaves = self.leaves(engine)
        self.note(f"  at its end: {[leaf.id for *_, leaf in leaves]}")
        for history, name, leaf in leaves:
            if leaf.id.startswith(HIDDEN):
                continue
            (loss,) = call("loss", id=name).steps
            history.lost(history.begin(loss), LONGEST_S)

    def fail(self, error: BaseException) -> None:
        for name, process in self.engines.items():
            self.note(f"{name} has {[leaf.id for *_, leaf in self.leaves(process)]}")
        super().fail(error)

    def reread(self) -> None:
        """The door knows at once; engines trust it."""
        door, now = self.doors[ROUTER], self.clock.now
        if door.http is not None and door.http.authenticator is not None and not door.is_dead:
            door.http.authenticator.read_again()
        is_back = self.keys == keys_of(SPACES)
        self.revoked_at, self.restored_at = (NEVER, now) if is_back else (now, NEVER)

    def strike(self, caller: ClusterCaller) -> None:
        """What may happen to processes before a statement."""
        order = self.order
        name = order.choice(self.names)
        engine, after = self.engines[name], order.choice((0.01, 0.3, 1.0, 4.0))
        is_kept = self.has_http and self.has_keys and self.keys == keys_of(SPACES)
        if is_kept and self.fault("a key is revoked", 0.01):
            self.revoke(caller.space.name)
        if engine.is_over:
            return
        if self.fault("engine dies", 0.008):
            engine.kill()
            self.loop.call_later(after, self.restart, name)
        elif not self.doors[ROUTER].is_dead and self.fault("router dies", 0.015):
            self.doors[ROUTER].kill()
            self.loop.call_later(after, self.open, ROUTER)
        elif self.fault("engine stalls long", 0.004):
            engine.stalled_until = self.clock.now + order.choice((0.5, 4.0, 9.0))
        elif self.fault("engine is emptied", self.drained_share):
            self.loop.create_task(self.drain(name, stop=False))
        elif name in self.drains and self.fault("emptying ends", 4 * self.drained_share):
            self.loop.create_task(self.drain(name, stop=True))

    def restart(self, name: str) -> None:
        if self.engines[name].is_over:
            self.engines[name] = EngineProcess(self, SECRET)
            self.drains.pop(name, None)

    def open(self, name: str) -> None:
        self.doors[name] = DoorProcess(self, name)

    async def drain(self, name: str, *, stop: bool) -> str:
        """Has an engine accept no new sequences, or accept them again."""
        process = self.doors[ROUTER]
        if process.is_dead:
            return "lost"
        fields = {"name": name, "stop": stop}
        task = process.start("drain_engine", fields, {}, process.router.members.tenant)
        await asyncio.wait([task])
        code = "lost" if task.cancelled() else str(task.result()[0])
        self.note(f"  drain {name}, stop {stop}: {code}")
        if code == "ok" and stop:
            self.drains.pop(name, None)
        elif code == "ok":
            self.drains[name] = None
        return code

    async def main(self) -> None:
        """At the end each sequence is in one place, nothing else is left, and all is given back."""
        self.open(ROUTER)
        while len(self.doors[ROUTER].router.members.engines) < len(self.names):
            await asyncio.sleep(0.01)
        callers = [ClusterCaller(self, number) for number in range(self.plan.callers)]
        following = [self.loop.create_task(one.run()) for one in self.followers]
        await asyncio.gather(*(one.run() for one in callers))
        self.end_faults()
        self.restore_keys()
        for name in self.names:
            self.restart(name)
        await asyncio.sleep(5.0)
        for name in self.names:
            check(await self.drain(name, stop=True) == "ok", "a drain does not stop")
        with patch.object(sessions, "POLL_S", IDLE_POLL_S):
            await asyncio.sleep(SETTLED_S)
        self.is_settled = True
        for caller in callers:
            caller.order = random.Random(f"{self.plan.seed} {caller.number} end")
            for name in sorted(caller.space.every_name() - self.abandoned):
                if await caller.send(call("get_sequence", id=name)) is not None:
                    await caller.gather_all(name)
        for follower in self.followers:
            follower.is_over = True
        await asyncio.gather(*following)
        await self.check_followers()
        for history in self.spaces:
            self.check_places(history)
        for caller in callers:
            await caller.send(call("delete_sequences", prefix=""))
            found = await caller.send(call("holds"))
            check(found is not None and not found[0]["holds"], "leases or pins are left", found)
            await caller.send(call("clear"))
        await self.check_followers()
        for door in self.doors.values():
            door.router.close()  # also its polls
        await asyncio.sleep(2.0)
        for process in self.engines.values():
            process.check_empty()

    async def check_followers(self) -> None:
        """Each knows the blocks that any engine has."""
        await asyncio.sleep(2 * IDLE_POLL_S)
        for one in self.followers:
            every = [blocks_of(process.engine.store, one.name) for process in self.engines.values()]
            await one.read_all({"GPU": set().union(*(blocks["GPU"] for blocks in every))})

    def check_places(self, history: History) -> None:
        """Each sequence is at one engine, none at two."""
        places: dict[str, list[str]] = {}
        for name, process in self.engines.items():
            for space, shown, _ in self.leaves(process):
                if space is history:
                    places.setdefault(shown, []).append(name)
        known = history.every_name() | self.abandoned
        extra = {one: places[one] for one in places.keys() - known if not one.startswith("seq-")}
        check(not extra, "sequences that no caller made are left:", extra)
        for shown, some in places.items():
            check(len(some) == 1, "a sequence is at several engines:", shown, some)
