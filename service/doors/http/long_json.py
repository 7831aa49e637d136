"""Converts long JSON to images, and images to long JSON, in a worker process beside the door.

The two share the arena, so only offsets and lengths are exchanged. The process starts when it is
first needed, converts one body at a time, and ends after `IDLE_S` without work.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from service.doors.http.long_json_worker import (
    DONE,
    FAILED,
    IMAGE_TO_INFERENCE,
    INFERENCE_TO_IMAGE,
    ORDER,
    OUTCOME,
    TO_IMAGE,
    TO_JSON,
)
from service.doors.kit.problems import ProblemText
from service.errors import Internal, Overloaded
from service.image.json_text import dump_json
from service.launch import command_of
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.doors.http.door import Door

IDLE_S: Final = 60.0
MAX_WAITING: Final = 64
GROWTH: Final = 4
"""Maximum image bytes per JSON character: `0,` may stand for an F64."""
SPARE_BYTES: Final = 64 * 2**10


class LongJson:
    """The worker process of one door."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        self.ending: asyncio.TimerHandle | None = None

    async def image_of_json(
        self, text: Slot, length: int, given: Mapping[str, Any]
    ) -> tuple[Slot, int]:
        """The image of a request of `length` characters. Raises ProblemText, Overloaded."""
        room = GROWTH * length + SPARE_BYTES
        slot, size, _ = await self.convert(TO_IMAGE, text, length, room, given)
        return placed(slot, length, size), size

    async def json_of_image(self, image: Slot, length: int, limit: int) -> tuple[Slot | None, int]:
        """A reply as JSON, and its length; no slot if that exceeds the limit."""
        slot, size, _ = await self.convert(TO_JSON, image, length, limit, {})
        return slot, size

    async def image_of_inference(
        self, body: Slot, length: int, json_bytes: int, given: Mapping[str, Any]
    ) -> tuple[Slot, int, dict[str, Any]]:
        """The image of an inference request, its length, and the form of the response. Raises
        ProblemText, Overloaded."""
        room = length + GROWTH * json_bytes + SPARE_BYTES
        slot, size, form = await self.convert(INFERENCE_TO_IMAGE, body, length, room, given)
        return placed(slot, length, size), size, form

    async def inference_of_image(
        self, image: Slot, length: int, limit: int, given: Mapping[str, Any]
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """A response, its length, and the length of its JSON; no slot if it exceeds the limit."""
        return await self.convert(IMAGE_TO_INFERENCE, image, length, limit, given)

    async def convert(
        self, kind: int, source: Slot, length: int, room: int, given: Mapping[str, Any]
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """Have the worker convert one body. It converts a cancelled request's body to its end, and
        writes to its slot until then."""
        if self.waiting >= MAX_WAITING:
            busy = f"{self.waiting} long JSON bodies are waiting: retry later, or send safetensors"
            raise Overloaded(busy, retry_after_s=1.0)
        text = dump_json(given).encode()
        work = asyncio.ensure_future(self.order(kind, source, length, room, text))
        work.add_done_callback(forget_error)
        return await asyncio.shield(work)

    async def order(
        self, kind: int, source: Slot, length: int, room: int, given: bytes
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """Wait for the worker, and for its result."""
        source.hold()
        self.waiting += 1
        try:
            async with self.turn:
                into = await self.door.link.slot(room)
                head = ORDER.pack(kind, source.offset, length, into.offset, room, len(given))
                outcome, size, text = await self.exchange(head + given)
        finally:
            self.waiting -= 1
            source.free()
        if outcome == DONE:
            return into, size, json.loads(text)
        into.free()
        if outcome == FAILED:
            raise ProblemText(text.decode())
        return None, size, {}

    async def exchange(self, order: bytes) -> tuple[int, int, bytes]:
        """Send an order, and receive its result."""
        loop = self.door.loop
        if self.ending is not None:
            self.ending.cancel()
        try:
            sock = self.sock if self.sock is not None else self.start()
            await loop.sock_sendall(sock, order)
            outcome, size, length = OUTCOME.unpack(await self.receive(sock, OUTCOME.size))
            text = await self.receive(sock, length)
        except OSError as error:
            self.close()
            raise Internal(f"the worker process for long JSON has ended: {error}") from error
        self.ending = loop.call_later(IDLE_S, self.close)
        return outcome, size, text

    async def receive(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self.door.loop.sock_recv(sock, size - len(data))
            if not piece:
                raise ConnectionResetError("its socket was closed")
            data += piece
        return data

    def start(self) -> socket.socket:
        """Start the process; it maps the arena, too."""
        arena = self.door.link.arena_fd
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            descriptors = (theirs.fileno(), arena)
            self.process = subprocess.Popen(
                (*command_of("service.doors.http.long_json_worker"), *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # ignore Ctrl-C
            )
        self.sock = ours
        return ours

    def close(self) -> None:
        """Kill the process."""
        if self.ending is not None:
            self.ending.cancel()
        if self.process is not None and self.sock is not None:
            self.process.kill()
            self.process.wait()
            self.sock.close()
        self.process = self.sock = self.ending = None


def placed(slot: Slot | None, length: int, size: int) -> Slot:
    """The slot of an image, which always fits."""
    if slot is None:
        raise Internal(f"{length} bytes of JSON became an image of {size}: this is a bug")
    return slot


def forget_error(work: asyncio.Future[Any]) -> None:
    """The caller has the error; if the caller was cancelled, nobody needs it."""
    if not work.cancelled():
        work.exception()
