"""The expected content of a cluster's sequences, and calls that are checked against it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle

from tests.cluster.harness import ATOL, DIM, HEADS, LAYERS, PAGE, Answer, Cluster, rows

Array = Any
SCALE = DIM**-0.5


@dataclass
class Book:
    """Sequences by layer, and calls that must succeed and agree with them."""

    cluster: Cluster
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    held: dict[str, list[tuple[Array, Array]]] = field(default_factory=dict)
    retried: frozenset[str] = frozenset()
    """Codes of errors after which a call is repeated."""
    losing: frozenset[str] = frozenset()
    """Codes of errors after which the sequence counts as lost."""

    async def ask(self, about: str, name: str, fields: Any, **arrays: Array) -> Answer | None:
        """The reply to a call for a sequence; None where that is lost."""
        async with asyncio.timeout(60):
            while True:
                answer = await self.cluster.call(name, fields, **arrays)
                if answer.status < 300:
                    return answer
                code = answer.fields["code"]
                if code in self.losing:
                    self.held.pop(about, None)
                    return None
                assert code in self.retried, (name, fields, answer)
                await asyncio.sleep(0.01)

    async def create(self, name: str, **given: Any) -> None:
        new = {"sequences": [{"id": name} | given]}
        if await self.ask(name, "create_sequences", new) is not None:
            none = rows(self.rng, 0)
            self.held[name] = [(none, none)] * LAYERS

    async def fork(self, parent: str, name: str, length: int | None = None) -> None:
        new = {"id": name, "parent": parent} | ({} if length is None else {"length": length})
        if await self.ask(parent, "create_sequences", {"sequences": [new]}) is not None:
            self.held[name] = [(k[:length], v[:length]) for k, v in self.held[parent]]

    def grow(self, names: list[str], counts: list[int], layer: int) -> dict[str, Array]:
        new = {"k": rows(self.rng, sum(counts)), "v": rows(self.rng, sum(counts))}
        begin = 0
        for name, count in zip(names, counts, strict=True):
            part = slice(begin, begin + count)
            k, v = self.held[name][layer]
            both = np.concatenate((k, new["k"][part])), np.concatenate((v, new["v"][part]))
            self.held[name][layer] = both
            begin += count
        return new

    async def append(self, name: str, count: int) -> None:
        for layer in range(LAYERS):
            if name in self.held:
                fields = {"layer": layer, "sequences": [name], "append_indptr": [0, count]}
                fields["offsets"] = [len(self.held[name][layer][0])]
                reply = await self.ask(name, "append", fields, **self.grow([name], [count], layer))
                if reply is not None:
                    assert reply.fields["lengths"] == [len(self.held[name][layer][0])]

    async def attend(
        self,
        names: list[str],
        counts: list[int],
        layer: int,
        *,
        appends: bool,
        sinks: Array | None = None,
        **how: Any,
    ) -> None:
        """A prefill where `causal` is given, else a decode, compared with the oracle."""
        new = self.grow(names, counts, layer) if appends else {}
        q = rows(self.rng, sum(counts), 2 * HEADS)
        fields: dict[str, Any] = {"layer": layer, "sequences": names} | how
        name = "prefill" if "causal" in how else "decode"
        if name == "prefill":
            fields["qo_indptr"] = [0, *np.cumsum(counts).tolist()]
        if sinks is not None:
            new["sinks"] = sinks
        reply = await self.ask(names[0], name, fields, q=q, **new)
        if reply is None:
            return
        begin = 0
        for one, count in zip(names, counts, strict=True):
            mine = slice(begin, begin + count)
            k, v = self.held[one][layer]
            seen = oracle.visible(
                count,
                len(k),
                causal=bool(how.get("causal")),
                window_left=how.get("window_left", -1),
            )
            o, lse = oracle.attend(q[mine], k, v, seen, sm_scale=SCALE)
            if sinks is not None:
                sink = np.zeros(o.shape), np.broadcast_to(sinks, lse.shape)
                o, lse = oracle.merge([(o, lse), sink])
            unit = np.log(2) if how.get("lse_base") == "2" else 1.0
            case = f"{one}, {counts} rows on {len(k)} tokens, {how}"
            np.testing.assert_allclose(reply.arrays["o"][mine], o, atol=ATOL, err_msg=case)
            got = reply.arrays["lse"][mine] * unit
            np.testing.assert_allclose(got, lse, atol=ATOL, err_msg=case)
            begin += count

    async def truncate(self, name: str, length: int) -> None:
        reply = await self.ask(name, "truncate", {"id": name, "length": length})
        if reply is None:
            return
        assert reply.fields["lengths"] == [length] * LAYERS
        self.held[name] = [(k[:length], v[:length]) for k, v in self.held[name]]

    async def check(self, name: str) -> None:
        """Checks a sequence's description, and all its rows."""
        reply = await self.ask(name, "get_sequence", {"id": name})
        if reply is None:
            return
        view, lengths = reply.fields, [len(k) for k, _ in self.held[name]]
        pages = -(-max(lengths) // PAGE)
        last = max(lengths) - max(pages - 1, 0) * PAGE
        assert (view["lengths"], view["pages"], view["last_page_len"]) == (lengths, pages, last)
        for layer in range(LAYERS):
            fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
            reply = await self.ask(name, "gather", fields)
            if reply is None:
                return
            for part, want in zip("kv", self.held[name][layer], strict=True):
                np.testing.assert_array_equal(reply.arrays[part], want, err_msg=f"{part}, {layer}")


def prefix_states(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Attention of one query row, float64, over each prefix of the keys: o [m, Hq, D], lse [m, Hq];
    entry i sees i + 1 keys."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    weights = np.exp(np.einsum("hd,mhd->mh", q, k) * DIM**-0.5)
    sums = np.cumsum(weights, axis=0)
    o = np.cumsum(weights[..., None] * v, axis=0) / sums[..., None]
    return o, np.log(sums)
