"""Which operations share a launch, and in what order launches see what came before."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from kernels.backend import Unsupported
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
    gather,
    held_back,
    queries,
    three_sequences,
    truncate,
    until,
)

ONE_LIST = NewCall(
    "merge", {}, {"o": np.ones((1, 1, 1, 4), np.float32), "lse": np.zeros((1, 1, 1), np.float32)}
)


def sizes(backend: FakeBackend) -> list[list[int]]:
    return [[attend.plan.positions.size for attend in launch] for launch in backend.launches]


@pytest.mark.parametrize("late", [False, True])
@fake_engine()
async def test_waiting_attention_of_one_kind_is_one_launch_with_the_same_numbers_as_alone(
    caller: Caller, backend: FakeBackend, late: bool
) -> None:
    await three_sequences(caller)
    every = [decode("a"), decode("a", "b", seed=1), decode("b", layer=1, seed=2), decode("b")]
    alone = [await caller.submit(each) for each in every]
    together = await held_back(caller, backend, *every)
    assert sizes(backend) == [[1, 2, 1, 1]]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.o, other.o)
        np.testing.assert_array_equal(one.lse, other.lse)


@fake_engine()
async def test_a_launch_takes_no_more_calls_at_a_quarter_of_a_slice(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next call waits for two calls of almost a slice each."""
    await three_sequences(caller)
    pace = caller.engine.store.pace
    monkeypatch.setattr(pace, "seconds", lambda kind, cost, _=False: 0.15 * pace.slice_s)
    await held_back(caller, backend, *[decode("a", seed=number) for number in range(5)])
    assert sizes(backend) == [[1, 1], [1, 1], [1]]


@fake_engine()
async def test_after_turns_that_took_long_new_calls_come_before_the_next_slice(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = caller.engine.scheduler
    slices: list[bool] = []
    monkeypatch.setattr(scheduler.long_work, "run_slice", lambda: slices.append(True))
    counts = []
    for took_s in (0.0, 60.0, 60.0, 60.0, 0.0, 60.0):
        scheduler.run_slice(time.monotonic() - took_s)
        counts.append(len(slices))
    assert counts == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("late", [False, True])
@fake_engine()
async def test_another_scoring_or_dtype_is_another_launch_and_replies_keep_their_order(
    caller: Caller, backend: FakeBackend, late: bool
) -> None:
    await three_sequences(caller)
    half = queries(0, 1, dtype=np.float16)
    every = [decode("a"), decode("b"), decode("a", sm_scale=0.5), decode("b", q=half)]
    replies = await held_back(caller, backend, *every)
    assert sizes(backend) == [[1, 1], [1], [1]]
    assert replies[3].o.dtype == np.float16


@pytest.mark.parametrize("option", [{"window_left": 2}, {"logits_soft_cap": 3.0}])
@fake_engine()
async def test_every_scoring_option_parts_launches(
    caller: Caller, backend: FakeBackend, option: dict[str, float]
) -> None:
    await three_sequences(caller)
    await held_back(caller, backend, decode("a"), decode("a", **option), decode("a"))
    assert sizes(backend) == [[1], [1], [1]]


@fake_engine()
async def test_an_append_between_decodes_does_not_part_them_and_each_sees_its_own_length(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    before = await caller.submit(decode("a"))
    replies = await held_back(caller, backend, decode("a"), append("a", 2), decode("a"))
    assert sizes(backend) == [[1, 1]]
    np.testing.assert_array_equal(replies[0].lse, before.lse)
    assert (replies[2].lse > before.lse).all()
    assert replies[1].fields == {"lengths": [7]}


@pytest.mark.parametrize(
    "barrier",
    [
        truncate("b", 0),
        delete("b"),
        creation({"id": "c", "parent": "b", "length": 0}),
        gather("a"),
        ONE_LIST,
    ],
    ids=lambda call: call.name,
)
@pytest.mark.parametrize("late", [False, True])
@fake_engine()
async def test_what_changes_or_reads_pages_parts_launches(
    caller: Caller, backend: FakeBackend, barrier: NewCall, late: bool
) -> None:
    await three_sequences(caller)
    replies = await held_back(caller, backend, decode("a"), barrier, decode("a"))
    assert [code(reply) for reply in replies] == ["ok"] * 3, replies
    assert sizes(backend) == [[1], [1]]


@fake_engine()
async def test_a_launch_of_its_own_sees_the_appends_before_it_and_not_those_after(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    every = [append("a", 2), gather("a"), append("a", 1, seed=3), ONE_LIST, gather("a")]
    replies = await held_back(caller, backend, *every)
    assert backend.calls == ["append", "gather", "append", "merge", "gather"]
    assert [replies[at].fields for at in (0, 2)] == [{"lengths": [7]}, {"lengths": [8]}]
    first, second = (replies[at].tensors["k"] for at in (1, 4))
    assert (first.shape[0], second.shape[0]) == (7, 8)
    np.testing.assert_array_equal(second[:7], first)
    assert (replies[3].o == 1).all()


@fake_engine(late=True)
async def test_two_launches_are_in_flight_while_more_wait_and_never_three(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    del backend.launches[:]
    backend.gate.clear()
    tasks = [caller.start(decode("a", sm_scale=1.0 + at)) for at in range(4)]
    await until(lambda: len(backend.launches) == 2)
    await asyncio.sleep(0.05)
    assert len(backend.launches) == 2
    backend.gate.set()
    await asyncio.gather(*tasks)
    assert len(backend.launches) == 4


@fake_engine(late=True)
async def test_turns_are_given_while_a_launch_is_in_flight_and_answers_keep_their_order(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    backend.gate.clear()
    count = len(backend.launches)
    first = caller.start(decode("a"))
    await until(lambda: len(backend.launches) > count)
    del backend.calls[:]
    second = caller.start(append("a", 1))
    await until(lambda: backend.calls == ["append"])
    await asyncio.sleep(0.01)
    assert not second.done()
    backend.gate.set()
    assert (await second).fields == {"lengths": [6]}
    assert first.done()


@fake_engine()
async def test_an_answer_has_the_seconds_of_each_stage(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    reply = await caller.submit(decode("a", new=True))
    queue, plan, copy_in, *_ = reply.stages
    assert len(reply.stages) == 6
    assert min(queue, plan, copy_in) > 0
    assert max(reply.stages) < 5


@fake_engine(late=True)
async def test_a_lone_launch_that_is_refused_leaves_those_in_flight_alone(
    caller: Caller, backend: FakeBackend
) -> None:
    await three_sequences(caller)
    count = len(backend.launches)
    backend.gate.clear()
    first = caller.start(decode("a", new=True))
    await until(lambda: len(backend.launches) == count + 1)
    backend.failures["merge"] = [Unsupported("lists", 1, "is not built here")]
    refused = caller.attempt(ONE_LIST)
    await until(lambda: not backend.failures["merge"])
    backend.gate.set()
    assert code(await refused) == "invalid_request"
    assert (await first).status == 200
    assert len(backend.launches) == count + 1
