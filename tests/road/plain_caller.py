"""A caller that blocks and hides nothing: the road's tests send any bytes they like through it."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attnd.wire import frames as f
from attnd.wire.frames import VERSION

from service.road.engine_end.calls import Call, SessionConfig
from service.road.engine_end.session import Session
from service.road.messages import Grow, Hello, State, message


@dataclass(frozen=True, slots=True)
class Answer:
    """An ANSWER's fields; `image` is what came inside the frame."""

    id: int
    status: int
    flags: int
    held: int
    length: int
    needed: int
    stages: tuple[float, ...]
    image: bytes


@dataclass(slots=True)
class PlainCaller:
    """One end of a connection."""

    sock: socket.socket
    reader: f.Reader = field(default_factory=lambda: f.Reader(f.FROM_ENGINE))
    descriptors: list[int] = field(default_factory=list)

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def hello(self, arena_bytes: int = 4096, name: str = "plain") -> None:
        self.send(message(f.HELLO, Hello(VERSION, arena_bytes, name)))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """The frames that have arrived; nothing when the stream is at its end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 2**16, 4)
        except (BlockingIOError, ConnectionError):
            return
        self.descriptors += descriptors
        self.reader.feed(data)
        for kind, start, size in self.reader.frames():
            yield kind, bytes(self.reader.window[start : start + size])

    def one(self) -> tuple[int, Any]:
        """The only frame that has arrived: its kind, and its Answer or JSON object."""
        ((kind, payload),) = self.receive()
        return kind, read_answer(payload) if kind == f.ANSWER else json.loads(payload)

    def answers(self) -> list[Answer]:
        """The frames that have arrived, all of them answers."""
        arrived = list(self.receive())
        assert all(kind == f.ANSWER for kind, _ in arrived), [f.NAMES[kind] for kind, _ in arrived]
        return [read_answer(payload) for _, payload in arrived]

    def map(self) -> mmap.mmap:
        """The arena that came with WELCOME."""
        return mmap.mmap(self.descriptors[0], 0)

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def read_answer(payload: bytes) -> Answer:
    number, status, flags, held, length, needed, *stages = f.ANSWER_PAYLOAD.unpack_from(payload)
    image = payload[f.ANSWER_PAYLOAD.size :]
    return Answer(number, status, flags, held, length, needed, tuple(stages), image)


def problem_of(answer: Answer) -> dict[str, Any]:
    """The problem document of an answer that failed."""
    header = json.loads(answer.image[8:])
    document = json.loads(header["__metadata__"]["problem"])
    assert document["status"] == answer.status, document
    assert isinstance(document, dict)
    return document


def calls(session: Session) -> list[Call]:
    """The calls that have arrived at a session; nothing else has, and it goes on."""
    events = session.read()
    assert session.ended == ""
    found = [event for event in events if isinstance(event, Call)]
    assert len(found) == len(events)
    return found


def grow(arena_bytes: int) -> bytes:
    return message(f.GROW, Grow(arena_bytes))


def call_frame(number: int = 1, route: int = 9, **given: Any) -> bytes:
    """A CALL frame, right unless `given` says otherwise."""
    values = {
        "id": number,
        "route": route,
        "reserved": 0,
        "deadline_us": 0,
        "request": 0,
        "length": 64,
        "answer": 1024,
        "capacity": 64,
        "request_id": bytes(16),
    } | given
    return f.frame(f.CALL, f.CALL_PAYLOAD.pack(*values.values()))


@contextmanager
def session_and_caller(
    rules: SessionConfig, *, greet: bool = True
) -> Iterator[tuple[Session, PlainCaller]]:
    """A session and its caller in one thread; `greet`: HELLO and WELCOME have passed."""
    near, far = socket.socketpair()
    near.setblocking(False)
    caller = PlainCaller(near)
    session = Session(far, 1, rules, State("ready"))
    try:
        if greet:
            caller.hello()
            assert session.read() == []
            kind, _ = caller.one()
            assert kind == f.WELCOME
        yield session, caller
    finally:
        session.close()
        for call in list(session.live.values()):
            session.done(call)
        caller.close()
