"""The images of calls that come over TCP, at the engine's end."""

from __future__ import annotations

import secrets
import socket

from attnd.wire.frames import FrameError, Reader

from service.road.engine_end.calls import Call, Event
from service.road.messages import NONCE_BYTES
from service.road.tcp import Filling


class Incoming:
    """The images of calls, at the engine's end. A call begins with the last byte of its image; the
    image of a refused call is discarded."""

    def __init__(self, live: dict[int, Call], limit: int) -> None:
        """`live` has the session's calls, `limit` is the maximum image in bytes."""
        self.live = live
        self.limit = limit
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self.filling: Filling | None = None
        self.call: Call | None = None

    @property
    def is_underway(self) -> bool:
        return self.filling is not None

    def begin(self, call: Call | None, length: int, reader: Reader) -> Call | None:
        """Receive the image of a call (None: of a refused one); returns the call once it is
        whole."""
        if length > self.limit:
            raise FrameError(f"an image of {length} bytes: an arena has at most {self.limit}")
        filling = Filling(None if call is None else call.request, length)
        filling.feed(reader)
        if not filling.left:
            return call
        self.filling, self.call = filling, call
        if call is not None:
            del self.live[call.id]  # it cannot be answered yet
        return None

    def receive(self, sock: socket.socket, events: list[Event]) -> int:
        """One read's worth; 0 at the end of the stream. Raises the socket's errors."""
        if self.filling is None:
            raise RuntimeError("no image is underway: this is a bug")
        count = self.filling.receive(sock)
        if not self.filling.left:
            self.filling = None
            call, self.call = self.call, None
            if call is not None:
                self.live[call.id] = call
                events.append(call)
        return count
