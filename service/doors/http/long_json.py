"""Long JSON is turned into images, and images into long JSON, by a process beside the door.

The two share the arena, so only places and lengths go between them. The process is started when it
is first needed, works on one body at a time, and ends when it has been idle for a while.
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
"""At most so many bytes of an image become of one character: `0,` may stand for an F64."""
SPARE_BYTES: Final = 64 * 2**10


class Helper:
    """The process, as its door sees it."""

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
        slot, size, _ = await self.ask(TO_IMAGE, text, length, room, given)
        return placed(slot, length, size), size

    async def json_of_image(self, image: Slot, length: int, limit: int) -> tuple[Slot | None, int]:
        """An answer as JSON and its length; no slot when that passes the limit."""
        slot, size, _ = await self.ask(TO_JSON, image, length, limit, {})
        return slot, size

    async def image_of_inference(
        self, body: Slot, length: int, json_bytes: int, given: Mapping[str, Any]
    ) -> tuple[Slot, int, dict[str, Any]]:
        """The image of an inference request whose JSON is long, its length, and what the answer is
        to be. Raises ProblemText, Overloaded."""
        room = length + GROWTH * json_bytes + SPARE_BYTES
        slot, size, told = await self.ask(INFERENCE_TO_IMAGE, body, length, room, given)
        return placed(slot, length, size), size, told

    async def inference_of_image(
        self, image: Slot, length: int, limit: int, given: Mapping[str, Any]
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """An answer with tensors spelled out, its length, and how much of it is JSON; no slot when
        it passes the limit."""
        return await self.ask(IMAGE_TO_INFERENCE, image, length, limit, given)

    async def ask(
        self, kind: int, source: Slot, length: int, room: int, given: Mapping[str, Any]
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """One order. It is carried out to its end even when nobody waits for it any more, because
        the process still writes to its slot."""
        if self.waiting >= MAX_WAITING:
            told = f"{self.waiting} long JSON bodies wait already: retry later, or send safetensors"
            raise Overloaded(told, retry_after_s=1.0)
        text = dump_json(given).encode()
        work = asyncio.ensure_future(self.order(kind, source, length, room, text))
        work.add_done_callback(forget_error)
        return await asyncio.shield(work)

    async def order(
        self, kind: int, source: Slot, length: int, room: int, given: bytes
    ) -> tuple[Slot | None, int, dict[str, Any]]:
        """Wait for the turn, and for the outcome."""
        source.hold()
        self.waiting += 1
        try:
            async with self.turn:
                into = await self.door.slot(room)
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
        """Send an order, and receive its outcome."""
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
            raise Internal(f"the process for long JSON has ended: {error}") from error
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
        """Start the process; it maps the arena too."""
        arena = self.door.link.arena_fd
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            descriptors = (theirs.fileno(), arena)
            self.process = subprocess.Popen(
                (*command_of("service.doors.http.long_json_worker"), *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self.sock = ours
        return ours

    def close(self) -> None:
        """End the process; there is nothing that it could lose."""
        if self.ending is not None:
            self.ending.cancel()
        if self.process is not None and self.sock is not None:
            self.process.kill()
            self.process.wait()
            self.sock.close()
        self.process = self.sock = self.ending = None


def placed(slot: Slot | None, length: int, size: int) -> Slot:
    """The slot of an image, which always has room."""
    if slot is None:
        raise Internal(f"{length} bytes of JSON became an image of {size}: this is a bug")
    return slot


def forget_error(work: asyncio.Future[Any]) -> None:
    """Whoever waited has it; and if nobody does, it is nobody's."""
    if not work.cancelled():
        work.exception()
