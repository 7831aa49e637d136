"""A door's loop: long work has one piece in a pass, and calls without an answer end in time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from service.doors.kit.pieces import OneByOne
from service.doors.kit.timeouts import GRACE_S, Timeouts
from service.doors.kit.upstream import trim
from service.errors import DeadlineExceeded


def test_requests_that_arrive_together_do_not_share_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    def work(pieces: int) -> Generator[None, None, int]:
        for _ in range(pieces):
            passes.append(number)
            yield
        return pieces

    async def main() -> None:
        nonlocal number
        turns = OneByOne()
        tasks = [asyncio.create_task(turns.do(work(3))) for _ in range(4)]
        while not all(task.done() for task in tasks):
            number += 1
            await asyncio.sleep(0)
        assert [task.result() for task in tasks] == [3] * 4

    asyncio.run(main())
    assert len(passes) == 12 and len(set(passes)) == 12


def test_a_door_returns_memory_one_piece_in_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    def trim_piece(begin: int) -> int | None:
        passes.append(number)
        return begin + 1 if begin < 4 else None

    async def main() -> None:
        nonlocal number
        upstream: Any = SimpleNamespace(is_pinned=False, arena=SimpleNamespace(trim=trim_piece))
        trim(asyncio.get_running_loop(), upstream)
        while number < 9:
            number += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(passes) == 5 and len(set(passes)) == 5


async def call(timeouts: Timeouts, seconds: float) -> str:
    try:
        with timeouts.limit(seconds - GRACE_S):
            await asyncio.sleep(60)
    except DeadlineExceeded:
        return "timed out"
    return "slept"


def test_an_overdue_call_times_out_and_others_continue() -> None:
    async def main() -> None:
        timeouts = Timeouts()
        long = asyncio.create_task(call(timeouts, 60))
        short = asyncio.create_task(call(timeouts, 0.01))
        assert await asyncio.wait_for(short, 5) == "timed out"
        assert not short.cancelled() and not short.cancelling()
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert not timeouts.ends and not timeouts.cancelled
        timeouts.close()

    asyncio.run(main())


def test_an_overdue_call_that_its_caller_cancels_too_is_cancelled() -> None:
    async def main() -> None:
        timeouts = Timeouts()
        both = asyncio.create_task(call(timeouts, 60))
        await asyncio.sleep(0)
        timeouts.ends[both] = 0.0
        timeouts.check()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        timeouts.close()

    asyncio.run(main())


def test_no_timer_runs_without_calls_in_flight() -> None:
    async def main() -> None:
        timeouts = Timeouts()
        with timeouts.limit(60):
            assert timeouts.timer is not None
        timeouts.timer.cancel()
        timeouts.check()
        assert timeouts.timer is None
        timeouts.close()

    asyncio.run(main())
