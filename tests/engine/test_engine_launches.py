"""Which operations share a launch, and what happens when a launch fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
from engine_fakes import (
    GEOMETRY,
    FakeBackend,
    append,
    create,
    decode,
    length,
    outcome,
    pool,
    queries,
    rows,
    until,
    with_engine,
)

from kernels.backend import DeviceLost, Unsupported
from service.core.errors import InvalidRequest, LengthMismatch, OutOfPages, UnknownSequence
from service.engine import operations as ops
from service.engine.engine import Engine
from service.errors import Internal, NotReady

OTHER = ops.Options(sm_scale=0.5)


async def held_back(engine: Engine, backend: FakeBackend, *operations: Any) -> list[Any]:
    """The outcomes of operations that all wait when the worker comes to take them."""
    backend.gate.clear()
    count = len(backend.launches)
    first = asyncio.create_task(outcome(engine.submit(decode("held"))))
    await until(lambda: len(backend.launches) > count)
    tasks = [asyncio.create_task(outcome(engine.submit(each))) for each in operations]
    await until(lambda: engine.num_waiting == len(operations))
    del backend.launches[:], backend.calls[:]
    backend.gate.set()
    await first
    return await asyncio.gather(*tasks)


async def three_sequences(engine: Engine) -> None:
    await create(engine, "a", "b", "held")
    await engine.submit(append("a", 5))
    await engine.submit(append("b", 9, seed=5))


def sizes(backend: FakeBackend) -> list[list[int]]:
    return [[attend.q.shape[0] for attend in launch] for launch in backend.launches]


def answer_of(reply: Any) -> ops.Attended:
    assert isinstance(reply, ops.Reply), reply
    assert isinstance(reply.answer, ops.Attended)
    return reply.answer


@pytest.mark.parametrize("late", [False, True])
def test_waiting_attention_of_one_kind_is_one_launch_with_the_same_numbers_as_alone(
    late: bool,
) -> None:
    backend = FakeBackend(late=late)

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        every = [decode("a"), decode("a", "b", seed=1), decode("b", layer=1, seed=2), decode("b")]
        alone = [answer_of(await engine.submit(each)) for each in every]
        together = await held_back(engine, backend, *every)
        assert sizes(backend) == [[1, 2, 1, 1]]
        for one, other in zip(alone, map(answer_of, together), strict=True):
            np.testing.assert_array_equal(one.o, other.o)
            np.testing.assert_array_equal(one.lse, other.lse)

    with_engine(backend, scenario)


def test_another_scoring_or_dtype_is_another_launch_and_replies_keep_their_order() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        half = queries(0, 1, dtype=np.float16)
        every = [decode("a"), decode("b"), decode("a", options=OTHER), decode("b", q=half)]
        replies = await held_back(engine, backend, *every)
        assert sizes(backend) == [[1, 1], [1], [1]]
        assert answer_of(replies[3]).o.dtype == np.float16

    with_engine(backend, scenario)


def test_an_append_between_decodes_does_not_part_them_and_each_sees_its_own_length() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        before = answer_of(await engine.submit(decode("a")))
        replies = await held_back(engine, backend, decode("a"), append("a", 2), decode("a"))
        assert sizes(backend) == [[1, 1]]
        np.testing.assert_array_equal(answer_of(replies[0]).lse, before.lse)
        assert (answer_of(replies[2]).lse > before.lse).all()
        assert replies[1].answer == ops.Appended((7,))

    with_engine(backend, scenario)


@pytest.mark.parametrize(
    "barrier",
    [
        ops.Truncate("b", 0),
        ops.DeleteSequence("b"),
        ops.CreateSequences((ops.NewSequence("c", "a"),)),
        ops.Gather(0, ("a",), "fp32"),
        ops.Merge(np.zeros((1, 1, 4), np.float32), np.zeros((1, 1)), np.array([0, 1]), "e"),
    ],
    ids=lambda operation: operation.name,
)
def test_what_changes_or_reads_pages_parts_launches(barrier: ops.Operation) -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        replies = await held_back(engine, backend, decode("a"), barrier, decode("a"))
        assert all(isinstance(reply, ops.Reply) for reply in replies), replies
        assert sizes(backend) == [[1], [1]]

    with_engine(backend, scenario)


def test_a_launch_of_its_own_sees_the_appends_before_it_and_not_those_after() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        gather = ops.Gather(0, ("a",), "fp32")
        merge = ops.Merge(np.ones((1, 1, 4), np.float32), np.zeros((1, 1)), np.array([0, 1]), "e")
        every = [append("a", 2), gather, append("a", 1, seed=3), merge, gather]
        replies = [reply.answer for reply in await held_back(engine, backend, *every)]
        assert backend.calls == ["append", "gather", "append", "merge", "gather"]
        assert [replies[0], replies[2]] == [ops.Appended((7,)), ops.Appended((8,))]
        assert (replies[1].k.shape[0], replies[4].k.shape[0]) == (7, 8)
        np.testing.assert_array_equal(replies[4].k[:7], replies[1].k)
        assert (replies[3].o == 1).all()

    with_engine(backend, scenario)


def test_sequences_that_were_made_stay_made_when_a_launch_behind_them_fails() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        backend.failures["attend"] = [None, RuntimeError("a bug"), RuntimeError("again")]
        new = ops.CreateSequences((ops.NewSequence("c"),))
        replies = await held_back(engine, backend, new, decode("a", new=True), append("c", 1))
        assert [type(reply) for reply in replies] == [ops.Reply, Internal, ops.Reply]
        assert [await length(engine, name) for name in ("a", "c")] == [5, 1]

    with_engine(backend, scenario)


def test_two_launches_are_in_flight_while_more_wait_and_never_three() -> None:
    backend = FakeBackend(late=True)

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        del backend.launches[:]
        backend.gate.clear()
        kinds = [ops.Options(sm_scale=1.0 + at) for at in range(4)]
        tasks = [asyncio.create_task(engine.submit(decode("a", options=kind))) for kind in kinds]
        await until(lambda: len(backend.launches) == 2)
        await asyncio.sleep(0.05)
        assert len(backend.launches) == 2
        backend.gate.set()
        await asyncio.gather(*tasks)
        assert len(backend.launches) == 4

    with_engine(backend, scenario)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["attend", "result"])
def test_a_launch_that_fails_takes_back_every_page_and_length(
    stage: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend(late=late)

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        before = await pool(engine)
        backend.failures[stage] = [RuntimeError("a bug in the kernel")]
        told = await outcome(engine.submit(decode("a", "b", "held", new=True)))
        assert isinstance(told, Internal)
        assert "kernel" not in str(told), "a bug's own words are for the log"
        assert await pool(engine) == before
        assert [await length(engine, name) for name in ("a", "b", "held")] == [5, 9, 0]
        assert (await engine.submit(append("held", 1))).answer == ops.Appended((1,))

    with caplog.at_level(logging.CRITICAL, logger="service.engine.worker"):
        with_engine(backend, scenario)


@pytest.mark.parametrize("stage", ["attend", "result"])
def test_an_operation_that_fails_in_a_shared_launch_takes_nobody_with_it(stage: str) -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        bug = RuntimeError("a bug")
        # The shared launch fails; run one by one, the second of them fails again.
        if stage == "attend":
            backend.failures["attend"] = [None, bug, None, bug, None]
        else:
            backend.failures["result"] = [None, bug, None, bug, None]
        every = [
            decode("a", new=True),
            decode("b", new=True, seed=3),
            append("held", 2),
            decode("a", new=True, seed=4),
        ]
        replies = await held_back(engine, backend, *every)
        assert isinstance(replies[1], Internal)
        answer_of(replies[0])
        answer_of(replies[3])
        assert replies[2].answer == ops.Appended((2,))
        assert [await length(engine, name) for name in ("a", "b", "held")] == [7, 9, 2]
        assert (await pool(engine)).integrity == "ok"

    with_engine(backend, scenario)


def test_a_launch_that_fails_behind_another_in_flight_is_taken_back_with_what_came_on_top() -> None:
    backend = FakeBackend(late=True)

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        alone = FakeBackend()
        backend.failures["result"] = [None, RuntimeError("a bug"), None, None]
        every = [
            decode("a", new=True),
            decode("a", new=True, seed=4, options=OTHER),
            append("a", 1, seed=8),
        ]
        replies = await held_back(engine, backend, *every)
        assert [isinstance(reply, ops.Reply) for reply in replies] == [True, True, True], replies
        assert await length(engine, "a") == 8
        kept = answer_of(await engine.submit(decode("a", seed=6)))

        async def expected(other: Engine) -> ops.Attended:
            await three_sequences(other)
            for each in every:
                await other.submit(each)
            return answer_of(await other.submit(decode("a", seed=6)))

        # In a thread of its own: `with_engine` runs an event loop.
        wanted = await asyncio.to_thread(with_engine, alone, expected)
        np.testing.assert_array_equal(kept.o, wanted.o)

    with_engine(backend, scenario)


def test_what_a_backend_does_not_support_is_an_invalid_request_and_changes_nothing() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        before = await pool(engine)
        backend.failures["attend"] = [Unsupported("logits_soft_cap", 3.0, "is not built here")]
        told = await outcome(engine.submit(decode("held", new=True)))
        assert isinstance(told, InvalidRequest)
        assert (told.field, told.value, told.rule) == ("logits_soft_cap", 3.0, "is not built here")
        assert await pool(engine) == before

    with_engine(backend, scenario)


@pytest.mark.parametrize("stage", ["append", "attend", "result"])
def test_a_lost_device_refuses_everything_from_then_on_with_the_reason(stage: str) -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        script: list[Exception | None] = [DeviceLost("xid 79")]
        backend.failures[stage] = script if stage == "append" else [None, *script]
        every = [decode("a", new=True), append("b", 1), decode("b", options=OTHER)]
        replies = await held_back(engine, backend, *every)
        assert all(isinstance(reply, NotReady) for reply in replies), replies
        assert (engine.state, "xid 79" in engine.reason) == ("lost", True)
        with pytest.raises(NotReady, match="xid 79"):
            await engine.submit(ops.PoolStatus())
        await until(lambda: backend.closed)

    with_engine(backend, scenario)


@pytest.mark.parametrize("fatal", [False, True])
def test_a_failed_row_copy_takes_a_fork_back(fatal: bool) -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        for layer in range(GEOMETRY.num_layers):
            await engine.submit(append("a", 6, layer=layer))
        before = await pool(engine)
        backend.failures["copy_rows"] = [DeviceLost("gone") if fatal else RuntimeError("a bug")]
        fork = ops.CreateSequences((ops.NewSequence("b", "a"),))
        told = await outcome(engine.submit(fork))
        if fatal:
            assert isinstance(told, NotReady)
            return
        assert isinstance(told, Internal)
        assert await pool(engine) == before

    with_engine(backend, scenario)


def test_a_failed_row_copy_of_a_truncate_cannot_be_taken_back_so_the_pool_is_lost() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        for layer in range(GEOMETRY.num_layers):
            await engine.submit(append("a", 8, layer=layer))
        await create(engine, "b", parent="a")
        backend.failures["copy_rows"] = [RuntimeError("a bug")]
        assert isinstance(await outcome(engine.submit(ops.Truncate("b", 6))), NotReady)
        assert engine.state == "lost"

    with_engine(backend, scenario)


def test_refusals_of_the_core_reach_the_caller_and_change_nothing() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await three_sequences(engine)
        before = await pool(engine)
        wrong = np.array([4], dtype=np.int32)
        cases: list[tuple[Any, type[Exception]]] = [
            (decode("nobody", new=True), UnknownSequence),
            (append("a", 1, offsets=wrong), LengthMismatch),
            (append("a", 1000), OutOfPages),
            (decode("a", new=True, offsets=wrong), LengthMismatch),
            (decode("a", new=True, mask=np.ones(5, dtype=bool)), InvalidRequest),
        ]
        for operation, kind in cases:
            told = await outcome(engine.submit(operation))
            assert isinstance(told, kind), (operation.name, told)
        together = await held_back(engine, backend, *(operation for operation, _ in cases))
        assert [type(told) for told in together] == [kind for _, kind in cases]
        assert await pool(engine) == before
        text = engine._metrics.render()[0].decode()
        assert "attnd_out_of_pages_total 2.0" in text

    with_engine(backend, scenario)


def test_appended_rows_of_an_undone_operation_are_not_counted() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        backend.failures["attend"] = [RuntimeError("a bug")]
        await outcome(engine.submit(decode("a", new=True)))
        await engine.submit(append("a", 3, k=rows(0, 3), v=rows(1, 3)))
        text = engine._metrics.render()[0].decode()
        assert "attnd_tokens_appended_total 3.0" in text

    with_engine(backend, scenario)
