"""Work on an event loop in portions, so that other requests have their turns in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

from service.image.json_text import Pieces

T = TypeVar("T")
AT_ONCE: Final = 8
"""Requests and writes to streams that begin in one pass of the loop."""


class OneByOne:
    """Runs one piece of long work per pass of the loop, over all requests; callers take turns."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Callable[[], bool]]] = {}
        """The work of each caller; the first of a queue runs until it returns True."""

    async def do(self, pieces: Pieces[T], caller: str = "") -> T:
        """The result of the work. Its first piece runs at once if no other work is under way.
        Otherwise even that waits: requests that arrive together must not share a pass of the
        loop."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        step = partial(next_piece, pieces, result)
        try:
            if not self._queues:
                if step():
                    return result.result()
                loop.call_soon(self._next_pass)
            self._queues.setdefault(caller, deque()).append(step)
            return await result
        finally:
            del step, result  # the frames of an error must not refer to it

    def _next_pass(self) -> None:
        queues = self._queues
        caller = next(iter(queues))
        queue = queues.pop(caller)
        if queue[0]():
            queue.popleft()
        if queue:
            queues[caller] = queue
        if queues:
            asyncio.get_running_loop().call_soon(self._next_pass)


def next_piece(pieces: Pieces[T], result: asyncio.Future[T]) -> bool:
    """Run the next piece of some work; whether that was the last, or the waiter has left."""
    if result.done():
        pieces.close()
        return True
    try:
        next(pieces)
    except StopIteration as end:
        result.set_result(end.value)
    except Exception as error:
        trace = error.__traceback__
        result.set_exception(error.with_traceback(trace and trace.tb_next))
        del trace  # it refers to this frame, and this frame to the result
    return result.done()


def next_in_turn(queues: dict[str, deque[T]]) -> T:
    """Take the first item of the caller whose turn it is; the caller's next one comes last."""
    caller = next(iter(queues))
    queue = queues.pop(caller)
    item = queue.popleft()
    if queue:
        queues[caller] = queue
    return item


class Turns:
    """Begins the work of many callers, `AT_ONCE` in a pass of the loop; callers take turns."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Callable[[], object]]] = {}
        self._left = AT_ONCE
        """Work that may still begin in this pass."""

    def take(self) -> bool:
        """Whether work may begin at once: no work waits, and the pass has begun little else."""
        if self._queues or not self._left:
            return False
        if self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._left -= 1
        return True

    def wait(self, caller: str, work: Callable[[], object]) -> None:
        """Begin the work in the caller's turn."""
        if not self._queues and self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._queues.setdefault(caller, deque()).append(work)

    def _next_pass(self) -> None:
        self._left, queues = AT_ONCE, self._queues
        if queues:
            asyncio.get_running_loop().call_soon(self._next_pass)
        while queues and self._left:
            self._left -= 1
            next_in_turn(queues)()


class FairLock:
    """Held by one task at a time; the callers that wait for it take turns."""

    def __init__(self) -> None:
        self.is_held = False
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    def num_waiting(self, caller: str) -> int:
        return len(self._queues.get(caller, ()))

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Hold the lock, once it is the caller's turn."""
        if self.is_held:
            waiting = asyncio.get_running_loop().create_future()
            self._queues.setdefault(caller, deque()).append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if not waiting.cancelled():
                    self._pass_on()
                raise
        self.is_held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next task have the lock."""
        while self._queues:
            waiting = next_in_turn(self._queues)
            if not waiting.done():
                waiting.set_result(None)
                return
        self.is_held = False


class Waiters:
    """Tasks that wait for the same news."""

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
            self._turns.wait(self._caller, partial(release, waiting))
        self._waiting = {}


def release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
