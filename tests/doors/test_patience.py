"""Calls that nobody answers end in time."""

from __future__ import annotations

import asyncio

import pytest

from service.doors.patience import Patience


async def waited(patience: Patience, seconds: float) -> str:
    task = patience.begin(seconds)
    try:
        await asyncio.sleep(60)
        return "slept"
    except asyncio.CancelledError:
        if not patience.is_over(task):
            raise
        return "over"
    finally:
        patience.end(task)


def test_a_call_that_takes_too_long_is_ended_and_others_go_on() -> None:
    async def main() -> None:
        patience = Patience()
        long = asyncio.create_task(waited(patience, 60))
        short = asyncio.create_task(waited(patience, 0.01))
        assert await asyncio.wait_for(short, 5) == "over"
        assert not short.cancelled() and not short.cancelling()
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert not patience.waiting and not patience.cancelled
        patience.close()

    asyncio.run(main())


def test_a_call_that_somebody_cancels_too_is_cancelled() -> None:
    async def main() -> None:
        patience = Patience()
        both = asyncio.create_task(waited(patience, 60))
        await asyncio.sleep(0)
        patience.waiting[both] = 0.0
        patience.look()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        patience.close()

    asyncio.run(main())


def test_nothing_looks_while_nobody_waits() -> None:
    async def main() -> None:
        patience = Patience()
        task = patience.begin(60)
        assert patience.timer is not None
        patience.end(task)
        patience.timer.cancel()
        patience.look()
        assert patience.timer is None
        patience.close()

    asyncio.run(main())
