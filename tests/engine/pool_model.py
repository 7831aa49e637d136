"""A model of the pool as plain arrays, with attention over it by the oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import oracle

from kernels import make_backend
from kernels.backend import PoolGeometry
from tests.engine.harness import (
    Caller,
    NewCall,
    Reply,
    Test,
    creation,
    engine_test,
    queries,
    rows,
    unsliced,
    with_engine,
)

KIND: Final = "cuda" if os.environ.get("TEST_BACKEND") == "cuda" else "cpu"
"""`TEST_BACKEND=cuda` runs tests/engine/tiers on a GPU."""
CPU_GEOMETRY = PoolGeometry(2, 96, 5, 2, 16, dtype="fp32")
if KIND == "cuda":
    CPU_GEOMETRY = replace(CPU_GEOMETRY, head_dim=64, dtype="fp16")
SCALE = CPU_GEOMETRY.head_dim**-0.5
Array = Any


@dataclass
class Model:
    """K and V of every sequence at every layer."""

    caller: Caller
    held: dict[tuple[str, int], tuple[Array, Array]] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    async def create(self, name: str, parent: str | None = None, length: int | None = None) -> None:
        new = {"id": name, "parent": parent, "length": length}
        await self.caller.submit(creation(new))
        for layer in range(CPU_GEOMETRY.num_layers):
            k, v = self.held[parent, layer] if parent else (rows(0, 0, CPU_GEOMETRY),) * 2
            self.held[name, layer] = (k[:length], v[:length])

    def grow(self, names: Sequence[str], lens: list[int], layer: int) -> dict[str, Array]:
        """k and v to append, taken as appended."""
        seed = next(self.seeds)
        k, v = (rows(2 * seed + part, sum(lens), CPU_GEOMETRY) for part in (0, 1))
        begin = 0
        for name, count in zip(names, lens, strict=True):
            held = self.held[name, layer]
            new = (k[begin : begin + count], v[begin : begin + count])
            self.held[name, layer] = (
                np.concatenate((held[0], new[0])),
                np.concatenate((held[1], new[1])),
            )
            begin += count
        return {"k": k, "v": v}

    async def append(self, name: str, count: int) -> None:
        for layer in range(CPU_GEOMETRY.num_layers):
            fields = {"layer": layer, "sequences": [name], "append_indptr": [0, count]}
            await self.caller.call("append", fields, **self.grow((name,), [count], layer))

    def expected(self, names: Sequence[str], layer: int, q: Array, at: Any, **how: Any) -> Any:
        """The oracle's o and lse, for rows `at` of q over each sequence."""
        states = []
        for b, name in enumerate(names):
            k, v = self.held[name, layer]
            mine = q[at[b] : at[b + 1]]
            seen = oracle.visible(len(mine), len(k), **how)
            states.append(oracle.attend(mine, k, v, seen, sm_scale=SCALE))
        return tuple(np.concatenate(part) for part in zip(*states, strict=True))

    async def family(self) -> list[str]:
        """Eight sequences below a trunk of 12 and two branches, one more that shares nothing."""
        with unsliced(self.caller):
            await self.create("trunk")
            await self.append("trunk", 12)
            for branch in ("x", "y"):
                await self.create(branch, "trunk")
                await self.append(branch, 11)
                for leaf in range(3):
                    await self.create(f"{branch}{leaf}", branch, 23 - leaf)
                    await self.append(f"{branch}{leaf}", 1 + leaf)
            await self.create("lone")
            await self.append("lone", 7)
            await self.create("empty")
        return ["x0", "y1", "x1", "lone", "y0", "x2", "empty", "y2", "x", "trunk"]


def indptr(*lens: int) -> list[int]:
    sums: list[int] = np.cumsum([0, *lens]).tolist()
    return sums


def prefill(names: Sequence[str], lens: list[int], seed: int, **fields: Any) -> NewCall:
    """Causal and at layer 0 unless reply otherwise."""
    given = {"layer": 0, "sequences": list(names), "qo_indptr": indptr(*lens), "causal": True}
    q = queries(seed, sum(lens), CPU_GEOMETRY)
    return NewCall("prefill", given, {"q": q}).but(**fields)


def decode(names: Sequence[str], seed: int, **fields: Any) -> NewCall:
    q = queries(seed, len(names), CPU_GEOMETRY)
    return NewCall("decode", {"layer": 0, "sequences": list(names)}, {"q": q}).but(**fields)


def close(reply: Reply | tuple[Array, Array], wanted: tuple[Array, Array], case: str = "") -> None:
    o, lse = (reply.o, reply.lse) if isinstance(reply, Reply) else reply
    np.testing.assert_allclose(o, wanted[0], atol=1e-5, rtol=0, err_msg=f"o {case}")
    np.testing.assert_allclose(lse, wanted[1], atol=1e-5, rtol=0, err_msg=f"lse {case}")


def on_cpu(scenario: Any, geometry: PoolGeometry = CPU_GEOMETRY, **how: Any) -> Any:
    return with_engine(make_backend("cpu", geometry, poison=True), scenario, **how)


def cpu_engine(
    geometry: PoolGeometry = CPU_GEOMETRY, **options: Any
) -> Callable[[Test], Callable[..., None]]:
    """A test of an engine over the CPU backend, whose dead pages hold NaN."""
    given = {"geometry": geometry} | options
    return engine_test(lambda geometry: make_backend("cpu", geometry, poison=True), **given)
