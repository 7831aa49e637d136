"""An engine in a thread behind its socket, and a caller that can send it anything."""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from attnd.wire import frames as f

from config.settings import EngineSettings, PoolSettings, ServerSettings, Settings
from kernels import make_backend
from service.engine.store.setup import geometry
from tests.engine.harness import running_engine
from tests.engine.random_calls.frame_fuzz import hello
from tests.engine.random_calls.image_fuzz import INFO

ARENA_BYTES: Final = 2**20
SLOT_BYTES: Final = 4096
WAIT_S: Final = 30.0


@dataclass
class Session:
    """One caller's connection and arena."""

    sock: socket.socket
    arena: mmap.mmap
    fd: int
    reader: f.Reader = field(default_factory=lambda: f.Reader(f.FROM_ENGINE))
    last_id: int = 0

    @classmethod
    def connect(cls, path: str) -> Session:
        sock = connected(path)
        sock.sendall(hello(ARENA_BYTES))
        data, (fd,), _, _ = socket.recv_fds(sock, 2**16, 4)
        session = cls(sock, mmap.mmap(fd, ARENA_BYTES), fd)
        session.reader.feed(data)
        assert [kind for kind, _, _ in session.reader.frames()] == [f.WELCOME]
        return session

    def call(self, route: int, body: bytes, place: int, room: int, deadline_us: int = 0) -> bytes:
        """Lay a request into slot `place`, its answer's room into that beside it; the frame."""
        request, answer = 2 * place * SLOT_BYTES, (2 * place + 1) * SLOT_BYTES
        body = body[:SLOT_BYTES]
        self.arena[request : request + len(body)] = body
        return self.frame(route, deadline_us, request, len(body), answer, room)

    def frame(self, route: int, deadline_us: int, *places: int) -> bytes:
        self.last_id += 1
        payload = f.CALL_PAYLOAD.pack(self.last_id, route, 0, deadline_us, *places, bytes(16))
        return f.frame(f.CALL, payload)

    def answers(self, count: int) -> Iterator[tuple[int, int, int, int, bytes]]:
        """Id, status, length, needed capacity and inline image of the next answers."""
        while count:
            for kind, start, size in self.reader.frames():
                assert kind == f.ANSWER, f.NAMES[kind]
                window = self.reader.window
                values = f.ANSWER_PAYLOAD.unpack_from(window, start)
                inline = bytes(window[start + f.ANSWER_PAYLOAD.size : start + size])
                yield values[0], values[1], values[4], values[5], inline
                count -= 1
            if count:
                assert self.reader.receive(self.sock), "the engine ended the session"

    def close(self) -> None:
        self.sock.close()
        self.arena.close()
        os.close(self.fd)


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(path)
    return sock


class Errors(logging.Handler):
    """Keeps the errors that the engine logs: every one is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.replies: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.replies.append(self.format(record))


@contextmanager
def live_engine() -> Iterator[str]:
    """The path of a running engine's socket; it must end well."""
    settings = Settings(
        pool=PoolSettings(
            num_layers=INFO.num_layers,
            num_kv_heads=INFO.num_kv_heads,
            head_dim=INFO.head_dim,
            page_size=INFO.page_size,
            num_pages=INFO.num_pages,
            dtype="fp32",
        ),
        engine=EngineSettings(max_sequences=200),
        server=ServerSettings(queue_depth=1000),
    )
    backend = make_backend("cpu", geometry(settings.pool, INFO.num_pages), poison=True)
    errors = Errors()
    logging.getLogger("attnd").addHandler(errors)
    try:
        with running_engine(backend, settings) as running:
            yield running.path
    finally:
        logging.getLogger("attnd").removeHandler(errors)
    assert not errors.replies, errors.replies[0]
