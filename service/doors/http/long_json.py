"""Converts long JSON to images, and images to long JSON, in a worker process beside the door.

The two share the arena, so only offsets and lengths are exchanged. The process starts when it is
first needed, converts one body at a time, and ends after `IDLE_S` without work.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from service.doors.http.long_json_worker import Order, Result
from service.doors.kit.pieces import FairLock
from service.doors.kit.problems import ProblemText
from service.errors import Internal, Overloaded
from service.launch import command_of
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

IDLE_S: Final = 60.0
MAX_WAITING: Final = 64
"""Bodies of one namespace that wait, replies included; one more request is rejected. A reply never
is: its operation may have changed the pool."""
GROWTH: Final = 4
"""Maximum image bytes per JSON character: `0,` may be an F64."""
JSON_GROWTH: Final = 13
"""Maximum JSON characters per image byte: a BF16 takes 2 bytes, or 25 characters."""
SPARE_BYTES: Final = 64 * 2**10


class LongJson:
    """The worker process of one door."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.lock = FairLock()
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.ending: asyncio.TimerHandle | None = None

    async def image_of(
        self, body: Slot, length: int, given: Mapping[str, Any], namespace: str
    ) -> tuple[Slot, int]:
        """The image of a request with the fields `given` by its path, and its length. Raises
        ProblemText, Overloaded."""
        if (waiting := self.lock.num_waiting(namespace)) >= MAX_WAITING:
            text = f"{waiting} long JSON bodies are waiting: retry later, or send safetensors"
            raise Overloaded(text, retry_after_s=1.0)
        room = GROWTH * length + SPARE_BYTES
        order = Order(dict(given), body.offset, length, room)
        slot, size = await self.convert(body, order, namespace)
        if slot is None:
            raise Internal(f"{length} bytes of JSON became an image of {size}: this is a bug")
        return slot, size

    async def json_of(self, image: Slot, length: int, namespace: str) -> tuple[Slot | None, int]:
        """The JSON of a reply, None if it is longer than `server.max_json_bytes`, and its length.
        It counts in the namespace's share of unread responses.
        Raises ProblemText, Overloaded."""
        limit = min(self.door.limits.max_json_bytes, JSON_GROWTH * length)
        order = Order(None, image.offset, length, limit)
        written, size = await self.convert(image, order, namespace)
        if written is not None:
            self.door.link.arena.answers.count(namespace, written)
        return written, size

    async def convert(self, source: Slot, order: Order, namespace: str) -> tuple[Slot | None, int]:
        """Have the worker convert one body: the slot of the output (None where that exceeds the
        room), and its length. Namespaces take turns.

        The worker converts a cancelled request's body to its end, and writes to its slot till then.
        """
        work = asyncio.ensure_future(self.wait(source, order, namespace))
        work.add_done_callback(forget_error)
        return await asyncio.shield(work)

    async def wait(self, source: Slot, order: Order, namespace: str) -> tuple[Slot | None, int]:
        source.hold()
        try:
            async with self.lock.turn(namespace):
                into = self.door.link.arena.slot(order.room)
                result = await self.exchange(replace(order, into=into.offset))
        finally:
            source.free()
        if not result.problem and result.length <= order.room:
            return into, result.length
        into.free()
        if result.problem:
            raise ProblemText(result.problem)
        return None, result.length

    async def exchange(self, order: Order) -> Result:
        if self.ending is not None:
            self.ending.cancel()
        loop = self.door.loop
        connection = self.connection or self.start()
        try:
            result = await loop.run_in_executor(None, round_trip, connection, order)
        except (OSError, EOFError) as error:
            self.close()
            raise Internal(f"the worker process for long JSON has ended: {error}") from error
        self.ending = loop.call_later(IDLE_S, self.close)
        return result

    def start(self) -> Connection:
        """Start the process; it maps the arena, too."""
        arena = self.door.link.arena.mapping.fd
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), arena)
            self.process = subprocess.Popen(
                (*command_of("service.doors.http.long_json_worker"), *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # ignore Ctrl-C
            )
        self.connection = connection = Connection(ours.detach())
        return connection

    def close(self) -> None:
        if self.ending is not None:
            self.ending.cancel()
        if self.process is not None and self.connection is not None:
            self.process.kill()
            self.process.wait()
            if not self.lock.is_held:  # else a thread waits for the end of the connection
                self.connection.close()
        self.process = self.connection = self.ending = None


def round_trip(connection: Connection, order: Order) -> Result:
    """In a thread: an order's result. Raises OSError, EOFError when the worker ends."""
    connection.send(order)
    result: Result = connection.recv()
    return result


def forget_error(work: asyncio.Future[Any]) -> None:
    """The request has the error; if it was cancelled, the error is not needed."""
    if not work.cancelled():
        work.exception()
