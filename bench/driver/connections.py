"""Callers with little of their own: HTTP over a keep-alive socket, frames over the road's socket.

Both are driven alike: `begin` a request, then `pump` until its answer is whole. On a blocking
socket one `pump` is enough; a crowd of sockets that do not block is served by one thread.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Protocol

BACKEND_STAGES: Final = ("plan", "copy_in", "kernel", "copy_out")
"""What is the backend's own time; the rest is the way there and back."""
STAGE: Final = re.compile(rb"([\w-]+);dur=([\d.eE+-]+)")
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TIMING: Final = re.compile(rb"\r\nserver-timing: *([^\r]+)", re.IGNORECASE)

# docs/road.md
HEADER: Final = Struct("<HHI")
CALL: Final = Struct("<HHIQHHIQQQQ16s")
ANSWER: Final = Struct("<HHIQHHIQQ6f")
CALL_KIND: Final = 1
ANSWER_KIND: Final = 2
HELLO_KIND: Final = 16
WELCOME_KIND: Final = 17
STAGES: Final = slice(10, 14)
"""Plan, copy in, kernel and copy out among the values of an answer's frame."""
SLOT: Final = 64
PATIENCE_S: Final = 120
ANSWER_ROOM: Final = 4096
"""For an answer beyond its tensors."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds on the caller's clock, and those the backend says it took."""

    seconds: float
    backend_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """What one loop measured; `seconds` is its whole length."""

    samples: tuple[Sample, ...]
    seconds: float

    @property
    def per_second(self) -> float:
        return len(self.samples) / self.seconds


class Caller(Protocol):
    """A connection that answers one request at a time."""

    def begin(self, request: bytes) -> None:
        """The request to send next."""
        ...

    def pump(self) -> bool:
        """Send and receive what can be; whether the answer is whole. RuntimeError unless a 200."""
        ...

    @property
    def backend_s(self) -> float:
        """What the last answer says that the backend took; 0 when it does not say."""
        ...

    @property
    def socket(self) -> socket.socket: ...

    def close(self) -> None: ...


