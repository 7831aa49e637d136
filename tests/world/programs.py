"""Callers: random programs of calls, from a grammar that prefers what is rare in production."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from service.operations.transfer import Header
from tests.world.calls import NUM_LAYERS, Every, Op, Rows, Sequences
from tests.world.model import Namespace

GRAMMAR: Final = {
    "create": (3, 10),
    "prompt": (8, 4),
    "fork": (9, 8),
    "append": (12, 18),
    "decode": (12, 12),
    "prefill": (4, 0),
    "gather": (4, 10),
    "truncate": (6, 6),
    "keep": (3, 0),
    "delete": (3, 5),
    "sweep": (1, 2),
    "look": (3, 6),
    "list": (1, 0),
    "pool": (1, 0),
    "page_table": (1, 0),
    "export": (3, 1),
    "import": (4, 4),
    "hand_over": (5, 0),
    "commit": (6, 5),
    "from_prefix": (4, 2),
    "match": (5, 1),
    "release": (4, 1),
    "renew": (2, 0),
    "holds": (1, 0),
    "pin": (2, 0),
    "unpin": (2, 0),
    "quota": (1, 0),
    "usage": (1, 0),
    "again": (3, 0),
    "burst": (4, 0),
    "evict": (1, 0),
    "rest": (4, 8),
}
"""The statements of a program, and their weights with one engine and in a cluster."""
SHARED: Final = ("s0", "s1", "s2", "s3")
"""Ids that all callers of a namespace use, at the same time."""
FEW: Final = 3
"""Living sequences of a caller below which most statements are prompts."""
MAX_ROWS: Final = 14
HEADS: Final = 2
SHORT_S: Final = (0.02, 0.1, 0.5)
OPS: Final[dict[str, Callable[[Program], Op]]] = {
    "gather": lambda p: Op("gather", {"layer": p.layer(), "sequences": p.some(), "dtype": "fp32"}),
    "delete": lambda p: Op("delete_sequence", {"id": p.name()}),
    "sweep": lambda p: p.sweep(),
    "look": lambda p: Op("get_sequence", {"id": p.name()}),
    "list": lambda _: Op("list_sequences", {}),
    "pool": lambda _: Op("pool", {}),
    "page_table": lambda p: Op("page_table", {"sequences": p.some(), "layer": p.layer()}),
    "holds": lambda _: Op("holds", {}),
    "usage": lambda p: Op("get_namespace", {"name": p.space.name}),
    "evict": lambda p: Op("evict", {"num_pages": p.order.randint(1, 6)}),
}
"""Statements of one call."""


class Program(ABC):
    """One caller's statements."""

    world_number = 0
    """Which weights it uses."""

    def __init__(self, world: Any, space: Namespace, rows: Rows, number: int) -> None:
        self.world, self.space, self.number = world, space, number
        self.rows = rows
        self.order = random.Random(f"{world.plan.seed} caller {number}")
        self.own = (f"p{number}.a", f"p{number}.b")
        self.exports: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        """Rows of prompts that were committed, or matched."""
        self.tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def send(self, op: Op) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
        """Code, fields and tensors of a call's answer; None where none came."""

    @abstractmethod
    def strike(self) -> None:
        """What may happen to processes before a statement."""

    @abstractmethod
    def held(self) -> Sequences:
        """The sequences of its namespace, as its oracle has them."""

    @abstractmethod
    def sweep(self) -> Op:
        """A call that deletes several sequences."""

    def extended(self, new: dict[str, Any]) -> dict[str, Any]:
        """A new sequence, with what its world adds."""
        return new

    def is_certain(self, name: str) -> bool:
        """Whether it knows the rows of a sequence before a call about it."""
        return True

    async def run(self) -> None:
        """All statements, some before the one before them has ended."""
        plan, world = self.world.plan, self.world
        for number in range(plan.statements):
            if plan.callers * number + self.number in plan.skipped:
                continue
            order = self.order = random.Random(f"{plan.seed} {self.number} {number}")
            name = self._draw()
            if plan.faults:
                self.strike()
            together = not self.world_number and order.random() < 0.4
            together = together and name not in ("commit", "rest")
            if not together and self.tasks:
                await asyncio.wait(self.tasks)
            task = asyncio.create_task(self.statement(name))
            self.tasks.add(task)
            task.add_done_callback(self._ended)
            if not together or len(self.tasks) > 3:
                await asyncio.wait(self.tasks)
            if world.result.error:
                return
        if self.tasks:
            await asyncio.wait(self.tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(error)

    async def statement(self, name: str) -> None:
        self.world.note(f"caller {self.number}: {name}")
        if name in OPS:
            await self.send(OPS[name](self))
        else:
            await getattr(self, f"_{name}")()

    async def gather_all(self, name: str) -> None:
        """All rows of a sequence, at each layer."""
        for layer in range(NUM_LAYERS):
            fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
            await self.send(Op("gather", fields))

    def _draw(self) -> str:
        held = self.held()
        living = sum(any(held[name].rows) for name in self.names if name in held)
        if living < FEW and self.order.random() < 0.5:
            return "prompt"
        weights = [weights[self.world_number] for weights in GRAMMAR.values()]
        return self.order.choices(list(GRAMMAR), weights)[0]

    # What to choose from.

    @property
    def names(self) -> tuple[str, ...]:
        return SHARED + self.own

    def name(self) -> str:
        """An id: mostly of a sequence that is there."""
        living = [name for name in self.held() if name[0] != "p" or name in self.own]
        if living and self.order.random() < 0.95:
            return self.order.choice(living)
        return self.order.choice(self.names)

    def some(self) -> list[str]:
        return sorted({self.name() for _ in range(self.order.choice((1, 2, 3, 5)))})

    def free(self) -> list[str]:
        return [name for name in self.names if name not in self.held()]

    def every(self, name: str) -> Every:
        held = self.held()
        return held[name].rows if name in held else ((),) * NUM_LAYERS

    def at(self, name: str, layer: int) -> tuple[int, ...]:
        return self.every(name)[layer]

    def length(self, name: str) -> int:
        return min(map(len, self.every(name)))

    def layer(self) -> int:
        return self.order.randrange(NUM_LAYERS)

    def _tokens(self, count: int) -> list[int]:
        return [self.order.randrange(2) for _ in range(count)]

    def _queries(self, count: int) -> Any:
        geometry = self.rows.geometry
        shape = (count, HEADS * geometry.num_kv_heads, geometry.head_dim)
        return np.random.default_rng(self.order.getrandbits(32)).standard_normal(shape, np.float32)

    def _behind(self, name: str, layer: int, count: int) -> list[int]:
        """Rows behind what a sequence holds now, as far as they fit."""
        rows = self.at(name, layer)
        tokens = self._tokens(max(0, min(count, MAX_ROWS - len(rows))))
        return self.rows.after((rows or (0,))[-1], tokens)

    # Statements.

    async def _rest(self) -> None:
        await asyncio.sleep(self.order.choice((0.0, 0.001, 0.01, 0.1, 0.1, 0.7, 3.0)))

    async def _create(self) -> None:
        names = sorted({self.order.choice(self.names) for _ in range(self.order.randint(1, 2))})
        new: list[dict[str, Any]] = [{"id": name} for name in names]
        if len(new) > 1 and self.order.random() < 0.3 and not self.world_number:
            new[1]["parent"] = self.name()
        await self.send(Op("create_sequences", {"sequences": list(map(self.extended, new))}))

    async def _prompt(self) -> None:
        """A sequence that holds rows at every layer."""
        free = self.free()
        name = self.order.choice(free) if free else self.name()
        if free:
            new = self.extended({"id": name})
            await self.send(Op("create_sequences", {"sequences": [new]}))
        await self._append([name], self.order.randint(1, 9))

    async def _fork(self) -> None:
        parent = self.name()
        new: dict[str, Any] = {"id": self.order.choice(self.free() or SHARED), "parent": parent}
        if self.order.random() < 0.7:
            most = self.length(parent) + (self.order.random() < 0.05)
            new["length"] = self.order.randint(0, most)
        await self.send(Op("create_sequences", {"sequences": [self.extended(new)]}))

    async def _append(self, names: list[str] | None = None, count: int | None = None) -> None:
        names, layer = names or self.some(), self.layer()
        uneven = [name for name in names if len(set(self.every(name))) > 1]
        if uneven and self.order.random() < 0.8:  # its shorter layer gets what it lacks
            names, every = uneven[:1], self.every(uneven[0])
            short, long = sorted(every, key=len)
            layer, rows = every.index(short), [list(long[len(short) :])]
        else:
            counts = [count or self.order.choice((0, 1, 1, 2, 5)) for _ in names]
            rows = [self._behind(*each) for each in zip(names, [layer] * 9, counts, strict=False)]
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        fields: dict[str, Any] = {"sequences": names, "append_indptr": ends}
        flat = [row for each in rows for row in each]
        if not uneven and self.order.random() < 0.8:
            fields["layers"] = list(range(NUM_LAYERS))
            made = [self.rows.content(flat, each) for each in fields["layers"]]
            k, v = (np.stack(each) for each in zip(*made, strict=True))
        else:
            fields["layer"] = layer
            k, v = self.rows.content(flat, layer)
        if self.order.random() < 0.5:
            fields["offsets"] = [len(self.at(name, layer)) for name in names]
            fields["offsets"][-1] += self.order.random() < 0.15
        await self.send(Op("append", fields, {"k": k, "v": v}, rows))

    async def _decode(self) -> None:
        names, layer = self.some(), self.layer()
        fields: dict[str, Any] = {"layer": layer, "sequences": names}
        fields["cascade"] = self.order.choice(("auto", "always", "never"))
        tensors, rows = {"q": self._queries(len(names))}, []
        fits = all(len(self.at(name, layer)) < MAX_ROWS for name in names)
        if fits and self.order.random() < 0.6:
            rows = [self._behind(name, layer, 1) for name in names]
            tensors["k"], tensors["v"] = self.rows.content([row for (row,) in rows], layer)
        await self.send(Op("decode", fields, tensors, rows))

    async def _prefill(self) -> None:
        name, layer = self.name(), self.layer()
        if rows := self._behind(name, layer, self.order.randint(1, 5)):
            k, v = self.rows.content(rows, layer)
            fields: dict[str, Any] = {"layer": layer, "sequences": [name], "causal": True}
            fields["qo_indptr"] = [0, len(rows)]
            tensors = {"q": self._queries(len(rows)), "k": k, "v": v}
            await self.send(Op("prefill", fields, tensors, [rows]))

    async def _truncate(self) -> None:
        name = self.name()
        length = self.order.randint(0, self.length(name))
        await self.send(Op("truncate", {"id": name, "length": length}))

    async def _keep(self) -> None:
        """A tree of drafts, of which some are accepted."""
        name = self.name()
        length = self.length(name)
        cut = self.order.randint(0, length)
        keep = [at for at in range(cut, length) if self.order.random() < 0.5]
        await self.send(Op("truncate", {"id": name, "length": cut, "keep": keep}))

    # Moving.

    async def _export(self, name: str | None = None, pause: bool = True) -> dict[str, Any] | None:
        name = name or self.name()
        if not self.is_certain(name):
            return None
        part_bytes = self.order.choice((1, 200, 2**20))
        begun = Op("export_sequence", {"id": name, "part_bytes": part_bytes})
        found = await self.send(begun)
        if found is None or found[0] != "ok":
            return None
        header, digests, names, parts = found[1]["header"], [found[1]["digest"]], found[2], []
        parsed = Header(**header)
        for number in range(parsed.num_parts):
            if pause and self.order.random() < 0.3:
                await self._rest()
            part, size = parsed.part(number), parsed.page_size
            spans = [
                (layer, part.first_page * size, min(part.last_page * size, parsed.lengths[layer]))
                for layer in range(part.first_layer, part.last_layer)
            ]
            fields = {"id": name, "part": number, "before": digests[-1]}
            fields |= {one: header[one] for one in ("generation", "part_bytes")}
            plan = [span for span in spans if span[2] > span[1]]
            found = await self.send(Op("export_sequence", fields, plan=plan))
            if found is None or found[0] != "ok":
                return None
            digests.append(found[1]["digest"])
            parts.append(found[2])
        plan = {"rows": begun.seen} | ({"ttl_s": header["ttl_s"]} if header["ttl_s"] else {})
        made = {"header": header, "digests": digests, "parts": parts, "plan": plan, "names": names}
        self.exports = [*self.exports[-1:], made]
        return made

    async def _import(self) -> None:
        if not self.exports:
            await self._export()
        if not self.exports:
            return
        source = self.order.choice(self.exports)
        header, digests, name = source["header"], source["digests"], self.order.choice(self.names)

        async def send(fields: dict[str, Any], tensors: dict[str, Any]) -> Any:
            op = Op("import_sequence", {"id": name} | fields, tensors, plan=source["plan"])
            found = await self.send(op)
            return found[1] if found is not None and found[0] == "ok" else None

        idle_s = self.order.choice((0.05, 1.0))
        begin = {"header": dict(header), "digest": digests[0], "idle_s": idle_s}
        if (begun := await send(begin, source["names"])) is None:
            return
        number = begun["next_part"]
        while number < header["num_parts"]:
            if self.order.random() < 0.2:
                await self._rest()
            if self.order.random() < 0.05:
                await self.send(Op("cancel_import", {"id": name}))
                return
            fields = {"part": number, "digest": digests[number + 1]}
            if number == begun["next_part"] and begun["digest"] is None:
                fields["before"] = digests[number]
            if (made := await send(fields, source["parts"][number])) is None:
                return
            number = made["next_part"]
        await send({"digest": digests[-1]}, {})

    async def _hand_over(self) -> None:
        """A sequence leaves for another engine, while others go on calling."""
        name, for_s = self.name(), self.order.choice((0.0002, 0.002, 0.05, 0.3))
        left = await self.send(Op("hand_over", {"id": name, "state": "leaving", "for_s": for_s}))
        if left is None or left[0] != "ok":
            return
        made = await self._export(name, pause=False)
        if made is not None and self.order.random() < 0.8:
            generation = made["header"]["generation"]
            fields = {"id": name, "state": "handed", "generation": generation, "for_s": for_s}
            await self.send(Op("hand_over", fields))
            if self.order.random() < 0.7:
                await self._export(name, pause=False)
        if self.order.random() < 0.7:
            state = self.order.choice(("gone", "back"))
            await self.send(Op("hand_over", {"id": name, "state": state}))

    # The prefix cache.

    async def _commit(self) -> None:
        name = self.order.choice([one for one in self.own if self.at(one, 0)] or self.own)
        rows, *others = self.every(name)
        is_level = bool(rows) and {rows} == {*others} and self.rows.is_chain(rows)
        if not is_level or not self.is_certain(name):
            return
        fields: dict[str, Any] = {"id": name, "token_ids": [self.rows.tokens[row] for row in rows]}
        if self.order.random() < 0.3:
            fields |= {"priority": self.order.randint(1, 100), "duration_s": 0.5}
        found = await self.send(Op("commit", fields))
        if found is not None and found[0] == "ok":
            self.prompts = [*self.prompts[-3:], list(rows)]

    def _wanted(self) -> tuple[list[int], list[int]]:
        """Token ids like those of a prompt and some more, and their rows."""
        known = self.order.choice(self.prompts or [[]]) if self.order.random() < 0.8 else []
        tokens = [self.rows.tokens[row] for row in known] + self._tokens(4)
        return tokens, self.rows.after(0, tokens)

    async def _from_prefix(self) -> None:
        tokens, rows = self._wanted()
        new = self.extended({"id": self.order.choice(self.own), "prefix": {"token_ids": tokens}})
        await self.send(Op("create_sequences", {"sequences": [new]}, plan=rows))

    async def _match(self) -> None:
        tokens, rows = self._wanted()
        fields = {"token_ids": tokens, "lease_s": self.order.choice((0.0, 5.0, *SHORT_S))}
        await self.send(Op("match_prefix", fields, plan=rows))

    async def _release(self) -> None:
        await self._of_lease("release_lease", {})

    async def _renew(self) -> None:
        await self._of_lease("renew_lease", {"lease_s": self.order.choice(SHORT_S)})

    async def _of_lease(self, name: str, fields: dict[str, Any]) -> None:
        """About a late lease: now and then of another namespace, which it must not reach."""
        spaces = self.world.spaces if self.order.random() < 0.3 else (self.space,)
        if leases := [lease for space in spaces for lease in list(space.leases)[-3:]]:
            await self.send(Op(name, {"id": self.order.choice(leases)} | fields))

    async def _pin(self) -> None:
        if self.space.keys:
            key = self.order.choice(list(self.space.keys))
            kind = {"hard": True} if self.order.random() < 0.5 else {"soft_ttl_s": 0.1}
            await self.send(Op("pin", {"page_key": key, "hard": False} | kind))

    async def _unpin(self) -> None:
        if self.space.keys:
            key = self.order.choice(list(self.space.pins) or list(self.space.keys))
            await self.send(Op("unpin", {"page_key": key}))

    async def _quota(self) -> None:
        pages = self.rows.geometry.num_pages
        most = self.order.choice((None, None, pages // 4, pages // 2))
        kept = self.order.choice((0, 0, pages // 8, pages // 4))
        fields = {"name": self.space.name, "max_pages": most, "reserved_pages": kept}
        await self.send(Op("set_namespace", fields))

    # Orders that only a bug distinguishes.

    async def _again(self) -> None:
        """A sequence's id and length come back with other pages, between two equal decodes."""
        name, layer = self.name(), self.layer()
        fields = {"layer": layer, "sequences": [name], "cascade": "auto"}
        length = len(self.at(name, layer))
        longer = [one for one in self.held() if one != name and self.length(one) >= length]
        await self.send(Op("decode", dict(fields), {"q": self._queries(1)}))
        if not longer or not length:
            return
        await self.send(Op("delete_sequence", {"id": name}))
        new = {"id": name, "parent": self.order.choice(longer), "length": length}
        await self.send(Op("create_sequences", {"sequences": [new]}))
        await self.send(Op("decode", dict(fields), {"q": self._queries(1)}))

    async def _burst(self) -> None:
        """Tokens for one sequence, and its end or a fork, each sent before the last is answered."""
        name, layer = self.name(), self.layer()
        rows = self._behind(name, layer, self.order.randint(1, 4))
        length = self.order.randint(0, self.length(name))
        fork = {"id": self.order.choice(self.names), "parent": name, "length": length}
        calls = []
        for row in rows:
            k, v = self.rows.content([row], layer)
            fields = {"layer": layer, "sequences": [name]}
            op = Op("decode", fields, {"q": self._queries(1), "k": k, "v": v}, [[row]])
            calls.append(self.send(op))
        last = self.order.choice(
            (
                Op("truncate", {"id": name, "length": length}),
                Op("delete_sequence", {"id": name}),
                Op("create_sequences", {"sequences": [fork]}),
            )
        )
        await asyncio.gather(*calls, *([self.send(last)] if self.order.random() < 0.75 else []))
