"""Random histories of two namespaces that use, and guess, the same ids: each is alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_backend import GEOMETRY
from tests.engine.harness import (
    Caller,
    NewCall,
    Refused,
    append,
    creation,
    delete,
    fake_engine,
    gather,
    outcome,
    truncate,
)

IDS = "abcde"
STEPS = 250


class Guesser:
    """One namespace's caller, and its record of layer 0: rows of k by id."""

    def __init__(self, caller: Caller, seed: int) -> None:
        self.caller = caller
        self.random = random.Random(seed)
        self.held: dict[str, Any] = {}
        self.unknown = 0

    async def run(self) -> None:
        acts = (self.create, self.fork, self.append, self.append, self.truncate, self.delete)
        for _ in range(STEPS):
            await self.random.choice((*acts, self.gather, self.list))()

    async def ask(self, call: NewCall, *named: str) -> Any:
        """The reply, or None for a refusal; the ids that are unknown must be those."""
        result = await outcome(self.caller.submit(call))
        missing = [name for name in named if name not in self.held]
        if missing:
            assert isinstance(result, Refused) and result.status == 404, (call, result)
            assert result.problem["sequences"] == missing
            self.unknown += 1
            return None
        if isinstance(result, Refused):
            assert result.code in ("out_of_pages", "sequence_exists"), (call, result)
            return None
        return result

    def some(self) -> str:
        return self.random.choice(IDS)

    async def create(self) -> None:
        name = self.some()
        result = await self.ask(creation({"id": name}))
        assert (result is None) == (name in self.held)
        if result is not None:
            self.held[name] = np.zeros((0, GEOMETRY.num_kv_heads, GEOMETRY.head_dim), np.float32)

    async def fork(self) -> None:
        name, parent = self.some(), self.some()
        new = {"id": name, "parent": parent}
        if name in self.held or (name == parent and parent not in self.held):
            return
        if await self.ask(creation(new), parent):
            self.held[name] = self.held[parent]

    async def append(self) -> None:
        name, count = self.some(), self.random.randrange(1, 6)
        call = append(name, count, seed=self.random.randrange(10**6))
        for layer in range(GEOMETRY.num_layers):
            if not await self.ask(call.but(layer=layer), name):
                return
        self.held[name] = np.concatenate((self.held[name], call.tensors["k"]))

    async def truncate(self) -> None:
        name = self.some()
        length = self.random.randrange(len(self.held.get(name, ())) + 1)
        if await self.ask(truncate(name, length), name):
            self.held[name] = self.held[name][:length]

    async def delete(self) -> None:
        name = self.some()
        if await self.ask(delete(name), name):
            del self.held[name]

    async def gather(self) -> None:
        name = self.some()
        result = await self.ask(gather(name), name)
        if result is not None:
            np.testing.assert_array_equal(result.tensors["k"], self.held[name])

    async def list(self) -> None:
        result = await self.ask(NewCall("list_sequences"))
        lengths = {one["id"]: one["length"] for one in result.fields["sequences"]}
        assert lengths == {name: len(k) for name, k in self.held.items()}


@pytest.mark.parametrize("seed", range(3))
@fake_engine(keys={name: (name, ["read", "append"]) for name in "xy"}, key="x")
async def test_each_namespace_gets_the_replies_it_would_get_alone(
    x: Caller, y: Caller, seed: int
) -> None:
    both = [Guesser(caller, 10 * seed + at) for at, caller in enumerate((x, y))]
    await asyncio.gather(*(one.run() for one in both))
    assert min(one.unknown for one in both) > 20, "too few guesses"
    assert (await x.pool())["integrity"] == "ok"
    for one in both:
        for name in list(one.held):
            await one.caller.submit(delete(name))
    assert (await x.pool())["free"] == GEOMETRY.num_pages
