"""A closed loop of HTTP requests over raw keep-alive sockets: little of its own in the figures."""

from __future__ import annotations

import gc
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BACKEND_STAGES: Final = (b"plan", b"copy-in", b"kernel", b"copy-out")
STAGE: Final = re.compile(rb"([\w-]+);dur=([\d.eE+-]+)")
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TIMING: Final = re.compile(rb"\r\nserver-timing: *([^\r]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds on the client's clock, and those the backend says it took."""

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


class Connection:
    """One keep-alive connection; answers are read into a buffer that is made once."""

    def __init__(self, port: int, largest_answer: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(largest_answer + 65536)

    def call(self, request: bytes) -> Sample:
        """Send a whole request and read its whole answer; RuntimeError unless it is a 200."""
        started = time.perf_counter()
        self._socket.sendall(request)
        head, _ = self._read()
        seconds = time.perf_counter() - started
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"not a 200: {head[:200]!r}")
        return Sample(seconds, backend_seconds(head))

    def answer(self, request: bytes) -> bytes:
        """The body that answers a request."""
        self._socket.sendall(request)
        return bytes(self._read()[1])

    def _read(self) -> tuple[bytes, memoryview]:
        """Head and body of one answer; the body is a view that the next call overwrites."""
        view = memoryview(self._buffer)
        have = 0
        while (end := self._buffer.find(b"\r\n\r\n", 0, have)) < 0:
            have += self._receive(view[have:])
        head = bytes(view[: end + 2])
        length = LENGTH.search(head)
        if length is None:
            raise RuntimeError(f"no content-length in {head!r}")
        whole = end + 4 + int(length[1])
        while have < whole:
            have += self._receive(view[have:whole])
        return head, view[end + 4 : whole]

    def _receive(self, into: memoryview) -> int:
        count = self._socket.recv_into(into)
        if count == 0:
            raise RuntimeError("the server closed the connection")
        return count

    def close(self) -> None:
        self._socket.close()


def backend_seconds(head: bytes) -> float:
    """plan + copy-in + kernel + copy-out of a Server-Timing header; 0 without one."""
    timing = TIMING.search(head)
    if timing is None:
        return 0.0
    stages = dict(STAGE.findall(timing[1]))
    return sum(float(stages.get(name, 0.0)) for name in BACKEND_STAGES) / 1000


def loop(port: int, requests: Sequence[bytes], answer: int, count: int, limit_s: float) -> Run:
    """Up to `count` requests, in turn over `requests`, one at a time, for at most `limit_s`."""
    connection = Connection(port, answer)
    samples: list[Sample] = []
    gc.disable()
    try:
        started = time.perf_counter()
        for turn in range(count):
            samples.append(connection.call(requests[turn % len(requests)]))
            if time.perf_counter() - started > limit_s:
                break
        return Run(tuple(samples), time.perf_counter() - started)
    finally:
        gc.enable()
        connection.close()


def crowd(
    port: int, requests: Sequence[bytes], answer: int, limit_s: float, connections: int
) -> float:
    """Requests a second that `connections` loops side by side complete in about `limit_s`."""
    counts = [0] * connections

    def one(index: int) -> None:
        connection = Connection(port, answer)
        try:
            while time.perf_counter() < ends:
                connection.call(requests[(index + counts[index]) % len(requests)])
                counts[index] += 1
        finally:
            connection.close()

    started = time.perf_counter()
    ends = started + limit_s
    threads = [threading.Thread(target=one, args=(index,)) for index in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)
