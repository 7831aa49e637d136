"""Work on an event loop in portions, so that other requests have their turns in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from service.image.json_pieces import Pieces

T = TypeVar("T")
WOKEN: Final = 8
"""Waiting tasks that are woken in one pass of the loop."""


class OneByOne:
    """Runs one piece of long work per pass of the loop, over all requests."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def do(self, pieces: Pieces[T]) -> T:
        """The result of the work. Work of a single piece runs at once if no other work is under
        way. Otherwise even its first piece waits: requests that arrive together must not share a
        pass of the loop."""
        async with self._turn:
            while True:
                try:
                    next(pieces)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                await asyncio.sleep(0)


class Wakes:
    """Wakes waiting tasks in their order, `WOKEN` in a pass of the loop, over all `Waiters`."""

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()

    def add(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake)
        self._due.extend(waiting)

    def _wake(self) -> None:
        woken = 0
        while self._due and woken < WOKEN:
            waiting = self._due.popleft()
            if not waiting.done():
                waiting.set_result(None)
                woken += 1
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)


class Waiters:
    """Tasks that wait for the same news."""

    def __init__(self, wakes: Wakes) -> None:
        self._wakes = wakes
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, seconds: float) -> bool:
        """Whether news came within `seconds`."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await asyncio.wait_for(waiting, seconds)
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(waiting, None)
        return True

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._wakes.add(waiting)
