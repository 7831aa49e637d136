"""Plays a test on an event loop, with a caller connected to a scripted engine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

from scripted_engine_end import ScriptedEnd

from service.road.caller_end.caller import Answered, RoadCaller

Test = Callable[[RoadCaller], Awaitable[None]]


ARENA = 2**16


Loops = Callable[[], asyncio.AbstractEventLoop]


def play(loops: Loops, engine: ScriptedEnd, test: Test) -> None:
    """Run a test on a loop of its own, with a caller that is connected to the engine."""

    async def main() -> None:
        caller = await RoadCaller.connect(str(engine.path), ARENA, name="test")
        try:
            await test(caller)
        finally:
            caller.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(asyncio.wait_for(main(), 20))


async def ask(caller: RoadCaller, text: bytes) -> Answered:
    request, answer = caller.take(len(text)), caller.take(len(text))
    request.view(len(text))[:] = text
    return await caller.call(9, request, len(text), answer)


async def settled(caller: RoadCaller) -> int:
    """Bytes of the arena that are free, once the loop has freed its last call's slots."""
    await asyncio.sleep(0)
    gc.collect()
    return caller.slots.free()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something that another thread does has happened."""
    while not condition():
        await asyncio.sleep(0.001)
