"""Callers: random programs of calls, from a grammar that prefers what is rare in production.

A statement is a step or a generator of steps, which gets each step's answer. A step is a call,
several calls at once, or seconds of rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from service.operations.transfer import Header
from tests.world.oracle.calls import NUM_LAYERS, Answer, Every, Op, Rows, attention, call

Step = Op | list[Op] | float
Steps = Generator[Step, Answer | None, Any]

SHARED: Final = ("s0", "s1", "s2", "s3")
"""Ids that all callers of a namespace use, at the same time."""
FEW: Final = 3  # living sequences of a caller below which most statements are prompts
MAX_ROWS: Final = 14
HEADS: Final = 2
SHORT_S: Final = (0.02, 0.1, 0.5)


class Program:
    """One caller's statements. `space` is its namespace, as its oracle has it. A world adds `send`,
    which returns the answer of a call that succeeded."""

    in_cluster = False

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        self.rows: Rows = world.rows
        self.space: Any = world.spaces[number % len(world.spaces)]
        self.order = random.Random(f"{world.plan.seed} caller {number}")
        self.own = (f"p{number}.a", f"p{number}.b", f"p{number}.c")
        self.exports: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []  # rows of those that were committed
        self.weights = {name: some[self.in_cluster] for name, some in STATEMENTS.items()}
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """All statements, some before the one before them has ended."""
        world = self.world
        for number in range(world.plan.statements):
            if (name := self.chosen(number)) is None:
                continue
            order = self.order
            together = not self.in_cluster and order.random() < 0.4
            together = together and name not in ("commit", "commit_many", "named", "rest")
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

    def chosen(self, number: int) -> str | None:
        """The name of the next statement, after what strikes before it; None if it is left out."""
        plan = self.world.plan
        if plan.callers * number + self.number in plan.skipped:
            return None
        order = self.order = random.Random(f"{plan.seed} {self.number} {number}")
        held = self.space.held
        living = sum(any(held[name].rows) for name in self.names if name in held)
        name = "prompt"
        if living >= FEW or order.random() >= 0.5:
            (name,) = order.choices(list(self.weights), list(self.weights.values()))
        if plan.faults:
            self.world.strike(self)
        return name

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(error)

    async def statement(self, name: str) -> None:
        self.world.note(f"caller {self.number}: {name}")
        await self.take(self.made(name))

    def made(self, name: str) -> Step | Steps:
        return STATEMENTS[name][-1](self)

    async def take(self, step: Step | Steps) -> Answer | None:
        """Takes a step; returns the answer of a single call that succeeded."""
        answer = None
        if isinstance(step, Op):
            answer = await self.send(step)
        elif isinstance(step, list):
            await asyncio.gather(*map(self.send, step))
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            with suppress(StopIteration):
                while True:
                    answer = await self.take(step.send(answer))
        return answer

    async def gather_all(self, name: str) -> None:
        """All rows of a sequence, at each layer."""
        for layer in range(NUM_LAYERS):
            await self.send(call("gather", layer=layer, sequences=[name], dtype="fp32"))

    @property
    def names(self) -> tuple[str, ...]:
        return SHARED + self.own

    def name(self) -> str:
        """An id: mostly of a sequence that is there."""
        living = [name for name in self.space.held if name[0] != "p" or name in self.own]
        if living and self.order.random() < 0.95:
            return self.order.choice(living)
        return self.order.choice(self.names)

    def some(self) -> list[str]:
        return sorted({self.name() for _ in range(self.order.choice((1, 2, 3, 5)))})

    def free(self) -> list[str]:
        return [name for name in self.names if name not in self.space.held]

    def every(self, name: str) -> Every:
        held = self.space.held
        return held[name].rows if name in held else ((),) * NUM_LAYERS

    def at(self, name: str, layer: int) -> tuple[int, ...]:
        return self.every(name)[layer]

    def length(self, name: str) -> int:
        return min(map(len, self.every(name)))

    def layer(self) -> int:
        return self.order.randrange(NUM_LAYERS)

    def pause(self) -> float:
        return self.order.choice((0.0, 0.001, 0.01, 0.1, 0.1, 0.7, 3.0))

    def tokens(self, count: int) -> list[int]:
        return [self.order.randrange(2) for _ in range(count)]

    def queries(self, count: int) -> Any:
        geometry = self.rows.geometry
        shape = (count, HEADS * geometry.num_kv_heads, geometry.head_dim)
        return np.random.default_rng(self.order.getrandbits(32)).standard_normal(shape, np.float32)

    def flags(self, shape: tuple[int, ...]) -> Any:
        return np.random.default_rng(self.order.getrandbits(32)).random(shape) < 0.6

    def behind(self, name: str, layer: int, count: int) -> list[int]:
        """Rows behind what a sequence holds now, as far as they fit."""
        rows = self.at(name, layer)
        tokens = self.tokens(max(0, min(count, MAX_ROWS - len(rows))))
        return self.rows.after((rows or (0,))[-1], tokens)

    def is_certain(self, name: str) -> bool:
        """Whether it knows the rows of a sequence before a call about it."""
        return not self.in_cluster or (name in self.own and self.space.is_certain(name))

    def creation(self, *every: dict[str, Any], plan: Any = None) -> Op:
        return Op("create_sequences", {"sequences": [*map(self.extended, every)]}, plan=plan)

    def extended(self, new: dict[str, Any]) -> dict[str, Any]:
        """A new sequence, now and then a short-lived one, one with a reserve, or without an id."""
        draw = self.order.random()
        if not self.in_cluster:
            new = new | {"reserve": int(100 * draw) - 84} if draw > 0.85 else new
            if new.keys() <= {"id", "reserve"} and draw > 0.3:
                new = new | {"prefix": {"token_ids": []}}
            return new | {"ttl_s": self.order.choice(SHORT_S)} if draw < 0.12 else new
        return {} if draw < 0.1 and new.keys() == {"id"} else new

    def create(self) -> Op:
        names = sorted({self.order.choice(self.names) for _ in range(self.order.randint(1, 2))})
        new: list[dict[str, Any]] = [{"id": name} for name in names]
        if len(new) > 1 and self.order.random() < 0.3 and not self.in_cluster:
            new[1]["parent"] = self.name()
        return self.creation(*new)

    def prompt(self) -> Steps:
        """A sequence that holds rows at every layer."""
        free = self.free()
        name = self.order.choice(free) if free else self.name()
        if free:
            yield self.creation({"id": name})
        yield self.append([name], self.order.randint(1, 9))

    def fork(self) -> Op:
        parent = self.name()
        new: dict[str, Any] = {"id": self.order.choice(self.free() or SHARED), "parent": parent}
        if self.order.random() < 0.7:
            most = self.length(parent) + (self.order.random() < 0.05)
            new["length"] = self.order.randint(0, most)
        return self.creation(new)

    def truncate(self, keeps: bool = False) -> Op:
        """A cut; `keeps`: of a tree of drafts, of which some are accepted."""
        name = self.name()
        length = self.length(name)
        op = call("truncate", id=name, length=self.order.randint(0, length))
        if not keeps and not self.in_cluster and self.order.random() < 0.2:
            op.fields["layer"] = layer = self.layer()
            op.fields["length"] = self.order.randint(0, len(self.at(name, layer)))
        if keeps:
            behind = range(op.fields["length"], length)
            op.fields["keep"] = [at for at in behind if self.order.random() < 0.5]
        return op

    def sweep(self) -> Op:
        """Several sequences are deleted."""
        if self.in_cluster:
            return call("delete_sequences", ids=sorted(set(self.order.choices(self.names, k=3))))
        return call("delete_sequences", prefix=self.order.choice(("s0", "s1", "s", "none")))

    def append(self, names: list[str] | None = None, count: int | None = None) -> Op:
        names, layer = names or self.some(), self.layer()
        uneven = [name for name in names if len(set(self.every(name))) > 1]
        if uneven and self.order.random() < 0.8:  # its shorter layer gets what it lacks
            names, every = uneven[:1], self.every(uneven[0])
            short, long = sorted(every, key=len)
            layer, rows = every.index(short), [list(long[len(short) :])]
        else:
            counts = [count or self.order.choice((0, 1, 1, 2, 5)) for _ in names]
            each = zip(names, counts, strict=True)
            rows = [self.behind(name, layer, count) for name, count in each]
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        fields: dict[str, Any] = {"sequences": names, "append_indptr": ends}
        flat = [row for some in rows for row in some]
        if not uneven and self.order.random() < 0.8:
            fields["layers"] = list(range(NUM_LAYERS))
            made = [self.rows.content(flat, each) for each in fields["layers"]]
            k, v = np.stack(made, axis=1)
        else:
            fields["layer"] = layer
            k, v = self.rows.content(flat, layer)
        if self.order.random() < 0.5:
            fields["offsets"] = [len(self.at(name, layer)) for name in names]
            fields["offsets"][-1] += self.order.random() < 0.15
        return Op("append", fields, {"k": k, "v": v}, rows)

    def attending(
        self, name: str, layer: int, sequences: list[str], q: Any, rows: list[Any], **more: Any
    ) -> Op:
        """Attention of `q`, which may bring rows; `more` are other fields."""
        tensors, flat = {"q": q}, [row for some in rows for row in some]
        if rows:
            tensors["k"], tensors["v"] = self.rows.content(flat, layer)
        return Op(name, {"layer": layer, "sequences": sequences, **more}, tensors, rows)

    def decode(self) -> Op:
        names, layer = self.some(), self.layer()
        cascade, q = self.order.choice(("auto", "always", "never")), self.queries(len(names))
        fits = all(len(self.at(name, layer)) < MAX_ROWS for name in names)
        is_step = fits and self.order.random() < 0.6
        rows = [self.behind(name, layer, 1) for name in names] if is_step else []
        return self.attending("decode", layer, names, q, rows, cascade=cascade)

    def prompts_of(self, counts: list[int]) -> list[list[int]]:
        return [self.rows.after(0, self.tokens(count)) for count in counts]

    def ragged(self) -> Op:
        """Prefill over K and V that come with it."""
        counts = [self.order.randint(1, 4) for _ in range(self.order.randint(1, 3))]
        every = self.prompts_of(counts)
        ends = np.cumsum([0, *counts]).tolist()
        k, v = self.rows.content([row for rows in every for row in rows], 0)
        fields = {"qo_indptr": ends, "kv_indptr": ends, "causal": False}
        q = self.queries(ends[-1])
        return Op("ragged_prefill", fields, {"q": q, "k": k, "v": v}, plan=every)

    def merge(self) -> Op:
        """States of two parts of each row's keys."""
        every, layer = self.prompts_of([self.order.randint(2, 6) for _ in range(2)]), 0
        q, states = self.queries(len(every)), list[Any]()
        for at, rows in enumerate(every):
            cut = self.order.randint(1, len(rows) - 1)
            for part in (rows[:cut], rows[cut:]):
                states.append(attention(q[at : at + 1], self.rows.content(part, layer)))
        o, lse = (
            np.stack(some).astype(np.float32).reshape(len(every), 2, *some[0].shape[1:])
            for some in zip(*states, strict=True)
        )
        return Op("merge", {"lse_base": "e"}, {"o": o, "lse": lse}, plan=(q, every))

    def cascade(self) -> Op:
        """Rows that share a sequence, and have one more each."""
        first, *others = [self.name() for _ in range(3)]
        count = len(others)
        levels = [
            {"sequences": [first], "qo_indptr": [0, count]},
            {"sequences": others, "qo_indptr": list(range(count + 1))},
        ]
        fields = {"layer": self.layer(), "levels": levels}
        return Op("cascade", fields, {"q": self.queries(count)})

    def drain(self) -> Steps:
        """An engine that takes no new sequences for some time; without others, none moves."""
        yield call("drain_engine", name="engine", stop=False)
        yield self.pause()
        while (yield call("drain_engine", name="engine", stop=True)) is None:
            yield 0.1

    def step(self, names: list[str] | None = None) -> Op:
        """A token of each sequence at every layer, or none, on the session's lane; now and then
        some tokens of two sequences, under a mask."""
        is_masked = names is None and self.order.random() < 0.4
        names, layers = names or self.some(), list(range(NUM_LAYERS))
        names = names[:2] if is_masked else names
        counts = [self.order.randint(1, 3) if is_masked else 1 for _ in names]
        fits = all(len(self.at(n, 0)) + c <= MAX_ROWS for n, c in zip(names, counts, strict=True))
        appends = fits and not (is_masked and self.order.random() < 0.2)
        each = zip(names, counts, strict=True)
        rows = [self.behind(name, 0, count) for name, count in each] if appends else []
        fields: dict[str, Any] = {"layers": layers, "sequences": names, "append": bool(rows)}
        fields["num_qo_heads"] = HEADS * self.rows.geometry.num_kv_heads
        if rows and self.order.random() < 0.5:
            fields["offsets"] = [len(self.at(name, 0)) for name in names]
        flat = [row for some in rows for row in some]
        content = [self.rows.content(flat, layer) for layer in layers]
        tensors = {"q": [self.queries(sum(counts)) for _ in layers]}
        tensors |= {"k": [k for k, _ in content], "v": [v for _, v in content]}
        fields |= {"op": "decode", "dtype": "F32"}
        if not is_masked:
            return Op("step", fields, tensors, rows)
        fields |= {"op": "prefill", "qo_indptr": np.cumsum([0, *counts]).tolist()}
        fields["causal"] = self.order.random() < 0.5
        masks = [self.flags((count, count)) for count in counts]
        return Op("step", fields, tensors, rows, plan=masks)

    def prefill(self) -> Steps:
        name, layer = self.name(), self.layer()
        if rows := self.behind(name, layer, self.order.randint(1, 5)):
            q, ends = self.queries(len(rows)), [0, len(rows)]
            yield self.attending("prefill", layer, [name], q, [rows], causal=True, qo_indptr=ends)

    def again(self) -> Steps:
        """A sequence's id and length come back with other pages, between two equal decodes."""
        name, layer = self.name(), self.layer()
        length = len(self.at(name, layer))
        longer = [one for one in self.space.held if one != name and self.length(one) >= length]
        yield self.attending("decode", layer, [name], self.queries(1), [], cascade="auto")
        if longer and length:
            yield call("delete_sequence", id=name)
            new = {"id": name, "parent": self.order.choice(longer), "length": length}
            yield call("create_sequences", sequences=[new])
            yield self.attending("decode", layer, [name], self.queries(1), [], cascade="auto")

    def burst(self) -> list[Op]:
        """Tokens for one sequence, and its end or a fork, each sent before the last is answered."""
        name, layer = self.name(), self.layer()
        rows = self.behind(name, layer, self.order.randint(1, 4))
        length = self.order.randint(0, self.length(name))
        fork = {"id": self.order.choice(self.names), "parent": name, "length": length}
        calls = [self.attending("decode", layer, [name], self.queries(1), [[row]]) for row in rows]
        lasts = (
            call("truncate", id=name, length=length),
            call("delete_sequence", id=name),
            call("create_sequences", sequences=[fork]),
        )
        last = self.order.choice(lasts)
        return [*calls, last] if self.order.random() < 0.75 else calls

    def export(self) -> Steps:
        name = self.name()
        if not self.is_certain(name):
            return
        begun = call("export_sequence", id=name, part_bytes=self.order.choice((1, 200, 2**20)))
        if (answer := (yield begun)) is None:
            return
        found, names = answer
        header, digests, parts = Header(**found["header"]), [found["digest"]], []
        for number in range(header.num_parts):
            if self.order.random() < 0.3:
                yield self.pause()
            part, size = header.part(number), header.page_size
            spans = [
                (layer, part.first_page * size, min(part.last_page * size, header.lengths[layer]))
                for layer in range(part.first_layer, part.last_layer)
            ]
            wanted = call("export_sequence", id=name, part=number, before=digests[-1])
            wanted.fields |= {one: found["header"][one] for one in ("generation", "part_bytes")}
            wanted.plan = [span for span in spans if span[2] > span[1]]
            if (answer := (yield wanted)) is None:
                return
            digests.append(answer[0]["digest"])
            parts.append(answer[1])
        plan = {"rows": begun.seen, "ttl_s": header.ttl_s}
        made = {"header": found["header"], "digests": digests, "parts": parts, "plan": plan}
        self.exports = [*self.exports[-1:], made | {"names": names}]

    def import_(self) -> Steps:
        if not self.exports:
            yield from self.export()
        if not self.exports:
            return
        source = self.order.choice(self.exports)
        header, digests, name = source["header"], source["digests"], self.order.choice(self.names)

        def bring(fields: dict[str, Any], tensors: dict[str, Any]) -> Op:
            return Op("import_sequence", {"id": name} | fields, tensors, plan=source["plan"])

        idle_s = self.order.choice((0.05, 1.0))
        begin = {"header": dict(header), "digest": digests[0], "idle_s": idle_s}
        first = answer = yield bring(begin, source["names"])
        while answer is not None and (number := answer[0]["next_part"]) < header["num_parts"]:
            if self.order.random() < 0.2:
                yield self.pause()
            if self.order.random() < 0.05:
                yield call("cancel_import", id=name)
                return
            fields = {"part": number, "digest": digests[number + 1]}
            if answer is first and answer[0]["digest"] is None:
                fields["before"] = digests[number]
            answer = yield bring(fields, source["parts"][number])
        if answer is not None:
            yield bring({"digest": digests[-1]}, {})

    def commit(self) -> Steps:
        name = self.order.choice([one for one in self.own if self.at(one, 0)] or self.own)
        rows, *others = self.every(name)
        is_level = bool(rows) and {rows} == {*others} and self.rows.is_chain(rows)
        if not is_level or not self.is_certain(name):
            return
        fields: dict[str, Any] = {"id": name, "token_ids": [self.rows.tokens[row] for row in rows]}
        if self.order.random() < 0.3:
            fields |= {"priority": self.order.randint(1, 100), "duration_s": 0.5}
        if (yield Op("commit", fields)) is not None:
            self.prompts = [*self.prompts[-3:], list(rows)]

    def named(self) -> Steps:
        """Rows of a sequence with a chain of keys, whose ids come with a layer's rows, or when some
        of them are accepted; pages get their names by themselves."""
        name, draw = self.order.choice(self.own), self.order.random
        if name not in self.space.held:
            yield self.creation({"id": name, "prefix": {"token_ids": []}})
        if (answer := (yield call("get_sequence", id=name))) is None:
            return
        known, (rows, *others) = answer[0]["known_len"], self.every(name)
        is_level = {rows} == {*others} and self.rows.is_chain(rows) and known <= len(rows)
        has_chain = name in self.space.held and self.space.lives[name].has_chain
        if not is_level or not has_chain or not self.is_certain(name):
            return
        new = self.behind(name, 0, self.order.randint(1, 5))
        ids = {"token_ids": [self.rows.tokens[row] for row in (*rows[known:], *new)]}
        accepts, is_step = draw() < 0.3, draw() < 0.3
        if is_step and (op := self.step([name])).rows:
            new = op.rows[0]
            ids["token_ids"] = [self.rows.tokens[row] for row in (*rows[known:], *new)]
            op.fields |= {} if accepts else ids
            every = [op]
        else:
            every = [self.written(name, layer, new) for layer in self.order.sample(range(2), 2)]
            every[self.order.randrange(2)].fields.update({} if accepts else ids)
        for op in every:
            if (yield op) is None:
                return
            if draw() < 0.4:
                yield call("get_sequence", id=name)
        if accepts:
            kept = [at for at in range(len(new)) if draw() < 0.6]
            chain = self.rows.is_chain([*rows, *(new[at] for at in kept)])
            ids["token_ids"][len(rows) - known :] = [self.rows.tokens[new[at]] for at in kept]
            keep = [len(rows) + at for at in kept]
            more = {"token_ids": ids["token_ids"]} if chain else {}
            yield call("truncate", id=name, length=len(rows), keep=keep, **more)
        self.prompts = [*self.prompts[-3:], list(self.at(name, 0))]

    def written(self, name: str, layer: int, rows: list[int]) -> Op:
        """Rows of a sequence at one layer: appended, or attended as well."""
        ends = [0, len(rows)]
        if self.order.random() < 0.5:
            q = self.queries(len(rows))
            return self.attending("prefill", layer, [name], q, [rows], causal=True, qo_indptr=ends)
        k, v = self.rows.content(rows, layer)
        fields = {"sequences": [name], "append_indptr": ends, "layer": layer}
        return Op("append", fields, {"k": k, "v": v}, [rows])

    def commit_many(self) -> Steps:
        """Several sequences, all or none: now and then one has pages of other names already."""
        level = [one for one in self.own if len({*self.every(one)}) == 1 and self.at(one, 0)]
        names = [one for one in level if self.rows.is_chain(self.at(one, 0))]
        tokens = [[self.rows.tokens[row] for row in self.at(name, 0)] for name in names]
        named = [at for at, name in enumerate(names) if self.space.lives[name].committed]
        if named and self.order.random() < 0.5:
            tokens[named[-1]] = [1 - tokens[named[-1]][0], *tokens[named[-1]][1:]]
        if names:
            flat = [token for some in tokens for token in some]
            fields = {"sequences": names, "token_ids": flat}
            fields["names_indptr"] = np.cumsum([0, *map(len, tokens)]).tolist()
            if (yield Op("commit_sequences", fields, plan=tokens)) is None:
                prompt, rows = tokens[0], self.rows.after(0, tokens[0])
                yield Op("match_prefix", {"token_ids": prompt, "lease_s": 0.0}, plan=rows)

    def cut_many(self) -> Op:
        """Several truncations, all or none."""
        names = self.some()
        lengths = [self.order.randint(0, self.length(name)) for name in names]
        lengths[-1] += 20 * (self.order.random() < 0.2)
        return call("truncate_sequences", sequences=names, lengths=lengths)

    def wanted(self) -> tuple[list[int], list[int]]:
        """Token ids like those of a prompt and some more, and their rows."""
        known = self.order.choice(self.prompts or [[]]) if self.order.random() < 0.8 else []
        tokens = [self.rows.tokens[row] for row in known] + self.tokens(4)
        return tokens, self.rows.after(0, tokens)

    def from_prefix(self) -> Op:
        tokens, rows = self.wanted()
        new = {"id": self.order.choice(self.own), "prefix": {"token_ids": tokens}}
        return self.creation(new, plan=rows)

    def match(self, name: str = "match_prefix") -> Op:
        tokens, rows = self.wanted()
        fields: dict[str, Any] = {"token_ids": tokens}
        if name == "match_prefix":
            fields["lease_s"] = self.order.choice((0.0, 5.0, *SHORT_S))
        return Op(name, fields, plan=rows)

    def of_lease(self, name: str, **fields: Any) -> Steps:
        """About a late lease: now and then of another namespace, which it must not reach."""
        spaces = self.world.spaces if self.order.random() < 0.3 else (self.space,)
        if leases := [lease for space in spaces for lease in list(space.leases)[-3:]]:
            yield call(name, id=self.order.choice(leases), **fields)

    def pin(self) -> Steps:
        if self.space.keys:
            key = self.order.choice(list(self.space.keys))
            kind = {"hard": True} if self.order.random() < 0.5 else {"soft_ttl_s": 0.1}
            yield Op("pin", {"page_key": key, "hard": False} | kind)

    def unpin(self) -> Steps:
        if keys := list(self.space.pins) or list(self.space.keys):
            yield call("unpin", page_key=self.order.choice(keys))

    def quota(self) -> Op:
        pages = self.rows.geometry.num_pages
        most = self.order.choice((None, None, pages // 4, pages // 2))
        kept = self.order.choice((0, 0, pages // 8, pages // 4))
        return call("set_namespace", name=self.space.name, max_pages=most, reserved_pages=kept)


STATEMENTS: Final[dict[str, tuple[int, int, Callable[[Program], Step | Steps]]]] = {
    "create": (3, 10, Program.create),
    "prompt": (8, 4, Program.prompt),
    "fork": (9, 8, Program.fork),
    "append": (12, 18, Program.append),
    "decode": (12, 12, Program.decode),
    "step": (8, 0, Program.step),
    "prefill": (4, 0, Program.prefill),
    "ragged": (1, 1, Program.ragged),
    "merge": (1, 1, Program.merge),
    "cascade": (2, 0, Program.cascade),
    "gather": (4, 10, lambda p: call("gather", layer=p.layer(), sequences=p.some(), dtype="fp32")),
    "truncate": (6, 6, Program.truncate),
    "keep": (3, 0, lambda p: p.truncate(keeps=True)),
    "delete": (3, 5, lambda p: call("delete_sequence", id=p.name())),
    "sweep": (1, 2, Program.sweep),
    "look": (3, 6, lambda p: call("get_sequence", id=p.name())),
    "list": (1, 0, lambda _: call("list_sequences")),
    "pool": (1, 0, lambda _: call("pool")),
    "snapshot": (1, 0, lambda _: call("snapshot")),
    "engines": (1, 1, lambda _: call("engines")),
    "drain": (1, 0, Program.drain),
    "page_table": (1, 0, lambda p: call("page_table", sequences=p.some(), layer=p.layer())),
    "export": (3, 1, Program.export),
    "import": (4, 4, Program.import_),
    "commit": (6, 10, Program.commit),
    "from_prefix": (4, 3, Program.from_prefix),
    "match": (5, 1, Program.match),
    "commit_many": (4, 0, Program.commit_many),
    "named": (6, 0, Program.named),
    "cut_many": (2, 0, Program.cut_many),
    "prefetch": (2, 0, lambda p: p.match("prefetch")),
    "get_import": (1, 0, lambda p: call("get_import", id=p.name())),
    "namespaces": (1, 0, lambda _: call("list_namespaces")),
    "info": (1, 0, lambda _: call("info")),
    "release": (4, 1, lambda p: p.of_lease("release_lease")),
    "renew": (2, 0, lambda p: p.of_lease("renew_lease", lease_s=p.order.choice(SHORT_S))),
    "holds": (1, 0, lambda _: call("holds")),
    "pin": (2, 0, Program.pin),
    "unpin": (2, 0, Program.unpin),
    "quota": (1, 0, Program.quota),
    "usage": (1, 0, lambda p: call("get_namespace", name=p.space.name)),
    "again": (3, 0, Program.again),
    "burst": (4, 0, Program.burst),
    "evict": (1, 0, lambda p: call("evict", num_pages=p.order.randint(1, 6))),
    "clear": (1, 0, lambda _: call("clear")),
    "rest": (4, 8, lambda p: p.pause()),
}
"""Statements, their weights with one engine and in a cluster, and what makes their calls."""
