"""The engine leaves no garbage that only a full collection would find."""

from __future__ import annotations

import gc

import pytest

from tests.engine.fake_backend import GEOMETRY
from tests.engine.harness import Caller, Refused, append, decode, delete, truncate, until
from tests.engine.pool_model import on_cpu

OWN = (
    "service.engine.",
    "service.core.",
    "service.road.engine_end.session",
    "service.road.arena",
    "kernels.",
)


async def live(caller: Caller, name: str) -> None:
    """A session's life: calls that succeed, calls that fail, and pages that outlive it."""
    async with caller.another() as session:
        await session.create(name)
        for layer in range(GEOMETRY.num_layers):
            await session.submit(append(name, 2 * GEOMETRY.page_size, layer))
        await session.submit(decode(name, new=True))
        ids = list(range(GEOMETRY.page_size))
        await session.call("commit", {"id": name, "token_ids": ids})
        for wrong in (truncate(name, 999), decode("missing"), decode(name, offsets=[1], new=True)):
            with pytest.raises(Refused):
                await session.submit(wrong)
        await session.submit(delete(name))


def test_what_sessions_and_their_calls_leave_behind_goes_with_its_last_reference() -> None:
    async def scenario(caller: Caller) -> list[object]:
        await live(caller, "warm")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(3):
                await live(caller, f"s{number}")
            await until(lambda: len(caller.engine.callers.sessions) == 1)
            gc.collect()
            return [one for one in gc.garbage if type(one).__module__.startswith(OWN)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert on_cpu(scenario, GEOMETRY) == []
