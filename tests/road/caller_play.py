"""Plays a test on an event loop, with a caller connected to a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from scripted_engine_end import SECRET, Behave, echo, scripted_end

from service.road.caller_end.caller import Answered, RoadCaller
from service.road.engine_end.calls import SessionConfig

ARENA = 2**16
Loops = Callable[[], asyncio.AbstractEventLoop]
Test = Callable[..., Coroutine[Any, Any, None]]


def road_test(
    behave: Behave | None = echo, rules: SessionConfig | None = None, is_remote: bool = False
) -> Callable[[Test], Callable[..., None]]:
    """Make a test of a coroutine whose first parameters are a caller and the engine that it is
    connected to; on either event loop. With a fixture `own`, the caller is a door that brings this
    arena; with `is_remote`, one over TCP."""

    def decorate(coroutine: Test) -> Callable[..., None]:
        def test(loops: Loops, tmp_path: Path, **given: Any) -> None:
            async def main() -> None:
                secret = SECRET if is_remote or "own" in given else ""
                door = {"secret": secret, "own": given.get("own")}
                caller = await RoadCaller.connect(engine.path, ARENA, name="test", **door)
                try:
                    await coroutine(caller, engine, **given)
                finally:
                    caller.close()

            with (
                scripted_end(tmp_path, behave, rules, is_remote) as engine,
                asyncio.Runner(loop_factory=loops) as runner,
            ):
                runner.run(asyncio.wait_for(main(), 20))

        own = list(inspect.signature(coroutine).parameters.values())[2:]
        fixtures = list(inspect.signature(test).parameters.values())[:2]
        functools.update_wrapper(test, coroutine)
        test.__signature__ = inspect.Signature([*fixtures, *own])  # type: ignore[attr-defined]
        return test

    return decorate


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
