"""Turns of callers on an event loop: a pass of the loop begins little work, in fair order."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

AT_ONCE: Final = 8
"""Requests and writes to streams that begin in one pass of the loop."""


class Turns:
    """The turns of one event loop; callers are namespaces or addresses."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        """What waits, by its caller; the caller whose turn is next comes first."""

    def take(self) -> bool:
        """Whether work may begin at once: no work waits, and the pass has begun little else."""
        if self._queues or not self._left:
            return False
        if self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._left -= 1
        return True

    def wait(self, caller: str) -> asyncio.Future[None]:
        """Done in the caller's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self.put(caller, turn)
        return turn

    def put(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Have a future done in the caller's turn."""
        if not self._queues and self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._queues.setdefault(caller, deque()).append(turn)

    def _next_pass(self) -> None:
        self._left, queues = AT_ONCE, self._queues
        if queues:
            asyncio.get_running_loop().call_soon(self._next_pass)
        while queues and self._left:
            caller = next(iter(queues))
            queue = queues.pop(caller)
            turn = queue.popleft()
            if queue:
                queues[caller] = queue
            if not turn.done():
                self._left -= 1
                turn.set_result(None)


class Waiters:
    """Tasks that wait for the same news; they wake in their caller's turns."""

    def __init__(self, turns: Turns, caller: str) -> None:
        self._turns = turns
        self._caller = caller
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, seconds: float) -> bool:
        """Whether news came within `seconds`."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            async with asyncio.timeout(seconds):  # wait_for loses a cancellation beside news
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(waiting, None)
        return True

    def wake(self) -> None:
        for waiting in self._waiting:
            self._turns.put(self._caller, waiting)
        self._waiting = {}
