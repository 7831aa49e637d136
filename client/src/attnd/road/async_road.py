"""Calls over a connection from asyncio, without a thread for each; for the service's gateway."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from attnd import errors
from attnd.calls.call import Reply
from attnd.road.areas import Areas, PlacedCall
from attnd.road.arena import Slot
from attnd.road.attempts import ANSWER_ROOM, by_stage, id_bytes, read_answer
from attnd.road.connection import Connection
from attnd.road.greeting import dial_path
from attnd.road.pending import Answer, Pending
from attnd.wire import images
from attnd.wire.dtypes import Array
from attnd.wire.meta import Meta, Timings

LARGE_BYTES: Final = 2**20
"""Longer requests are copied in another thread."""
MAX_TENANTS: Final = 2**16 - 1
SEND_S: Final = 5.0
"""The engine reads within this time, or the session is broken."""
START_S: Final = 86_400.0
"""An engine greets when it has started, which may take long."""


@dataclass(slots=True)
class Waker:
    """Wakes a coroutine where `Pending.gate` is the lock of a waiting thread."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.event.set)


class AsyncRoad:
    """One session of an event loop: the loop reads, and calls are pipelined."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        """When the engine was last heard, by the loop's clock; it sends its state every second."""
        self._tenants: dict[tuple[str, frozenset[str]], int] = {}
        self._areas = Areas(connection.arena, self._take)
        self._loop.add_reader(connection.fileno(), self._on_readable)
        self._loop.call_soon(self._on_readable)

    @classmethod
    async def connect(cls, path: str, arena_bytes: int, secret: str) -> AsyncRoad:
        """A session of the service's own door, once its engine has started.

        The thread that waits for it does not hold up the process's end. Raises `AttndError`.
        """
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[Connection] = loop.create_future()

        dial = partial(dial_path, path, False)

        def connect() -> None:
            ends = time.monotonic() + START_S
            settle: Callable[[], None]
            try:
                made = Connection(dial, arena_bytes, ends, secret=secret)
                settle = partial(connected.set_result, made)
            except errors.AttndError as error:
                settle = partial(connected.set_exception, error)
            with suppress(RuntimeError, asyncio.InvalidStateError):  # the loop has ended
                loop.call_soon_threadsafe(settle)

        threading.Thread(target=connect, daemon=True).start()
        return cls(await connected)

    def _on_readable(self) -> None:
        self.heard = self._loop.time()
        if not self.connection.is_open():
            self._loop.remove_reader(self.connection.fileno())

    def _take(self, size: int) -> Slot:
        """A slot, where the arena need not grow for it: another thread waits for that."""
        slot = self.connection.arena.slots.take(size)
        if slot is None:
            raise errors.ArenaFull("the arena must grow")
        return slot

    def tenant(self, namespace: str, scopes: frozenset[str]) -> int:
        """The number in calls of a door's tenant, which the engine learns with the first call.

        The oldest number is taken where there is no other: calls sent before keep their tenant.
        """
        number = self._tenants.get((namespace, scopes))
        if number is None:
            number = len(self._tenants) + 1
            if number > MAX_TENANTS:
                number = self._tenants.pop(next(iter(self._tenants)))
            ends = time.monotonic() + SEND_S
            self.connection.announce(number, namespace, sorted(scopes), ends)
            self._tenants[namespace, scopes] = number
        return number

    async def call(
        self,
        operation: str,
        fields: str,
        arrays: dict[str, Array],
        request_id: str,
        *,
        deadline_us: int,
        timeout_s: float,
        tenant: int,
    ) -> Reply:
        """One attempt; `fields` are JSON. Cancelling this cancels the call. Raises `AttndError`."""
        ordered = images.in_order(arrays)
        shapes = tuple((name, array.dtype, array.shape) for name, array in ordered)
        header = images.header(images.REQUEST, fields, shapes)
        parts = [array for _, array in ordered]
        room = sum(array.nbytes for array in parts) + ANSWER_ROOM
        route, call_id = self.connection.routes[operation], id_bytes(request_id)
        ends = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    place = await self._place(header, parts, room)
                    posted = self.connection.post(route, place, deadline_us, call_id, ends, tenant)
                    answer = await self._answer(*posted)
                    if answer.needed <= room:
                        break
                    room = answer.needed
        except TimeoutError as error:
            raise errors.TimedOut("no answer within the timeout") from error
        meta = Meta(request_id, Timings(by_stage, answer.seconds))
        return read_answer(self.connection.arena, place, answer, meta)

    async def _place(self, header: bytes, arrays: list[Array], room: int) -> PlacedCall:
        if room < LARGE_BYTES:
            with suppress(errors.ArenaFull):
                return self._areas.place_copies(header, arrays, room)
        return await asyncio.to_thread(self.connection.areas.place_copies, header, arrays, room)

    async def _answer(self, number: int, pending: Pending) -> Answer:
        event = asyncio.Event()
        pending.gate = Waker(self._loop, event)
        try:
            while pending.reply is None:
                if self.connection.broken:
                    raise errors.ReplyLost(self.connection.broken)
                await event.wait()
                event.clear()
        except BaseException:
            pending.is_abandoned = True
            self.connection.cancel(number)
            raise
        if not isinstance(pending.reply, Answer):
            raise RuntimeError(f"call {number} was answered by {pending.reply!r}: this is a bug")
        return pending.reply

    def close(self) -> None:
        self._loop.remove_reader(self.connection.fileno())
        self.connection.close()
