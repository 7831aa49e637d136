"""Random histories of several clients on a backend that fails at random: the books always agree."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_fakes import (
    GEOMETRY,
    FakeBackend,
    Later,
    append,
    decode,
    dense_row,
    outcome,
    pool,
    with_engine,
)

from kernels.backend import Attend, Unsupported
from service.core.errors import InvalidRequest, OutOfPages
from service.engine import operations as ops
from service.engine.engine import Engine
from service.errors import Internal

MISHAPS: tuple[Any, ...] = (RuntimeError("a bug"), Unsupported("q", "odd", "not here"))
REFUSED = (Internal, InvalidRequest, OutOfPages)
SCALE = GEOMETRY.head_dim**-0.5


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
    """One client with two sequences of its own, and what it knows of them at layer 0."""

    def __init__(self, engine: Engine, at: int, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.names = (f"c{at}", f"c{at}-fork")
        self.held: dict[str, tuple[Any, Any]] = {}
        self.succeeded = self.failed = 0

    async def run(self, steps: int) -> None:
        trunk, fork = self.names
        await self.engine.submit(ops.CreateSequences((ops.NewSequence(trunk),)))
        first = append(trunk, 5, seed=self.random.randrange(10**6))
        for layer in range(GEOMETRY.num_layers):
            while await self.fails(ops.Append(layer, (trunk,), *indptr_and_rows(first))):
                pass
        self.held[trunk] = (first.k, first.v)
        while await self.fails(ops.CreateSequences((ops.NewSequence(fork, trunk),))):
            pass
        self.held[fork] = self.held[trunk]
        for _ in range(steps):
            await self.random.choice([self.append, self.decode, self.decode, self.cancel])()

    async def fails(self, operation: ops.Operation) -> bool:
        told = await outcome(self.engine.submit(operation))
        if isinstance(told, ops.Reply):
            self.succeeded += 1
            return False
        assert isinstance(told, REFUSED), told
        self.failed += 1
        return True

    def grown(self, name: str, k: Any, v: Any) -> None:
        held = self.held[name]
        self.held[name] = (np.concatenate((held[0], k)), np.concatenate((held[1], v)))

    async def append(self) -> None:
        name = self.random.choice(self.names)
        operation = append(name, self.random.randrange(3), seed=self.random.randrange(10**6))
        if not await self.fails(operation):
            self.grown(name, operation.k, operation.v)

    async def decode(self) -> None:
        seed, new = self.random.randrange(10**6), self.random.random() < 0.6
        mode = self.random.choice(["always", "never"])
        options = ops.Options(sm_scale=self.random.choice([None, SCALE]), cascade=mode)
        operation = decode(*self.names, seed=seed, new=new, options=options)
        told = await outcome(self.engine.submit(operation))
        if not isinstance(told, ops.Reply):
            assert isinstance(told, REFUSED), told
            self.failed += 1
            return
        self.succeeded += 1
        assert isinstance(told.answer, ops.Attended)
        for row, name in enumerate(self.names):
            if new:
                self.grown(name, operation.k[row : row + 1], operation.v[row : row + 1])
            o, lse = dense_row(operation.q[row], *self.held[name], SCALE)
            np.testing.assert_allclose(told.answer.o[row], o, atol=1e-5)
            np.testing.assert_allclose(told.answer.lse[row], lse, atol=1e-5)

    async def cancel(self) -> None:
        """Hang up at some moment; then see whether the tokens were written."""
        name = self.random.choice(self.names)
        seed = self.random.randrange(10**6)
        operation = append(name, 1, seed=seed)
        task = asyncio.create_task(self.engine.submit(operation))
        await asyncio.sleep(self.random.choice([0.0, 0.0005]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        info = (await self.engine.submit(ops.GetSequence(name))).answer
        assert isinstance(info, ops.SequenceInfo)
        before = self.held[name][0].shape[0]
        assert info.lengths[0] in (before, before + 1)
        if info.lengths[0] > before:
            self.grown(name, operation.k, operation.v)


def indptr_and_rows(operation: ops.Append) -> tuple[Any, Any, Any, Any]:
    return operation.append_indptr, None, operation.k, operation.v


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_clients_are_told_is_what_the_pool_holds(
    seed: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Unreliable(seed, late)

    async def scenario(engine: Engine) -> None:
        backend.armed = True
        clients = [Client(engine, at, 100 * seed + at) for at in range(5)]
        await asyncio.gather(*(client.run(25) for client in clients))
        backend.armed = False
        assert engine.state == "ready", engine.reason
        info = await pool(engine)
        assert info.integrity == "ok"
        assert sum(client.succeeded for client in clients) > 20
        assert sum(client.failed for client in clients) > 5
        for client in clients:
            for name, (k, v) in client.held.items():
                told = (await engine.submit(ops.Gather(0, (name,), "fp32"))).answer
                assert isinstance(told, ops.Gathered)
                np.testing.assert_array_equal(told.k, k, err_msg=name)
                np.testing.assert_array_equal(told.v, v, err_msg=name)
                await engine.submit(ops.DeleteSequence(name))
        assert (await pool(engine)).free == GEOMETRY.num_pages

    with caplog.at_level(logging.CRITICAL, logger="service.engine.worker"):
        with_engine(backend, scenario)
