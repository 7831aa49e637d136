"""Calls that no engine answers end in time."""

from __future__ import annotations

import asyncio

import pytest

from service.doors.kit.timeouts import GRACE_S, Timeouts
from service.errors import DeadlineExceeded


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
