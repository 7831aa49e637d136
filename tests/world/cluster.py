"""The cluster's world: engines, doors with routers, and callers, in one thread, by a seed.

Engines die, stall, drain and restart; doors are killed. Callers of a namespace share ids. What they
see must be linearizable, and at the end nothing but what they made may be left.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from attnd import AsyncClient

from config.settings import ServerSettings
from service.cluster.membership.members_file import MemberEntry
from service.cluster.routing.router import Router
from service.doors.http.door import Door
from service.doors.http.protocol.connection import Connection
from service.doors.kit.problems import ProblemText, document_of
from service.engine.store.moves import HIDDEN
from service.errors import AttndError
from service.image.json_text import dump_json
from service.image.reading import REQUEST, place, read_layout, split
from service.image.writing import RESPONSE, image
from service.operations.table import BY_NAME
from service.tenants import OPEN, SCOPES, Tenant, tenant_of
from tests.world.clients import PATCHED, HttpLoop, SimSelect, call_with, client_of, http_door, serve
from tests.world.history import FOREVER, NOT_NOW, Effect, Held, History, Outcome, Sequences
from tests.world.model import TOLERANCE, Rows, attention, check
from tests.world.network import SimSocket
from tests.world.simulation import LONGEST_S, SPACES, EngineProcess, Plan, Simulation

SECRET: Final = "a secret of the cluster's world"
IDS: Final = tuple(f"s{number}" for number in range(5))
"""Ids that all callers of a namespace use."""
GRAMMAR: Final = {
    "create": 10,
    "fork": 8,
    "append": 14,
    "decode": 12,
    "gather": 10,
    "look": 6,
    "truncate": 6,
    "delete": 5,
    "sweep": 2,
    "copy": 4,
    "prompt": 5,
    "match": 3,
    "rest": 8,
}
MAX_ROWS: Final = 12
UNCERTAIN_S: Final = 20.0
"""For how long a call whose answer was lost may take effect: the engines' deadline, and a door's
grace."""
REFUSALS: Final = frozenset({"sequence_moving", "not_ready", "overloaded", "out_of_pages"})
"""Errors that may come at any time while engines come and go; the call has changed nothing."""
SETTLED_S: Final = 75.0
"""After which nothing of a dead door is left: its copies live for 30 s."""
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
        members = self.router.members
        members.door, members.secret = name, SECRET
        entries = [MemberEntry(one, one) for one in world.names]
        self.context.run(members.update, entries)

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

    async def call(self, name: str, fields: Any, arrays: Any, tenant: Tenant) -> Any:
        """Code ("ok" for none), fields or problem, tensors."""
        router = self.router
        try:
            slot, length = router.arena.lay(image(REQUEST, dump_json(fields), arrays))
        except AttndError as error:
            return error_of(error)
        try:
            answered, answer = await router.call(BY_NAME[name], slot, length, 2**17, 0, b"", tenant)
        except (AttndError, ProblemText) as error:
            return error_of(error)
        finally:
            router.arena.give_back(slot)
        whole = answered.image
        header, start = split(whole) if len(whole) else (b"{}", 0)
        layout = read_layout(header, len(whole) - start, RESPONSE)
        copied = {one: np.array(array) for one, array in place(whole, start, layout).items()}
        router.arena.give_back(answer)
        return "ok", layout.fields, copied


def succeeded(is_right: Callable[[Outcome], bool], seen: Outcome) -> bool:
    return bool(seen[0] == "ok" and is_right(seen))


def always(_: Outcome) -> bool:
    return True


def contains(code: str, seen: Outcome) -> bool:
    return code in seen


def error_of(error: BaseException) -> tuple[str, dict[str, Any], dict[str, Any]]:
    document = document_of(error, b"")
    return document["code"], document, {}


class ClusterCaller:
    """Runs statements at one door after another, and reports to the namespace's history."""

    def __init__(self, world: ClusterWorld, number: int) -> None:
        self.world, self.number = world, number
        self.space = SPACES[number % len(SPACES)] if world.has_keys else "default"
        self.tenant = tenant_of(self.space, SCOPES) if world.has_keys else OPEN
        self.history = world.histories[self.space]
        self.order = random.Random(f"{world.plan.seed} caller {number}")
        self.own = (f"p{number}.a", f"p{number}.b")
        self.clients: dict[str, AsyncClient] = {}
        self.prompts: list[list[int]] = []

    async def run(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self.world.fail(error)

    async def _run(self) -> None:
        plan = self.world.plan
        for number in range(plan.statements):
            if plan.callers * number + self.number in plan.skipped:
                continue
            self.order = random.Random(f"{plan.seed} {self.number} {number}")
            name = self.order.choices(list(GRAMMAR), list(GRAMMAR.values()))[0]
            self.world.note(f"caller {self.number}: {name}")
            if plan.faults:
                self.world.strike()
            await getattr(self, f"_{name}")()
            if self.order.random() < 0.7:
                await self.resolve()
            if self.world.result.error:
                return

    # Calls.

    async def send(self, name: str, fields: Any, **arrays: Any) -> Any:
        """Code, fields, tensors; the code is `lost` where no answer came."""
        world = self.world
        world.result.calls += 1
        faults = len(world.faults)
        door = await world.door(self.number)
        if world.has_http:
            key = self.space if world.has_keys else ""
            client = self.clients.setdefault(door.name, client_of(door.name, key))
            task = world.loop.create_task(call_with(client, name, fields, arrays))
        else:
            work = door.call(name, fields, arrays, self.tenant)
            task = world.loop.create_task(work, context=door.context)
            door.calls[task] = None
        if world.plan.faults and self.order.random() < 0.03 and world.fault("caller cancels", 1.0):
            world.loop.call_later(self.order.choice((0.0, 1e-4, 0.003)), task.cancel)
        done, _ = await asyncio.wait([task], timeout=60.0)
        door.calls.pop(task, None)
        check(done, f"{name}: no answer", fields)
        is_lost = task.cancelled() or (door.is_dead and not world.has_http)
        code, found, tensors = ("lost", {}, {}) if is_lost else task.result()
        if is_lost and not task.cancelled():
            task.exception()
        for fault in set(world.faults[faults:]):
            world.result.coverage[name, fault] += 1
        world.result.coverage[name, code] += 1
        shown = {one: found[one] for one in ("detail", "done", "lengths") if one in found}
        world.note(f"  {self.number} {name} {fields} {code} {shown}")
        if code in REFUSALS:
            await asyncio.sleep(self.order.choice((0.02, 0.3, 1.0)))
        return code, found, tensors

    def settle(
        self, effects: Sequence[Effect], answer: Any, rights: Sequence[Callable[[Outcome], bool]]
    ) -> bool:
        """What an answer says of each effect: `rights` where the call succeeded."""
        code, found, _ = answer
        text = f"{code} {found if code != 'ok' else ''}"
        listed = found.get("sequences") or found.get("lengths") or {str(found.get("value"))}
        every = {name for effect in effects for name in effect.names}
        named = set() if code == "ok" else every & set(listed)
        for effect, is_right in zip(effects, rights, strict=True):
            own = f"{effect.text}: {text}"
            if code == "ok" or effect.names & set(found.get("done", ())):
                self.history.answered(effect, partial(succeeded, is_right), own)
            elif code in ("lost", "deadline_exceeded", "cancelled"):
                self.history.lost(effect, UNCERTAIN_S)
            elif code in REFUSALS | {"length_mismatch"} or (
                code == "internal" and self.world.has_broken()
            ):
                self.history.refused(effect, own)
                check(not self.world.is_settled, "refused after all faults ended:", own)
            elif (
                (named and not effect.names & named)
                or found.get("field") in ("layers", "q")
                or (code == "sequence_exists" and self.history.is_contended(effect))
            ):
                self.history.refused(effect, own)
            else:
                wanted = "unknown_sequence" if code == "lost_sequence" else code
                self.history.answered(effect, partial(contains, wanted), own)
        return bool(code == "ok")

    async def resolve(self) -> None:
        """Looks what has become of calls without an answer: else all that may have is kept."""
        names = {
            name
            for one in self.history.pending.values()
            if one.ends < FOREVER and not one.text.startswith(("loss", "undo"))
            for name in one.names
        }
        for name in sorted(names)[:3]:
            await self._look(name)

    # What to choose from.

    def _name(self, own: bool = False) -> str:
        names = [name for name in self.history.held() if name[0] != "p" or name in self.own]
        if own:
            names = [name for name in names if name in self.own]
        if names and self.order.random() < 0.9:
            return self.order.choice(names)
        return self.order.choice(self.own if own else IDS + self.own)

    def _rows(self, name: str, layer: int, count: int) -> list[int]:
        """Rows of new tokens behind those that are held."""
        held = self.history.held().get(name)
        rows = held.rows[layer] if held is not None else ()
        tokens = [self.order.randrange(3) for _ in range(max(0, min(count, MAX_ROWS - len(rows))))]
        return self.world.rows.after(rows[-1] if rows else 0, tokens)

    # Statements.

    async def _rest(self) -> None:
        await asyncio.sleep(self.order.choice((0.0, 0.001, 0.02, 0.3, 2.0)))

    async def _create(self) -> None:
        names = sorted({self.order.choice(IDS + self.own) for _ in range(self.order.randint(1, 2))})
        new: list[dict[str, Any]] = [{"id": name} for name in names]
        if self.order.random() < 0.2:
            new.append({})
        if self.order.random() < 0.1 and len(self.world.names) > 1:
            new[0]["ranks"] = 2
        await self._make(new, [self.world.empty] * len(new))

    async def _make(
        self, new: list[dict[str, Any]], rows: Sequence[tuple[tuple[int, ...], ...]]
    ) -> Any:
        """Create sequences without parents; the id of one without is known with the reply."""
        ids = [one.get("id", "") for one in new]

        def make(at: int, held: tuple[tuple[int, ...], ...]) -> Any:
            def apply(there: Sequences, number: int) -> Outcome:
                name = ids[at]
                if name in there:
                    return ("sequence_exists",)
                if not name:
                    return NOT_NOW
                there[name] = Held(number, held)
                return ("ok", held)

            return apply

        effects = [
            self.history.begin(f"create {name}", {name} - {""}, make(at, held), makes=name)
            for at, (name, held) in enumerate(zip(ids, rows, strict=True))
        ]
        answer = await self.send("create_sequences", {"sequences": new})
        if answer[0] == "ok":
            ids[:] = [view["id"] for view in answer[1]["sequences"]]
            for effect, name in zip(effects, ids, strict=True):
                effect.names = frozenset({name})
        self.settle(effects, answer, [always] * len(effects))
        return answer

    async def _fork(self) -> None:
        name, parent = self.order.choice(IDS + self.own), self._name()
        length = self.order.choice((None, 0, 1, 3, 6))

        def apply(there: Sequences, number: int) -> Outcome:
            wrong = []
            if name in there:
                wrong.append("sequence_exists")
            if parent not in there:
                wrong.append("unknown_sequence")
            else:
                lengths = [len(rows) for rows in there[parent].rows]
                if (length or 0) > min(lengths) or (length is None and len(set(lengths)) > 1):
                    wrong.append("invalid_request")
            if wrong:
                return tuple(wrong)
            there[name] = Held(number, tuple(rows[:length] for rows in there[parent].rows))
            return ("ok", tuple(map(len, there[name].rows)))

        effect = self.history.begin(f"fork {name} of {parent}", [name, parent], apply, makes=name)
        new: dict[str, Any] = {"id": name, "parent": parent}
        if length is not None:
            new["length"] = length
        answer = await self.send("create_sequences", {"sequences": [new]})
        lengths = tuple(answer[1]["sequences"][0]["lengths"]) if answer[0] == "ok" else ()
        self.settle([effect], answer, [lambda seen: seen == ("ok", lengths)])

    def _appending(
        self, name: str, layers: Iterable[int], rows: list[int], offset: int | None
    ) -> Callable[[Sequences, int], Outcome]:
        def apply(there: Sequences, _: int) -> Outcome:
            if name not in there:
                return ("unknown_sequence",)
            made, held = there[name]
            lengths = {len(held[layer]) for layer in layers}
            if len(lengths) > 1:
                return ("invalid_request",)
            if offset is not None and lengths != {offset}:
                return ("length_mismatch",)
            after = list(held)
            for layer in layers:
                after[layer] = (*held[layer], *rows)
            there[name] = Held(made, tuple(after))
            return ("ok", *(after[layer] for layer in layers))

        return apply

    async def _append(self) -> None:
        names = sorted({self._name() for _ in range(self.order.choice((1, 1, 2, 3)))})
        layer, both = self.order.randrange(2), self.order.random() < 0.8
        layers = (0, 1) if both else (layer,)
        rows = [self._rows(name, layer, self.order.randint(0, 4)) for name in names]
        offsets = None
        if not both and self.order.random() < 0.5:
            held = self.history.held()
            offsets = [len(held[name].rows[layer]) if name in held else 0 for name in names]
        effects = [
            self.history.begin(
                f"append {some} to {name} at {layers}, {offsets}",
                [name],
                self._appending(name, layers, some, offsets[at] if offsets else None),
            )
            for at, (name, some) in enumerate(zip(names, rows, strict=True))
        ]
        flat = [row for some in rows for row in some]
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        fields: dict[str, Any] = {"sequences": names, "append_indptr": ends}
        content = [self.world.rows.content(flat, one) for one in layers]
        if both:
            fields["layers"] = [0, 1]
            k, v = (np.stack([one[half] for one in content]) for half in (0, 1))
        else:
            fields |= {"layer": layer} | ({"offsets": offsets} if offsets else {})
            k, v = content[0]
        answer = await self.send("append", fields, k=k, v=v)
        replied = answer[1]["lengths"] if answer[0] == "ok" else [None] * len(names)
        lengths = dict(zip(names, replied, strict=True))
        rights = [
            lambda seen, name=name: lengths.get(name) in (None, len(seen[1])) for name in names
        ]
        self.settle(effects, answer, rights)

    async def _decode(self) -> None:
        names = sorted({self._name() for _ in range(self.order.choice((1, 1, 2, 3)))})
        layer, appends = self.order.randrange(2), self.order.random() < 0.5
        rows = [self._rows(name, layer, 1) for name in names] if appends else []
        appends = bool(rows) and all(rows)
        geometry = self.world.geometry
        shape = (len(names), 2 * geometry.num_kv_heads, geometry.head_dim)
        arrays = {
            "q": np.random.default_rng(self.order.getrandbits(32)).standard_normal(shape, "f")
        }
        if appends:
            flat = [row for some in rows for row in some]
            arrays["k"], arrays["v"] = self.world.rows.content(flat, layer)
        effects = [
            self.history.begin(
                f"decode {name} at {layer} with {rows[at] if appends else ()}",
                [name],
                self._appending(name, (layer,), rows[at] if appends else [], None),
                is_read=not appends,
            )
            for at, name in enumerate(names)
        ]
        answer = await self.send("decode", {"layer": layer, "sequences": names}, **arrays)

        def is_right(at: int) -> Callable[[Outcome], bool]:
            def right(seen: Outcome) -> bool:
                if "o" not in answer[2]:
                    return True
                k, v = self.world.rows.content(seen[1], layer)
                wanted = attention(arrays["q"][at], k, v)
                return all(
                    np.allclose(answer[2][part][at], value, atol=TOLERANCE, rtol=TOLERANCE)
                    for part, value in zip(("o", "lse"), wanted, strict=True)
                )

            return right

        self.settle(effects, answer, [is_right(at) for at in range(len(names))])

    def _reading(self, name: str) -> Effect:
        def apply(there: Sequences, _: int) -> Outcome:
            return ("ok", there[name].rows) if name in there else ("unknown_sequence",)

        return self.history.begin(f"read {name}", [name], apply, is_read=True)

    async def _gather(self, names: list[str] | None = None, layer: int | None = None) -> Any:
        names = names or sorted({self._name() for _ in range(self.order.choice((1, 1, 2)))})
        layer = self.order.randrange(2) if layer is None else layer
        effects = [self._reading(name) for name in names]
        fields = {"layer": layer, "sequences": names, "dtype": "fp32"}
        answer = await self.send("gather", fields)
        ends = answer[1].get("kv_indptr") or [0] * (len(names) + 1)

        def is_right(at: int) -> Callable[[Outcome], bool]:
            def right(seen: Outcome) -> bool:
                if len(seen[1][layer]) != ends[at + 1] - ends[at]:
                    return False
                wanted = self.world.rows.content(seen[1][layer], layer)
                span = slice(ends[at], ends[at + 1])
                pairs = zip("kv", wanted, strict=True)
                return all(np.array_equal(answer[2][part][span], value) for part, value in pairs)

            return right

        self.settle(effects, answer, [is_right(at) for at in range(len(names))])
        return answer

    async def _look(self, name: str | None = None) -> Any:
        name = name or self._name()
        effect = self._reading(name)
        answer = await self.send("get_sequence", {"id": name})
        lengths = answer[1].get("lengths")
        self.settle([effect], answer, [lambda seen: lengths == list(map(len, seen[1]))])
        return answer

    async def _truncate(self) -> None:
        name, length = self._name(), self.order.choice((0, 1, 2, 4, 6))

        def apply(there: Sequences, _: int) -> Outcome:
            if name not in there:
                return ("unknown_sequence",)
            made, rows = there[name]
            if length > min(map(len, rows)):
                return ("invalid_request",)
            there[name] = Held(made, tuple(some[:length] for some in rows))
            return ("ok",)

        effect = self.history.begin(f"cut {name} to {length}", [name], apply)
        answer = await self.send("truncate", {"id": name, "length": length})
        self.settle([effect], answer, [always])

    def _deleting(self, name: str, *, ignores: bool) -> Effect:
        def apply(there: Sequences, _: int) -> Outcome:
            if there.pop(name, None) is None:
                return ("ok", 0) if ignores else ("unknown_sequence",)
            return ("ok", 1)

        return self.history.begin(f"delete {name}", [name], apply)

    async def _delete(self, name: str | None = None) -> None:
        effect = self._deleting(name := name or self._name(), ignores=False)
        answer = await self.send("delete_sequence", {"id": name})
        self.settle([effect], answer, [always])

    async def _sweep(self) -> None:
        """Deletes several; after an error each is there or is not."""
        names = sorted({self.order.choice(IDS + self.own) for _ in range(3)})
        effects = [self._deleting(name, ignores=True) for name in names]
        for effect in effects:
            effect.repeats = True  # the router asks again until nothing is left
        answer = await self.send("delete_sequences", {"ids": names})
        if answer[0] != "ok":
            answer = ("lost", {}, {})
        self.settle(effects, answer, [always] * len(effects))

    async def _copy(self) -> None:
        """An export of a sequence that nobody else changes is imported under another id."""
        source, name = self._name(own=True), self.order.choice(IDS + self.own)
        held = self.history.held().get(source)
        if held is None or source not in self.own or not self.history.is_certain(source):
            return
        found = await self.send("export_sequence", {"id": source, "part_bytes": 200})
        if found[0] != "ok":
            return
        header, digests, names = found[1]["header"], [found[1]["digest"]], found[2]
        check(header["lengths"] == list(map(len, held.rows)), "exported lengths", header, held)
        parts = []
        for number in range(header["num_parts"]):
            fields = {"id": source, "part": number, "before": digests[-1]}
            fields |= {one: header[one] for one in ("generation", "part_bytes")}
            found = await self.send("export_sequence", fields)
            if found[0] != "ok":
                return
            digests.append(found[1]["digest"])
            parts.append(found[2])
        begin = {"id": name, "header": header, "digest": digests[0], "idle_s": 1.0}

        def apply(there: Sequences, number: int) -> Outcome:
            if name in there:
                return ("sequence_exists", "unknown_import")
            there[name] = Held(number, held.rows)
            return ("ok",)

        effect = self.history.begin(f"import {name} of {source}", [name], apply, makes=name)
        answer = await self.send("import_sequence", begin, **names)
        if answer[0] == "ok":
            for number in range(answer[1]["next_part"], header["num_parts"]):
                fields = {"id": name, "part": number, "digest": digests[number + 1]}
                if number == answer[1]["next_part"] and answer[1]["digest"] is None:
                    fields["before"] = digests[number]
                found = await self.send("import_sequence", fields, **parts[number])
                if found[0] != "ok":
                    self.history.lost(effect, 0.0)
                    return
            answer = await self.send("import_sequence", {"id": name, "digest": digests[-1]})
        if answer[0] in ("ok", "sequence_exists", "lost", "deadline_exceeded"):
            self.settle([effect], answer, [always])
        else:  # another import of the same id may have cancelled it, or its engine died
            self.history.lost(effect, UNCERTAIN_S)

    async def _prompt(self) -> None:
        """Names the pages of a sequence that nobody else changes, and begins others with them."""
        name = self.order.choice(self.own)
        held = self.history.held().get(name)
        rows = held.rows[0] if held is not None else ()
        if not rows or held is None or held.rows[0] != held.rows[1]:
            return
        if not self.world.rows.is_chain(rows) or not self.history.is_certain(name):
            return
        tokens = [self.world.rows.tokens[row] for row in rows]
        answer = await self.send("commit", {"id": name, "token_ids": tokens})
        if answer[0] == "ok":
            self.prompts = [*self.prompts[-3:], tokens]

    async def _match(self) -> None:
        if not self.prompts:
            return
        tokens = [*self.order.choice(self.prompts), 1, 0, 1, 2]
        wanted, name = self.world.rows.after(0, tokens), self.order.choice(self.own)
        if self.order.random() < 0.4:
            fields = {"token_ids": tokens, "lease_s": self.order.choice((0.0, 0.5, 3.0))}
            code, found, _ = await self.send("match_prefix", fields)
            if code == "ok" and found["lease"] is not None:
                await self._rest()
                await self.send("release_lease", {"id": found["lease"]["id"]})
            return
        effects: list[Effect] = []

        def apply(there: Sequences, number: int) -> Outcome:
            if name in there:
                return ("sequence_exists",)
            if cached is None:  # how much of it is cached is known with the answer
                return NOT_NOW
            there[name] = Held(number, (tuple(wanted[:cached]),) * 2)
            return ("ok",)

        cached: int | None = None
        effects.append(self.history.begin(f"prompt {name}", [name], apply, makes=name))
        new = {"id": name, "prefix": {"token_ids": tokens}}
        answer = await self.send("create_sequences", {"sequences": [new]})
        if answer[0] == "ok":
            cached = answer[1]["sequences"][0]["cached_len"]
        self.settle(effects, answer, [always])
        if answer[0] in ("lost", "deadline_exceeded"):
            self.world.abandoned.add(name)  # how many rows it has is not known
            self.own = tuple(f"{one}{self.number}" for one in self.own)


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
        super().__init__(plan)
        spaces = SPACES if self.has_keys else ("default",)
        self.rows = Rows(self.geometry)
        self.empty: tuple[tuple[int, ...], ...] = ((),) * self.geometry.num_layers
        self.histories = {space: History(lambda: self.clock.now) for space in spaces}
        self.doors: dict[str, DoorProcess] = {}
        self.is_settled = False
        self.abandoned: set[str] = set()
        """Sequences whose rows are not known, since an answer was lost."""
        self.names = [f"engine-{number}" for number in range(self.order.choice((2, 3)))]
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
        by_pair = (Connection, "__hash__", lambda one: hash(one.peer))
        return [*super().patches(), (PATCHED, "select", SimSelect(self.network)), by_pair]

    def make_loop(self) -> asyncio.SelectorEventLoop:
        loop = HttpLoop(self.selector)
        loop.dial_http = self.dial_http
        return loop

    async def door(self, number: int) -> DoorProcess:
        """The door of a caller, which is started again where it has died."""
        name = f"door-{number % 2}"
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
        elif not self.doors[door].is_dead and self.fault("door dies", 0.006):
            self.doors[door].kill()
            self.loop.call_later(after, self.open, door)
        elif self.fault("engine stalls long", 0.004):
            engine.stalled_until = self.clock.now + order.choice((0.5, 4.0, 9.0))
        elif self.fault("engine is emptied", 0.015):
            self.loop.create_task(self.drain(name, door, stop=False))
        elif name in self.drains and self.fault("emptying ends", 0.05):
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
        work = process.call("drain_engine", fields, {}, process.router.members.tenant)
        task = self.loop.create_task(work, context=process.context)
        process.calls[task] = None
        await asyncio.wait([task])
        process.calls.pop(task, None)
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
        self.plan = replace(self.plan, faults=False)
        for name in self.names:
            self.engines[name].device.is_armed = False
            self.engines[name].stalled_until = 0.0
            self.restart(name)
        await asyncio.sleep(5.0)
        await self.drained()
        await asyncio.sleep(SETTLED_S)
        self.is_settled = True
        for caller in callers:
            caller.order = random.Random(f"{self.plan.seed} {caller.number} end")
            for name in sorted(caller.history.every_name()):
                if (await caller._look(name))[0] == "ok":
                    for layer in range(self.geometry.num_layers):
                        await caller._gather([name], layer)
        self.check_places()
        for caller in callers:
            await caller.send("delete_sequences", {"prefix": ""})
            code, found, _ = await caller.send("holds", {})
            check(code == "ok", "holds", found)
            check(not found["holds"], "leases or pins are left", found)
            await caller.send("clear", {})
        await asyncio.sleep(2.0)
        for name, process in self.engines.items():
            store = process.engine.store
            store.tree.check_integrity()
            left = [leaf.id for leaf in store.tree.books]
            check(not left, f"{name} has sequences left:", left)
            check(not store.imports.count(None), f"{name} has imports left")
            check(not store.move_marks.marks, f"{name} has marks left", store.move_marks.marks)
            free = store.tree.allocator.num_free
            check(free == self.geometry.num_pages, f"{name}: pages are missing", free)
            check(not process.engine.scheduler.is_busy, f"{name} is busy")
        for door in self.doors.values():
            door.router.close()
        await asyncio.sleep(1.0)

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
            check(is_full or not self.left(name), "a drain does not end:", name, self.left(name))
            await self.drain(name, "door-0", stop=True)

    def left(self, name: str) -> list[str]:
        """What an engine has that others can take: of two engines none takes the other's shard."""
        store = self.engines[name].engine.store
        left = [leaf.id for leaf in store.tree.books if not leaf.shard or len(self.names) > 2]
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
                for leaf in process.engine.store.tree.books:
                    owner, _, shown = leaf.id.lstrip(HIDDEN).rpartition("/")
                    if (owner or "default") == space:
                        places.setdefault(shown, []).append((name, leaf.shard))
            known = history.every_name() | self.abandoned
            extra = {one for one in places.keys() - known if not one.startswith("seq-")}
            check(not extra, "sequences that nobody made are left:", {n: places[n] for n in extra})
            for shown, some in places.items():
                shards = [shard for _, shard in some if shard is not None]
                ranks = {(one.layout.rank, one.layout.ranks) for one in shards}
                whole = len(some) == 1 and not shards
                sharded = (
                    len(shards) == len(some) == len(ranks) == max((r for _, r in ranks), default=0)
                )
                right = whole or sharded or (shards and shown in self.abandoned)
                check(right, "a sequence is at several engines:", shown, some)