class Connection:
    """One keep-alive HTTP connection; answers are read into a buffer that is made once."""

    def __init__(self, port: int, largest_answer: int) -> None:
        self.socket = patient(socket.create_connection(("127.0.0.1", port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(largest_answer + 65536)
        self._view = memoryview(self._buffer)
        self._out = memoryview(b"")
        self._have = self._body = self._whole = 0

    def begin(self, request: bytes) -> None:
        self._out = memoryview(request)
        self._have = self._body = self._whole = 0

    def pump(self) -> bool:
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            pass
        try:
            while not self._whole or self._have < self._whole:
                count = self.socket.recv_into(self._view[self._have :])
                if count == 0:
                    raise RuntimeError("the server closed the connection")
                self._have += count
                if not self._whole:
                    self._look_at_head()
        except BlockingIOError:
            return False
        return True

    def _look_at_head(self) -> None:
        """Once the head is there: how long the whole answer is."""
        end = self._buffer.find(b"\r\n\r\n", 0, self._have)
        if end < 0:
            return
        length = LENGTH.search(self._buffer, 0, end + 2)
        if length is None or not self._buffer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(
                f"not a 200 with a length: {bytes(self._view[: self._have])[:600]!r}"
            )
        self._body = end + 4
        self._whole = self._body + int(length[1])

    @property
    def backend_s(self) -> float:
        return backend_seconds(bytes(self._view[: self._body]))

    def answer(self, request: bytes) -> bytes:
        """The body that answers a request."""
        self.begin(request)
        self.pump()
        return bytes(self._view[self._body : self._whole])

    def close(self) -> None:
        self.socket.close()


def framed(path: str, body: bytes) -> bytes:
    """An HTTP/1.1 request."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/vnd.safetensors\r\n\r\n".encode() + body


def backend_seconds(head: bytes) -> float:
    """plan + copy-in + kernel + copy-out of a Server-Timing header; 0 without one."""
    timing = TIMING.search(head)
    if timing is None:
        return 0.0
    stages = {name.decode().replace("-", "_"): float(ms) for name, ms in STAGE.findall(timing[1])}
    return sum(stages.get(name, 0.0) for name in BACKEND_STAGES) / 1000


class FrameConnection:
    """One session on the road; images lie in its arena from the start, one place takes answers."""

    def __init__(
        self, path: str, operation: str, images: Sequence[bytes], largest_answer: int
    ) -> None:
        """`frames` are then the calls, one for each image."""
        self.socket = patient(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.socket.connect(path)
        places = [0]
        for image in images:
            places.append(places[-1] + -(-len(image) // SLOT) * SLOT)
        self.capacity = largest_answer + ANSWER_ROOM
        size = places[-1] + self.capacity
        welcome, fd = self._greet(size)
        if welcome["arena_bytes"] < size:
            raise RuntimeError(f"{size} bytes of arena are needed, {welcome['arena_bytes']} given")
        self._arena = mmap.mmap(fd, size)
        os.close(fd)
        route = welcome["routes"][operation]
        self.frames: list[bytes] = []
        for number, (image, at) in enumerate(zip(images, places[:-1], strict=True)):
            self._arena[at : at + len(image)] = image
            call = (number, route, 0, 0, at, len(image), places[-1], self.capacity, bytes(16))
            self.frames.append(CALL.pack(CALL_KIND, 0, CALL.size - HEADER.size, *call))
        self._out = b""
        self._answer = bytearray(ANSWER.size)
        self._view = memoryview(self._answer)
        self._have = 0

    def _greet(self, size: int) -> tuple[dict[str, Any], int]:
        """HELLO, and the WELCOME that comes back with the arena's descriptor."""
        hello = json.dumps({"version": 1, "name": "bench", "arena_bytes": size}).encode()
        self.socket.sendall(HEADER.pack(HELLO_KIND, 0, len(hello)) + hello)
        data, fds, _, _ = socket.recv_fds(self.socket, 65536, 1)
        kind, _, length = HEADER.unpack_from(data)
        while len(data) < HEADER.size + length:
            data += self.socket.recv(65536)
        content: dict[str, Any] = json.loads(data[HEADER.size : HEADER.size + length])
        if kind != WELCOME_KIND:
            raise RuntimeError(f"no WELCOME: {content}")
        return content, fds[0]

    def begin(self, request: bytes) -> None:
        self._out = request
        self._have = 0

    def pump(self) -> bool:
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
            while self._have < ANSWER.size:
                count = self.socket.recv_into(self._view[self._have :])
                if count == 0:
                    raise RuntimeError("the engine closed the connection")
                self._have += count
        except BlockingIOError:
            return False
        kind, _, size, _, status, *_ = ANSWER.unpack_from(self._answer)
        if kind != ANSWER_KIND or status != 200:
            told = self.socket.recv(max(size + HEADER.size - ANSWER.size, 0) or 1)
            raise RuntimeError(f"frame {kind}, status {status}: {told[:600]!r}")
        return True

    @property
    def backend_s(self) -> float:
        seconds: tuple[float, ...] = ANSWER.unpack_from(self._answer)[STAGES]
        return sum(seconds)

    def close(self) -> None:
        self.socket.close()
        self._arena.close()


def patient(made: socket.socket) -> socket.socket:
    """A blocking socket on which a read that takes PATIENCE_S fails.

    Python's own timeouts would cost a system call before each read and write.
    """
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, Struct("qq").pack(PATIENCE_S, 0))
    return made


def timed(caller: Caller, request: bytes) -> Sample:
    """One request on a blocking connection."""
    started = time.perf_counter()
    caller.begin(request)
    if not caller.pump():
        raise RuntimeError(f"no answer in {PATIENCE_S} s")
    seconds = time.perf_counter() - started
    return Sample(seconds, caller.backend_s)


def loop(call: Callable[[int], Sample], count: int, limit_s: float) -> Run:
    """Up to `count` calls, one after another, for at most `limit_s`; `call` is told which."""
    samples: list[Sample] = []
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for turn in range(count):
            samples.append(call(turn))
            if time.perf_counter() - started > limit_s:
                break
        return Run(tuple(samples), time.perf_counter() - started)
    finally:
        gc.enable()


def crowd(callers: Sequence[Caller], requests: Sequence[bytes], limit_s: float) -> float:
    """Requests a second that connections side by side complete in about `limit_s`, one each.

    One thread serves them all: threads that wait for each other would be part of the figure.
    """
    poll = select.epoll()
    by_fd = {caller.socket.fileno(): caller for caller in callers}
    turn = finished = 0
    started = time.perf_counter()
    ends = started + limit_s
    for fd, caller in by_fd.items():
        caller.socket.setblocking(False)
        caller.begin(requests[turn % len(requests)])
        turn += 1
        poll.register(fd, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    while finished < turn:
        for fd, _ in poll.poll():
            caller = by_fd[fd]
            while caller.pump():
                finished += 1
                if time.perf_counter() >= ends:
                    poll.unregister(fd)
                    break
                caller.begin(requests[turn % len(requests)])
                turn += 1
    elapsed = time.perf_counter() - started
    poll.close()
    return finished / elapsed
