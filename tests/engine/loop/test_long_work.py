"""Long work in slices: others have their turns in between, those on its sequences wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    code,
    creation,
    decode,
    delete,
    fake_engine,
    get,
    truncate,
    until,
)
from tests.engine.long_calls import ROWS, SLICE_MS, finish, long_append, long_prefill


@fake_engine(slice_ms=SLICE_MS)
async def test_a_decode_is_answered_while_a_slice_of_anothers_prefill_is_on_the_device(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=20, b=5)
    wanted = await caller.submit(decode("b"))
    steps = backend.step_by_step()
    long = caller.start(long_prefill("a"))
    await until(lambda: len(steps) == 1)
    async with caller.another() as other:
        for _ in range(3):
            count = len(steps)
            small = other.start(decode("b"))
            await until(lambda count=count: len(steps) == count + 1)
            steps[-1].set()
            np.testing.assert_array_equal((await small).o, wanted.o)
    assert not steps[0].is_set()
    assert not long.done()
    slices = await finish(backend, long) - 3
    assert slices >= 5
    await until(lambda: caller.metric("attnd_slices_total") >= slices)


@fake_engine(slice_ms=SLICE_MS)
async def test_between_two_slices_everyone_who_waits_has_a_turn(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=20, b=5)
    gates = backend.step_by_step()
    async with caller.another() as other:
        long = caller.start(long_prefill("a"))
        for _ in range(4):
            await until(lambda: len(gates) % 2 == 1)  # a slice is on the device
            short = other.start(decode("b"))
            await until(lambda: len(gates) % 2 == 0)
            gates[-1].set()
            assert (await short).status == 200
            assert not long.done()
            gates[-2].set()
        await finish(backend, long)


@fake_engine(slice_ms=SLICE_MS)
async def test_two_long_operations_take_turns(caller: Caller, backend: FakeBackend) -> None:
    await caller.fill(a=20, b=5)
    del backend.launches[:]
    both = [long_prefill("a", new=False), long_prefill("b", new=False, sm_scale=2.0)]
    await asyncio.gather(*(caller.submit(each) for each in both))
    scales = [launch[0].scoring.sm_scale for launch in backend.launches]
    turns = "".join("b" if scale == 2.0 else "a" for scale in scales)
    assert "abab" in turns


@pytest.mark.parametrize("long", [long_prefill, long_append], ids=["prefill", "append"])
@fake_engine(slice_ms=SLICE_MS)
async def test_operations_on_its_sequences_wait_and_see_its_effect_in_their_order(
    caller: Caller, backend: FakeBackend, long: Callable[[str], NewCall]
) -> None:
    await caller.fill(a=20, b=5)
    steps = backend.step_by_step()
    first = caller.start(long("a"))
    await until(lambda: len(steps) == 1)
    after = [
        get("a"),
        append("a", 1, seed=9),
        decode("a", seed=1),
        truncate("a", 0),
        creation({"id": "c", "parent": "a"}),
        delete("a"),
        get("a"),
    ]
    waiting = [caller.attempt(call) for call in after]
    await until(lambda: caller.num_waiting == len(after))
    async with caller.another() as other:  # other sequences are not blocked
        small = other.start(append("b", 1))
        await until(lambda: len(steps) == 2)
        steps[1].set()
        assert (await small).fields == {"lengths": [6]}
        assert await other.length("b") == 6
    assert caller.num_waiting == len(after)
    await finish(backend, first)
    backend.let_all()
    replies = await asyncio.gather(*waiting)
    assert [code(one) for one in replies[:6]] == ["ok"] * 6, replies
    assert replies[0].fields["lengths"][0] == 20 + ROWS
    assert replies[1].fields == {"lengths": [21 + ROWS]}
    assert replies[4].fields["sequences"][0]["length"] == 0
    assert code(replies[6]) == "unknown_sequence"
    assert (await caller.pool())["integrity"] == "ok"


@fake_engine(slice_ms=SLICE_MS)
async def test_who_only_reads_goes_beside_a_long_read_and_who_writes_waits(
    caller: Caller, backend: FakeBackend
) -> None:
    await caller.fill(a=20, b=5)
    wanted = await caller.submit(decode("a"))
    steps = backend.step_by_step()
    long = caller.start(long_prefill("a", new=False))
    await until(lambda: len(steps) == 1)
    reading = caller.start(decode("a"))
    await until(lambda: len(steps) == 2)
    steps[1].set()
    np.testing.assert_array_equal((await reading).o, wanted.o)
    assert await caller.length("a") == 20
    writing = caller.start(append("a", 1))
    behind = caller.start(decode("a"))
    await until(lambda: caller.num_waiting == 2)
    await finish(backend, long)
    backend.let_all()
    assert (await writing).fields == {"lengths": [21]}
    assert ((await behind).lse > wanted.lse).all()
