"""Callers: random programs of calls, from a grammar that prefers what is rare in production."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kernels.backend import PoolGeometry
from service.operations.transfer import Header
from tests.world.model import Model, Namespace, Op

GRAMMAR: Final = {
    "create": 3,
    "prompt": 8,
    "fork": 9,
    "append": 12,
    "decode": 12,
    "prefill": 4,
    "gather": 4,
    "truncate": 6,
    "keep": 3,
    "delete": 3,
    "sweep": 1,
    "look": 3,
    "list": 1,
    "pool": 1,
    "page_table": 1,
    "export": 3,
    "import": 4,
    "hand_over": 5,
    "commit": 6,
    "from_prefix": 4,
    "match": 5,
    "release": 4,
    "renew": 2,
    "holds": 1,
    "pin": 2,
    "unpin": 2,
    "quota": 1,
    "usage": 1,
    "again": 3,
    "burst": 4,
    "evict": 1,
    "rest": 4,
}
"""The statements of a program and their weights."""
SHARED: Final = ("s0", "s1", "s2", "s3")
"""Ids that all callers of a namespace use, at the same time."""
FEW: Final = 3
"""Living sequences of a caller below which most statements are prompts."""
MAX_ROWS: Final = 14
TOKENS: Final = 2
HEADS: Final = 2
SHORT_S: Final = (0.02, 0.1, 0.5)

Send = Callable[[Op], Any]


class Program:
    """One caller's statements. `send` returns (code, fields, tensors) of a call's answer."""

    def __init__(
        self, model: Model, space: Namespace, number: int, order: random.Random, send: Send
    ) -> None:
        self.model, self.space, self.order, self.send = model, space, order, send
        self.geometry: PoolGeometry = model.geometry
        self.own = (f"p{number}.a", f"p{number}.b")
        self.names = SHARED + self.own
        self.exports: list[dict[str, Any]] = []

    async def statement(self, name: str) -> None:
        await getattr(self, f"_{name}")()

    def draw(self) -> str:
        living = sum(one.length > 0 for one in map(self.space.sequences.get, self.names) if one)
        if living < FEW and self.order.random() < 0.5:
            return "prompt"
        return self.order.choices(list(GRAMMAR), list(GRAMMAR.values()))[0]

    # What to choose from.

    def _name(self) -> str:
        """An id: mostly of a sequence that is there."""
        living = [name for name in self.names if name in self.space.sequences]
        if living and self.order.random() < 0.95:
            return self.order.choice(living)
        return self.order.choice(self.names)

    def _names(self) -> list[str]:
        return sorted({self._name() for _ in range(self.order.choice((1, 1, 2, 3)))})

    def _held(self, name: str, layer: int) -> list[int]:
        found = self.space.sequences.get(name)
        return found.rows[layer] if found is not None else []

    def _layer(self) -> int:
        return self.order.randrange(self.geometry.num_layers)

    def _tokens(self, count: int) -> list[int]:
        return [self.order.randrange(TOKENS) for _ in range(count)]

    def _is_level(self, name: str) -> bool:
        """Whether a sequence holds the same rows at every layer."""
        return all(rows == self._held(name, 0) for rows in self._every(name))

    def _room(self, name: str, layer: int, count: int | None) -> int:
        """Rows to append: `count` or few, as far as they fit."""
        count = self.order.choice((0, 1, 1, 2, 5)) if count is None else count
        return max(0, min(count, MAX_ROWS - len(self._held(name, layer))))

    def _queries(self, count: int) -> Any:
        shape = (count, HEADS * self.geometry.num_kv_heads, self.geometry.head_dim)
        return np.random.default_rng(self.order.getrandbits(32)).standard_normal(shape, np.float32)

    def _appended(self, names: list[str], layer: int, counts: list[int]) -> list[list[int]]:
        """Rows behind what the sequences hold now."""
        return [
            self.model.rows.after((self._held(name, layer) or [0])[-1], self._tokens(count))
            for name, count in zip(names, counts, strict=True)
        ]

    def _ttl(self, new: dict[str, Any]) -> dict[str, Any]:
        if self.order.random() < 0.12:
            new["ttl_s"] = self.order.choice(SHORT_S)
        return new

    # Statements.

    async def _rest(self) -> None:
        await asyncio.sleep(self.order.choice((0.0, 0.001, 0.01, 0.1, 0.1, 0.7, 3.0)))

    async def _create(self) -> None:
        names = self._names()
        names = [self.order.choice(self.names)] if len(names) == 1 else names
        new = [self._ttl({"id": name}) for name in names]
        if len(new) > 1 and self.order.random() < 0.3:
            new[1]["parent"] = self._name()
        await self.send(Op("create_sequences", {"sequences": new}))

    async def _prompt(self) -> None:
        """A sequence that holds rows at every layer."""
        free = [name for name in self.names if name not in self.space.sequences]
        name = self.order.choice(free) if free else self._name()
        if free:
            await self.send(Op("create_sequences", {"sequences": [self._ttl({"id": name})]}))
        await self._append([name], self.order.randint(1, 9))

    async def _fork(self) -> None:
        parent = self._name()
        held = self.space.sequences.get(parent)
        free = [name for name in self.names if name not in self.space.sequences]
        new: dict[str, Any] = {"id": self.order.choice(free or SHARED), "parent": parent}
        if held is not None and self.order.random() < 0.7:
            new["length"] = self.order.randint(0, held.length + (self.order.random() < 0.05))
        await self.send(Op("create_sequences", {"sequences": [self._ttl(new)]}))

    async def _append(self, names: list[str] | None = None, count: int | None = None) -> None:
        names, layer = names or self._names(), self._layer()
        uneven = [
            name for name in names if any(r != self._held(name, 0) for r in self._every(name))
        ]
        if uneven and self.order.random() < 0.8:  # its shorter layer gets what it lacks
            names, every = uneven[:1], self._every(uneven[0])
            short, long = sorted(every, key=len)
            layer, rows = every.index(short), [long[len(short) :]]
        else:
            rows = self._appended(names, layer, [self._room(name, layer, count) for name in names])
        counts = list(map(len, rows))
        ends = np.cumsum([0, *counts]).tolist()
        fields: dict[str, Any] = {"sequences": names, "append_indptr": ends}
        flat = [row for each in rows for row in each]
        layers = range(self.geometry.num_layers)
        if not uneven and self.order.random() < 0.8:
            fields["layers"] = list(layers)
            made = [self.model.rows.content(flat, each) for each in layers]
            k, v = (np.stack([each[half] for each in made]) for half in (0, 1))
        else:
            fields["layer"] = layer
            k, v = self.model.rows.content(flat, layer)
        if self.order.random() < 0.3:
            fields["offsets"] = [len(self._held(name, layer)) for name in names]
        await self.send(Op("append", fields, {"k": k, "v": v}, rows))

    async def _decode(self) -> None:
        names, layer = self._names(), self._layer()
        fields: dict[str, Any] = {"layer": layer, "sequences": names}
        fields["cascade"] = self.order.choice(("auto", "always", "never"))
        tensors = {"q": self._queries(len(names))}
        rows: list[list[int]] = []
        fits = all(len(self._held(name, layer)) < MAX_ROWS for name in names)
        if fits and self.order.random() < 0.6:
            rows = self._appended(names, layer, [1] * len(names))
            flat = [row for each in rows for row in each]
            tensors["k"], tensors["v"] = self.model.rows.content(flat, layer)
        await self.send(Op("decode", fields, tensors, rows))

    async def _prefill(self) -> None:
        name, layer = self._name(), self._layer()
        count = min(self.order.randint(1, 5), MAX_ROWS - len(self._held(name, layer)))
        if count < 1:
            return
        rows = self._appended([name], layer, [count])
        k, v = self.model.rows.content(rows[0], layer)
        fields = {"layer": layer, "sequences": [name], "qo_indptr": [0, count], "causal": True}
        await self.send(Op("prefill", fields, {"q": self._queries(count), "k": k, "v": v}, rows))

    async def _gather(self) -> None:
        fields = {"layer": self._layer(), "sequences": self._names(), "dtype": "fp32"}
        await self.send(Op("gather", fields))

    async def _truncate(self) -> None:
        name = self._name()
        length = min((len(rows) for rows in self._every(name)), default=0)
        await self.send(Op("truncate", {"id": name, "length": self.order.randint(0, length)}))

    def _every(self, name: str) -> list[list[int]]:
        found = self.space.sequences.get(name)
        return found.rows if found is not None else []

    async def _keep(self) -> None:
        """A tree of drafts, of which some are accepted."""
        name = self._name()
        length = min((len(rows) for rows in self._every(name)), default=0)
        cut = self.order.randint(0, length)
        keep = [at for at in range(cut, length) if self.order.random() < 0.5]
        await self.send(Op("truncate", {"id": name, "length": cut, "keep": keep}))

    async def _delete(self) -> None:
        await self.send(Op("delete_sequence", {"id": self._name()}))

    async def _sweep(self) -> None:
        await self.send(
            Op("delete_sequences", {"prefix": self.order.choice(("s0", "s1", "s", "none"))})
        )

    async def _look(self) -> None:
        await self.send(Op("get_sequence", {"id": self._name()}))

    async def _list(self) -> None:
        await self.send(Op("list_sequences", {}))

    async def _pool(self) -> None:
        await self.send(Op("pool", {}))

    async def _page_table(self) -> None:
        await self.send(Op("page_table", {"sequences": self._names(), "layer": self._layer()}))

    async def _evict(self) -> None:
        await self.send(Op("evict", {"num_pages": self.order.randint(1, 6)}))

    # Moving.

    async def _export(self, name: str | None = None, pause: bool = True) -> dict[str, Any] | None:
        name = name or self._name()
        rows = [list(one) for one in self._every(name)]
        part_bytes = self.order.choice((1, 200, 2**20))
        found = await self.send(Op("export_sequence", {"id": name, "part_bytes": part_bytes}))
        if found is None or found[0] != "ok":
            return None
        reply, names = found[1], found[2]
        header = reply["header"]
        if [len(one) for one in rows] != header["lengths"]:
            rows = []  # changed since: its rows are not known here
        parsed, digests, parts = Header(**header), [reply["digest"]], []
        for number in range(parsed.num_parts):
            if pause and self.order.random() < 0.3:
                await self._rest()
            part, size = parsed.part(number), parsed.page_size
            spans = [
                (layer, part.first_page * size, min(part.last_page * size, parsed.lengths[layer]))
                for layer in range(part.first_layer, part.last_layer)
            ]
            fields = {
                "id": name,
                "part": number,
                "generation": parsed.generation,
                "before": digests[-1],
                "part_bytes": parsed.part_bytes,
            }
            plan = [span for span in spans if span[2] > span[1]]
            found = await self.send(Op("export_sequence", fields, plan=plan))
            if found is None or found[0] != "ok":
                return None
            digests.append(found[1]["digest"])
            parts.append({part: np.array(value) for part, value in found[2].items()})
        made = {"header": header, "digests": digests, "parts": parts, "rows": rows, "names": names}
        if rows:
            self.exports = [*self.exports[-1:], made]
        return made

    async def _import(self) -> None:
        if not self.exports:
            await self._export()
        if not self.exports:
            return
        source = self.order.choice(self.exports)
        header, digests = dict(source["header"]), source["digests"]
        name = self.order.choice(self.names)
        plan = {
            "pages": -(-max(header["lengths"]) // self.geometry.page_size),
            "rows": source["rows"],
            "ttl_s": header["ttl_s"] or float("inf"),
        }
        idle_s = self.order.choice((0.05, 1.0))
        begin = {"id": name, "header": header, "digest": digests[0], "idle_s": idle_s}
        found = await self.send(Op("import_sequence", begin, source["names"], plan=plan))
        if found is None or found[0] != "ok":
            return
        number = found[1]["next_part"]
        while number < header["num_parts"]:
            if self.order.random() < 0.2:
                await self._rest()
            if self.order.random() < 0.05:
                await self.send(Op("cancel_import", {"id": name}))
                return
            fields = {"id": name, "part": number, "digest": digests[number + 1]}
            if number == found[1]["next_part"] and found[1]["digest"] is None:
                fields["before"] = digests[number]
            made = await self.send(
                Op("import_sequence", fields, source["parts"][number], plan=plan)
            )
            if made is None or made[0] != "ok":
                return
            number = made[1]["next_part"]
        await self.send(Op("import_sequence", {"id": name, "digest": digests[-1]}, plan=plan))

    async def _hand_over(self) -> None:
        """A sequence leaves for another engine, while others go on calling."""
        name, for_s = self._name(), self.order.choice((0.0002, 0.002, 0.05, 0.3))
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
        name = self.order.choice([one for one in self.own if self._held(one, 0)] or self.own)
        rows = self._held(name, 0)
        if not rows or not self._is_level(name) or not self.model.rows.is_chain(rows):
            return
        tokens = [self.model.rows.tokens[row] for row in rows]
        fields: dict[str, Any] = {"id": name, "token_ids": tokens}
        if self.order.random() < 0.3:
            fields |= {"priority": self.order.randint(1, 100), "duration_s": 0.5}
        await self.send(Op("commit", fields))

    def _token_ids(self) -> list[int]:
        """Token ids like those of a sequence that is there, and some more."""
        chains = [
            one.rows[0]
            for one in self.space.sequences.values()
            if one.committed and self.model.rows.is_chain(one.rows[0])
        ]
        chains += [rows for rows, *_ in self.space.leases.values()]
        known = self.order.choice(chains) if chains and self.order.random() < 0.8 else []
        return [self.model.rows.tokens[row] for row in known] + self._tokens(4)

    async def _from_prefix(self) -> None:
        name = self.order.choice(self.names)
        new = self._ttl({"id": name, "prefix": {"token_ids": self._token_ids()}})
        await self.send(Op("create_sequences", {"sequences": [new]}))

    async def _match(self) -> None:
        lease_s = self.order.choice((0.0, 5.0, *SHORT_S))
        await self.send(Op("match_prefix", {"token_ids": self._token_ids(), "lease_s": lease_s}))

    def _lease(self) -> str | None:
        """Id of a late lease: now and then of another namespace, which it must not reach."""
        spaces = self.model.spaces.values() if self.order.random() < 0.3 else (self.space,)
        leases = [lease for space in spaces for lease in list(space.leases)[-3:]]
        return self.order.choice(leases) if leases else None

    async def _release(self) -> None:
        if (lease := self._lease()) is not None:
            await self.send(Op("release_lease", {"id": lease}))

    async def _renew(self) -> None:
        if (lease := self._lease()) is not None:
            lease_s = self.order.choice(SHORT_S)
            await self.send(Op("renew_lease", {"id": lease, "lease_s": lease_s}))

    async def _holds(self) -> None:
        await self.send(Op("holds", {}))

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
        pages = self.geometry.num_pages
        most = self.order.choice((None, None, pages // 4, pages // 2))
        kept = self.order.choice((0, 0, pages // 8, pages // 4))
        fields = {"name": self.space.name, "max_pages": most, "reserved_pages": kept}
        await self.send(Op("set_namespace", fields))

    async def _usage(self) -> None:
        await self.send(Op("get_namespace", {"name": self.space.name}))

    # Orders that only a bug tells apart.

    async def _again(self) -> None:
        """A sequence's id and length come back with other pages, between two equal decodes."""
        name, layer = self._name(), self._layer()
        fields = {"layer": layer, "sequences": [name], "cascade": "auto"}
        length = len(self._held(name, layer))
        others = [one for one in self.space.sequences if one != name]
        longer = [one for one in others if self.space.sequences[one].length >= length]
        await self.send(Op("decode", dict(fields), {"q": self._queries(1)}))
        if not longer or not length:
            return
        await self.send(Op("delete_sequence", {"id": name}))
        new = {"id": name, "parent": self.order.choice(longer), "length": length}
        await self.send(Op("create_sequences", {"sequences": [new]}))
        await self.send(Op("decode", dict(fields), {"q": self._queries(1)}))

    async def _burst(self) -> None:
        """Tokens for one sequence, and its end or a fork, each sent before the last is answered."""
        name, layer = self._name(), self._layer()
        count = min(self.order.randint(1, 4), MAX_ROWS - len(self._held(name, layer)))
        (rows,) = self._appended([name], layer, [max(count, 0)])
        length = self.order.randint(0, min(map(len, self._every(name)), default=0))
        fork = {"id": self.order.choice(self.names), "parent": name, "length": length}
        last = self.order.choice(
            (
                None,
                Op("truncate", {"id": name, "length": length}),
                Op("delete_sequence", {"id": name}),
                Op("create_sequences", {"sequences": [fork]}),
            )
        )
        calls = []
        for row in rows:
            k, v = self.model.rows.content([row], layer)
            fields = {"layer": layer, "sequences": [name]}
            op = Op("decode", fields, {"q": self._queries(1), "k": k, "v": v}, [[row]])
            calls.append(self.send(op))
        if last is not None:
            calls.append(self.send(last))
        await asyncio.gather(*calls)
