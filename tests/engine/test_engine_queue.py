"""The queue in front of the worker: order, bounds, deadlines, cancellation, drain."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_fakes import (
    WAIT_S,
    FakeBackend,
    append,
    create,
    decode,
    length,
    outcome,
    pool,
    until,
    with_engine,
)

from kernels.backend import Backend
from service.engine import operations as ops
from service.engine.engine import Engine
from service.errors import DeadlineExceeded, NotReady, Overloaded
from service.metrics import Metrics


def metric(engine: Engine, line: str) -> float:
    text = engine._metrics.render()[0].decode()
    return next(float(told.split()[-1]) for told in text.splitlines() if told.startswith(line))


async def blocked(engine: Engine, backend: FakeBackend) -> asyncio.Task[ops.Reply]:
    """A decode that holds the worker until the gate is opened."""
    backend.gate.clear()
    count = len(backend.launches)
    task = asyncio.create_task(engine.submit(decode("a")))
    await until(lambda: len(backend.launches) > count)
    return task


def test_a_full_queue_refuses_with_a_time_to_retry_and_admitted_work_finishes() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        await engine.submit(append("a", 3))
        first = await blocked(engine, backend)
        waiting = [asyncio.create_task(engine.submit(decode("a"))) for _ in range(2)]
        await until(lambda: engine.num_waiting == 2)
        with pytest.raises(Overloaded) as caught:
            await engine.submit(decode("a"))
        assert 0.05 <= caught.value.extra["retry_after_s"] <= 30
        assert metric(engine, 'attnd_rejected_total{reason="overloaded"}') == 1
        assert metric(engine, "attnd_inflight") == 3
        backend.gate.set()
        replies = await asyncio.gather(first, *waiting)
        assert all(isinstance(reply.answer, ops.Attended) for reply in replies)
        assert metric(engine, "attnd_inflight") == 0

    with_engine(backend, scenario, queue_depth=2)


def test_an_operation_cancelled_before_its_turn_leaves_no_trace() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        await engine.submit(append("a", 3))
        first = await blocked(engine, backend)
        before = list(backend.calls)
        task = asyncio.create_task(engine.submit(append("a", 5)))
        await until(lambda: engine.num_waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_waiting == 0, "a cancelled operation still takes room in the queue"
        backend.gate.set()
        await first
        assert await length(engine, "a") == 3
        assert backend.calls == before
        assert metric(engine, 'attnd_rejected_total{reason="cancelled"}') == 1

    with_engine(backend, scenario)


def test_an_operation_cancelled_while_the_round_before_it_runs_leaves_no_trace() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        await engine.submit(append("a", 3))
        first = await blocked(engine, backend)
        # The worker takes both of these at once, and is held by the first of them.
        second = asyncio.create_task(engine.submit(decode("a")))
        doomed = asyncio.create_task(engine.submit(append("a", 5, seed=9)))
        other = ops.Options(sm_scale=2.0)
        third = asyncio.create_task(engine.submit(decode("a", options=other)))
        await until(lambda: engine.num_waiting == 3)
        doomed.cancel()
        backend.gate.set()
        await asyncio.gather(first, second, third)
        assert await length(engine, "a") == 3

    with_engine(backend, scenario)


def test_cancelling_an_operation_that_runs_lets_it_finish_and_nobody_is_told() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        backend.gate.clear()
        task = asyncio.create_task(engine.submit(decode("a", new=True)))
        await until(lambda: bool(backend.launches) and backend.launches[-1][0].q.shape[0] == 1)
        await until(lambda: "append" in backend.calls[-2:])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.gate.set()
        assert await length(engine, "a") == 1

    with_engine(backend, scenario)


def test_an_operation_whose_deadline_passed_before_its_turn_does_not_run() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        await engine.submit(append("a", 3))
        first = await blocked(engine, backend)
        late = asyncio.create_task(outcome(engine.submit(append("a", 5), deadline_s=0.01)))
        in_time = asyncio.create_task(engine.submit(append("a", 1), deadline_s=60.0))
        await until(lambda: engine.num_waiting == 2)
        await asyncio.sleep(0.03)
        backend.gate.set()
        await first
        assert isinstance(await late, DeadlineExceeded)
        assert (await in_time).answer == ops.Appended((4,))
        assert await length(engine, "a") == 4
        assert metric(engine, 'attnd_rejected_total{reason="deadline_exceeded"}') == 1

    with_engine(backend, scenario)


def test_operations_on_one_sequence_take_effect_in_order_of_arrival() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        offsets = range(12)
        replies = await asyncio.gather(
            *(
                engine.submit(append("a", 1, offsets=np.array([at], dtype=np.int32)))
                for at in offsets
            )
        )
        assert [reply.answer for reply in replies] == [ops.Appended((at + 1,)) for at in offsets]

    with_engine(backend, scenario)


def test_draining_finishes_what_was_admitted_and_takes_no_more() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        await engine.submit(append("a", 3))
        first = await blocked(engine, backend)
        waiting = [asyncio.create_task(engine.submit(decode("a", new=True))) for _ in range(5)]
        await until(lambda: engine.num_waiting == 5)
        draining = asyncio.create_task(engine.drain(WAIT_S))
        await until(lambda: engine.state == "draining")
        with pytest.raises(NotReady, match="draining"):
            await engine.submit(decode("a"))
        backend.gate.set()
        await draining
        replies = await asyncio.gather(first, *waiting)
        assert len(replies) == 6
        assert engine.state == "stopped"
        assert backend.closed
        with pytest.raises(NotReady):
            await engine.submit(decode("a"))

    with_engine(backend, scenario)


def test_a_drain_that_takes_too_long_refuses_what_did_not_run() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        first = await blocked(engine, backend)
        waiting = asyncio.create_task(outcome(engine.submit(append("a", 1))))
        await until(lambda: engine.num_waiting == 1)
        await engine.drain(0.05)
        assert isinstance(await waiting, NotReady)
        backend.gate.set()
        await first

    with_engine(backend, scenario)


def test_before_the_backend_is_there_everything_is_refused_with_the_reason() -> None:
    async def scenario() -> None:
        engine = Engine(FakeBackend, queue_depth=4, metrics=Metrics())
        with pytest.raises(NotReady, match="starting"):
            await engine.submit(ops.PoolStatus())
        with pytest.raises(NotReady, match="starting"):
            _ = engine.info
        await engine.drain(1.0)
        assert engine.state == "stopped"

    asyncio.run(scenario())


def test_a_backend_that_does_not_start_is_the_reason_for_not_being_ready() -> None:
    def make() -> Backend:
        raise RuntimeError("no such device: 7")

    async def scenario() -> None:
        engine = Engine(make, queue_depth=4, metrics=Metrics())
        engine.start()
        await until(lambda: engine.state != "starting")
        assert (engine.state, "no such device: 7" in engine.reason) == ("lost", True)
        with pytest.raises(NotReady, match="no such device: 7"):
            await engine.submit(ops.PoolStatus())
        await engine.drain(1.0)

    asyncio.run(scenario())


def test_two_event_loops_can_share_an_engine() -> None:
    backend = FakeBackend()

    async def scenario(engine: Engine) -> None:
        await create(engine, "a")
        other = await asyncio.to_thread(lambda: asyncio.run(pool(engine)))
        assert other == await pool(engine)

    with_engine(backend, scenario)


def test_info_tells_the_geometry_and_the_backend() -> None:
    async def scenario(engine: Engine) -> None:
        info = engine.info
        assert (info.num_layers, info.num_pages, info.page_size, info.backend) == (2, 32, 4, "fake")
        assert info.unsupported == ("nothing",)
        assert metric(engine, 'attnd_build_info{backend="fake",version="unknown"}') == 1

    with_engine(FakeBackend(), scenario)
