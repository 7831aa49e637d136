"""Random histories of several callers on a backend that fails at random: the books always agree."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernels.backend import Attend, Unsupported
from tests.engine.fake_backend import GEOMETRY, FakeBackend, Later, dense_row
from tests.engine.harness import (
    Caller,
    NewCall,
    Reply,
    append,
    code,
    creation,
    decode,
    delete,
    gather,
    outcome,
    with_engine,
)

MISHAPS: tuple[Any, ...] = (RuntimeError("a bug"), Unsupported("q", "odd", "not here"))
REFUSED = ("internal", "invalid_request", "out_of_pages")
SCALE = GEOMETRY.head_dim**-0.5

LONG = pytest.mark.long


class Unreliable(FakeBackend):
    """Fails one call in eight, on the way in or when waited for."""

    def __init__(self, seed: int, late: bool) -> None:
        super().__init__(late=late)
        self.random = random.Random(seed)
        self.armed = False

    def _failure(self, name: str) -> Exception | None:
        fails = self.armed and name != "copy_rows" and self.random.random() < 0.125
        return self.random.choice(MISHAPS) if fails else None

    def attend(self, requests: Sequence[Attend]) -> Any:
        """As the fake's, but an unsupported kind shows on the way in, not in the result."""
        pending = super().attend(requests)
        if isinstance(pending, Later) and isinstance(pending.error, Unsupported):
            pending.error = None
        return pending


class Client:
    """A caller with two sequences of its own, and its own record of them at layer 0."""

    def __init__(self, caller: Caller, at: int, seed: int) -> None:
        self.caller = caller
        self.random = random.Random(seed)
        self.names = (f"c{at}", f"c{at}-fork")
        self.held: dict[str, tuple[Any, Any]] = {}
        self.succeeded = self.failed = 0

    async def run(self, steps: int) -> None:
        trunk, fork = self.names
        await self.caller.create(trunk)
        first = append(trunk, 5, seed=self.random.randrange(10**6))
        for layer in range(GEOMETRY.num_layers):
            while await self.fails(first.but(layer=layer)):
                pass
        self.held[trunk] = (first.tensors["k"], first.tensors["v"])
        forked = creation({"id": fork, "parent": trunk})
        while await self.fails(forked):
            pass
        self.held[fork] = self.held[trunk]
        for _ in range(steps):
            await self.random.choice([self.append, self.decode, self.decode, self.cancel])()

    async def fails(self, call: NewCall) -> bool:
        reply = await outcome(self.caller.submit(call))
        if isinstance(reply, Reply):
            self.succeeded += 1
            return False
        assert code(reply) in REFUSED, reply
        self.failed += 1
        return True

    def grown(self, name: str, k: Any, v: Any) -> None:
        held = self.held[name]
        self.held[name] = (np.concatenate((held[0], k)), np.concatenate((held[1], v)))

    async def append(self) -> None:
        name = self.random.choice(self.names)
        call = append(name, self.random.randrange(3), seed=self.random.randrange(10**6))
        if not await self.fails(call):
            self.grown(name, call.tensors["k"], call.tensors["v"])

    async def decode(self) -> None:
        seed, new = self.random.randrange(10**6), self.random.random() < 0.6
        mode = self.random.choice(["always", "never"])
        scale = self.random.choice([None, SCALE])
        call = decode(*self.names, seed=seed, new=new, cascade=mode)
        call.fields.update({} if scale is None else {"sm_scale": scale})
        reply = await outcome(self.caller.submit(call))
        if not isinstance(reply, Reply):
            assert code(reply) in REFUSED, reply
            self.failed += 1
            return
        self.succeeded += 1
        for row, name in enumerate(self.names):
            if new:
                self.grown(name, *(call.tensors[part][row : row + 1] for part in "kv"))
            o, lse = dense_row(call.tensors["q"][row], *self.held[name], SCALE)
            np.testing.assert_allclose(reply.o[row], o, atol=1e-5)
            np.testing.assert_allclose(reply.lse[row], lse, atol=1e-5)

    async def cancel(self) -> None:
        """Hang up at some moment; then see whether the tokens were written."""
        name = self.random.choice(self.names)
        call = append(name, 1, seed=self.random.randrange(10**6))
        task = self.caller.start(call)
        await asyncio.sleep(self.random.choice([0.0, 0.0005]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view = await self.caller.view(name)
        before = self.held[name][0].shape[0]
        assert view["lengths"][0] in (before, before + 1)
        if view["lengths"][0] > before:
            self.grown(name, call.tensors["k"], call.tensors["v"])


@pytest.mark.parametrize("slice_ms", [20.0, 1e-6], ids=["short", "sliced"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=LONG) for n in (1, 2, 3))])
def test_replies_agree_with_the_pool(
    seed: int, late: bool, slice_ms: float, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Unreliable(seed, late)

    async def scenario(caller: Caller) -> None:
        backend.armed = True
        async with caller.another() as other:
            sessions = (caller, other, caller, other, caller)
            clients = [Client(one, at, 100 * seed + at) for at, one in enumerate(sessions)]
            await asyncio.gather(*(client.run(25) for client in clients))
        backend.armed = False
        assert caller.state == "ready"
        assert (await caller.pool())["integrity"] == "ok"
        assert sum(client.succeeded for client in clients) > 20
        assert sum(client.failed for client in clients) > 5
        for client in clients:
            for name, (k, v) in client.held.items():
                reply = await caller.submit(gather(name))
                np.testing.assert_array_equal(reply.tensors["k"], k, err_msg=name)
                np.testing.assert_array_equal(reply.tensors["v"], v, err_msg=name)
                await caller.submit(delete(name))
        assert (await caller.pool())["free"] == GEOMETRY.num_pages

    with caplog.at_level(logging.CRITICAL, logger="attnd.engine"):
        with_engine(backend, scenario, slice_ms=slice_ms)
