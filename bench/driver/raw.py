"""Callers with little work of their own: HTTP over a keep-alive socket, frames over the road.

They have their own copy of the wire formats, so that they measure every version of the service.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from bench.driver.calls import BACKEND_STAGES, Sample

STAGE: Final = re.compile(rb"([\w-]+);dur=([\d.eE+-]+)")
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TIMING: Final = re.compile(rb"\r\nserver-timing: *([^\r]+)", re.IGNORECASE)
TIMEOUT_S: Final = 120
ANSWER_ROOM: Final = 4096
"""Bytes of an answer beyond its tensors."""

# docs/road.md
HEADER: Final = Struct("<HHI")
CALL: Final = Struct("<HHIQHHIQQQQ16s")
ANSWER: Final = Struct("<HHIQHHIQQ6f")
CALL_KIND: Final = 1
ANSWER_KIND: Final = 2
HELLO_KIND: Final = 16
WELCOME_KIND: Final = 17
STAGES: Final = slice(10, 14)
"""Plan, copy in, kernel and copy out among the values of an ANSWER frame."""
SLOT: Final = 64


def http_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/vnd.safetensors\r\n\r\n".encode() + body


def backend_seconds(head: bytes) -> float:
    """The backend's stages of a Server-Timing header, in seconds; 0 without one."""
    timing = TIMING.search(head)
    if timing is None:
        return 0.0
    stages = {name.decode().replace("-", "_"): float(ms) for name, ms in STAGE.findall(timing[1])}
    return sum(stages.get(name, 0.0) for name in BACKEND_STAGES) / 1000


class HttpConnection:
    """A keep-alive connection that reads every answer into one buffer."""

    def __init__(self, port: int, requests: Sequence[bytes], answer_bytes: int) -> None:
        self._socket = with_timeout(socket.create_connection(("127.0.0.1", port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests = requests
        self._buffer = bytearray(answer_bytes + 65536)
        self._view = memoryview(self._buffer)

    def call(self, turn: int) -> Sample:
        """Send the request of a turn; RuntimeError unless the answer is a 200 with a length."""
        started = time.perf_counter()
        self._socket.sendall(self._requests[turn % len(self._requests)])
        received, body, end = 0, 0, 1
        while received < end:
            count = self._socket.recv_into(self._view[received:])
            if count == 0:
                raise RuntimeError("the server closed the connection")
            received += count
            if not body:
                body, end = self._body(received)
        return Sample(time.perf_counter() - started, backend_seconds(bytes(self._view[:body])))

    def _body(self, received: int) -> tuple[int, int]:
        """Where the body starts and ends; (0, more than received) without the whole head."""
        head = self._buffer.find(b"\r\n\r\n", 0, received)
        if head < 0:
            return 0, received + 1
        length = LENGTH.search(self._buffer, 0, head + 2)
        if length is None or not self._buffer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"not a 200 with a length: {bytes(self._view[:received])[:600]!r}")
        return head + 4, head + 4 + int(length[1])

    def close(self) -> None:
        self._socket.close()


class FrameConnection:
    """A session on the road: images stay in its arena, answers go to one slot."""

    def __init__(
        self, path: str, operation: str, images: Sequence[bytes], answer_bytes: int
    ) -> None:
        self._socket = with_timeout(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._socket.connect(path)
        slots = [0]
        for image in images:
            slots.append(slots[-1] + -(-len(image) // SLOT) * SLOT)
        capacity = answer_bytes + ANSWER_ROOM
        size = slots[-1] + capacity
        welcome, fd = self._greet(size)
        if welcome["arena_bytes"] < size:
            raise RuntimeError(f"the arena has {welcome['arena_bytes']} bytes, expected {size}")
        self._arena = mmap.mmap(fd, size)
        os.close(fd)
        route = welcome["routes"][operation]
        self._frames = []
        for number, (image, at) in enumerate(zip(images, slots[:-1], strict=True)):
            self._arena[at : at + len(image)] = image
            call = (number, route, 0, 0, at, len(image), slots[-1], capacity, bytes(16))
            self._frames.append(CALL.pack(CALL_KIND, 0, CALL.size - HEADER.size, *call))
        self._answer = bytearray(ANSWER.size)
        self._view = memoryview(self._answer)

    def _greet(self, size: int) -> tuple[dict[str, Any], int]:
        """Send HELLO; the content of WELCOME and the arena's descriptor."""
        hello = json.dumps({"version": 1, "name": "bench", "arena_bytes": size}).encode()
        self._socket.sendall(HEADER.pack(HELLO_KIND, 0, len(hello)) + hello)
        data, fds, _, _ = socket.recv_fds(self._socket, 65536, 1)
        kind, _, length = HEADER.unpack_from(data)
        while len(data) < HEADER.size + length:
            data += self._socket.recv(65536)
        content: dict[str, Any] = json.loads(data[HEADER.size : HEADER.size + length])
        if kind != WELCOME_KIND:
            raise RuntimeError(f"frame {kind}, expected WELCOME: {content}")
        return content, fds[0]

    def call(self, turn: int) -> Sample:
        """Send the frame of a turn; RuntimeError unless its ANSWER has status 200."""
        started = time.perf_counter()
        self._socket.sendall(self._frames[turn % len(self._frames)])
        received = 0
        while received < ANSWER.size:
            count = self._socket.recv_into(self._view[received:])
            if count == 0:
                raise RuntimeError("the engine closed the connection")
            received += count
        seconds = time.perf_counter() - started
        answer = ANSWER.unpack_from(self._answer)
        kind, size, status = answer[0], answer[2], answer[4]
        if kind != ANSWER_KIND or status != 200:
            error = self._socket.recv(max(size + HEADER.size - ANSWER.size, 1))
            raise RuntimeError(f"frame {kind}, status {status}: {error[:600]!r}")
        return Sample(seconds, sum(answer[STAGES]))

    def close(self) -> None:
        self._socket.close()
        self._arena.close()


def with_timeout(made: socket.socket) -> socket.socket:
    """A blocking socket whose reads fail after TIMEOUT_S.

    Python's own timeouts cost a system call before each read and write.
    """
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, Struct("qq").pack(TIMEOUT_S, 0))
    return made
