"""An engine without a pool for the road's tests: a thread that serves sessions by a function."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from attnd.wire import frames as f

from service.road.arena import PAGEABLE, Pinning
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, Cancel, SessionConfig
from service.road.engine_end.listening import accept, listen
from service.road.engine_end.session import Session
from service.road.messages import State

Behave = Callable[[Call | Cancel], None]
ROUTES = {"create_sequences": 1, "append": 7, "decode": 9, "pool": 15}
LIMITS = {"max_body_bytes": 2**20}
SECRET = "s" * 32
"""Of the engine's doors, where `config` is given one."""


def echo(event: Call | Cancel) -> None:
    """Answers with the request's own bytes that fit."""
    if isinstance(event, Call):
        length = min(len(event.request), len(event.answer))
        event.answer[:length] = event.request[:length]
        event.session.answer(event, 200, length, f.NO_STAGES)


def config(
    *,
    pinning: Pinning = PAGEABLE,
    max_arena_bytes: int = 2**20,
    max_calls: int = 8,
    admission: Admission | None = None,
) -> SessionConfig:
    return SessionConfig(
        instance_id="scripted",
        routes=ROUTES,
        limits=LIMITS,
        max_arena_bytes=max_arena_bytes,
        default_deadline_s=30.0,
        pinning=pinning,
        max_calls=max_calls,
        max_output_bytes=2**16,
        admission=admission or Admission(),
    )


@dataclass(slots=True)
class ScriptedEnd:
    """`tasks` are run by the engine's thread: the only one that may touch sessions. Without
    `behave` the engine answers nothing, and keeps its calls and cancels."""

    path: str
    listener: socket.socket
    behave: Behave | None
    config: SessionConfig
    is_remote: bool
    sessions: dict[int, Session] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    wake: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    stopping: bool = False
    calls: list[Call] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)

    def run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.listener, selectors.EVENT_READ)
                selector.register(self.wake[0], selectors.EVENT_READ)
                while not self.stopping:
                    self.turn(selector)
        except BaseException as error:
            self.errors.append(error)
        finally:
            for session in self.sessions.values():
                session.close()

    def turn(self, selector: selectors.BaseSelector) -> None:
        for key, mask in selector.select():
            if key.fileobj is self.listener:
                self.welcome(selector)
            elif key.fileobj is self.wake[0]:
                self.wake[0].recv(64)
                while self.tasks:
                    self.tasks.pop(0)()
            elif isinstance(key.fileobj, Session):
                self.serve(key.fileobj, mask)
        for session in list(self.sessions.values()):
            if session.ended:
                selector.unregister(session)
                session.close()
                del self.sessions[session.number]
            else:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE * session.wants_write)
                selector.modify(session, events)

    def welcome(self, selector: selectors.BaseSelector) -> None:
        accepted = self.listener.accept() if self.is_remote else accept(self.listener)
        if accepted is not None:
            sock, remote = accepted[0], {"is_remote": self.is_remote}
            session = Session(sock, sock.fileno(), self.config, State("ready"), **remote)
            self.sessions[session.number] = session
            selector.register(session, selectors.EVENT_READ)

    def serve(self, session: Session, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            session.flush()
        if mask & selectors.EVENT_READ:
            for event in session.read():
                if self.behave is not None:
                    self.behave(event)
                elif isinstance(event, Call):
                    self.calls.append(event)
                else:
                    self.cancels.append(event)

    def do(self, task: Callable[[], None]) -> None:
        """Run a task on the engine's thread."""
        self.tasks.append(task)
        self.wake[1].send(b".")


@contextmanager
def scripted_end(
    directory: Path,
    behave: Behave | None = echo,
    rules: SessionConfig | None = None,
    is_remote: bool = False,
) -> Iterator[ScriptedEnd]:
    """An engine that serves until the block is left; what its thread raised is raised there.
    `is_remote`: over TCP."""
    with listen_on_tcp() if is_remote else listen_in(directory) as (path, sock):
        engine = ScriptedEnd(str(path), sock, behave, rules or config(), is_remote)
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            yield engine
        finally:
            engine.stopping = True
            engine.wake[1].send(b".")
            thread.join(10)
            for one in engine.wake:
                one.close()
        if engine.errors:
            raise engine.errors[0]


@contextmanager
def listen_in(directory: Path) -> Iterator[tuple[Path, socket.socket]]:
    listening = listen(directory / "road" / "engine.sock", private=True)
    try:
        yield listening.path, listening.sock
    finally:
        listening.close()


@contextmanager
def listen_on_tcp() -> Iterator[tuple[str, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"tcp:127.0.0.1:{sock.getsockname()[1]}", sock
