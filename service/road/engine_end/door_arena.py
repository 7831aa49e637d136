"""The arena that a door provides: its descriptor, received with HELLO."""

from __future__ import annotations

import os
import socket
from typing import Final

from attnd.wire.frames import BUFFER_BYTES, FrameError, Reader

from service.road.arena import Arena
from service.road.engine_end.calls import SessionConfig
from service.road.messages import Hello

CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ReceivedArena:
    """A descriptor that was received, until `arena` uses it or `drop` closes it."""

    def __init__(self) -> None:
        self.descriptor = -1

    @property
    def has_come(self) -> bool:
        return self.descriptor >= 0

    def receive(self, sock: socket.socket, reader: Reader) -> int:
        """As the reader's `receive`; keeps a descriptor that comes along. Of several, the last."""
        data, descriptors, _, _ = socket.recv_fds(sock, BUFFER_BYTES, 1, CLOSE_ON_EXEC)
        for descriptor in descriptors:
            self.drop()
            self.descriptor = descriptor
        reader.feed(data)
        return len(data)

    def arena(self, hello: Hello, config: SessionConfig) -> Arena:
        """The session's arena: its own, or its door's. Raises OSError, FrameError."""
        if not hello.brings_arena:
            return Arena.make(hello.arena_bytes, config.max_arena_bytes, config.pinning)
        try:
            arena = Arena.of_door(self.descriptor, config.max_arena_bytes, config.pinning)
        except ValueError as error:
            raise FrameError(f"the arena that came with HELLO: {error}") from None
        self.descriptor = -1
        return arena

    def drop(self) -> None:
        """Close an unused descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
