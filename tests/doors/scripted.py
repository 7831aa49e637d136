"""A door in a thread of the test's process, before a scripted engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from images import read_image, write_image
from road.scripted_engine_end import ScriptedEnd, scripted_end

from config.settings import load_settings
from service.doors.http.server import HttpServer
from service.doors.kit.process import Setup
from service.errors import AnswerTooLarge, AttndError, Internal
from service.metrics import Metrics
from service.operations.table import BY_NAME, BY_NUMBER
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, Cancel, SessionConfig
from service.road.messages import State
from tests.harness.plain_http import http_client
from tests.harness.waiting import WAIT_S, wait_for

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
SECRET: Final = "by which the engine knows its doors"
STAGES: Final = (0.001, 0.002, 0.003, 0.004, 0.005, 0.006)
Script = Callable[["Heard"], bytes | AttndError]
"""From a call to its answer: an image, or an error."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A call as the engine got it."""

    operation: str
    image: bytes
    deadline_s: float
    request_id: bytes
    capacity: int

    @property
    def fields(self) -> dict[str, Any]:
        return read_image(self.image).fields

    @property
    def tensors(self) -> dict[str, Any]:
        return read_image(self.image).tensors


def as_sent(heard: Heard) -> bytes:
    """The request's fields and tensors as the answer's."""
    return write_image(heard.fields, heard.tensors, "response")


def heard_from(call: Call) -> Heard:
    name = BY_NUMBER[call.operation].name
    return Heard(name, bytes(call.request), call.deadline_s, call.request_id, len(call.answer))


@dataclass
class Engine:
    """The engine's received calls and its replies; with the gate closed it does not reply."""

    script: Script = as_sent
    heard: list[Heard] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    is_closed: bool = False
    end: ScriptedEnd | None = None

    def behave(self, event: Call | Cancel) -> None:
        if isinstance(event, Cancel):
            self.cancelled.append(event.call.id)
            if event.call in self.waiting:
                self.waiting.remove(event.call)
                event.call.session.fail(event.call, Internal("cancelled by the caller"))
            return
        self.heard.append(heard_from(event))
        if self.is_closed:
            self.waiting.append(event)
        else:
            self.answer(event, self.heard[-1])

    def answer(self, call: Call, heard: Heard) -> None:
        try:
            said = self.script(heard)
        except AttndError as error:
            said = error
        if isinstance(said, AttndError):
            call.session.fail(call, said, STAGES)
        elif len(said) > len(call.answer):
            error = AnswerTooLarge(len(said), len(call.answer), "name a larger place")
            call.session.fail(call, error, STAGES, needed=len(said))
        else:
            call.answer[: len(said)] = said
            status = BY_NUMBER[call.operation].status
            call.session.answer(call, status, len(said), STAGES)

    def close_gate(self) -> None:
        self.is_closed = True

    def open_gate(self) -> None:
        """Answer what waits, and all that comes."""
        done = threading.Event()

        def task() -> None:
            self.is_closed = False
            waiting, self.waiting = self.waiting, []
            for call in waiting:
                self.answer(call, heard_from(call))
            done.set()

        assert self.end is not None
        self.end.do(task)
        assert done.wait(WAIT_S)

    def push_state(self, state: str, reason: str = "") -> None:
        """Push a state to the door."""
        end = self.end
        assert end is not None
        end.do(
            lambda: (
                [one.send_state(State(state, reason)) for one in end.sessions.values()][:0] or None
            )
        )

    def die(self) -> None:
        """End all sessions, as a crash would."""
        end = self.end
        assert end is not None

        def task() -> None:
            for session in end.sessions.values():
                session.live.clear()  # they are never answered
                session.end("crashed")

        end.do(task)


@dataclass
class Running:
    """A running door."""

    server: HttpServer
    thread: threading.Thread
    engine: Engine
    metrics: Metrics
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        return http_client(self.url)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def say(self, data: bytes, *, then_close: bool = False) -> bytes:
        """Send bytes on a connection of their own; all that comes back until it is closed."""
        with self.connect() as peer:
            peer.sendall(data)
            if then_close:
                peer.shutdown(socket.SHUT_WR)
            return receive_all(peer)

    def drain(self) -> None:
        assert self.server.loop is not None
        with suppress(RuntimeError):  # it has ended, and closed its loop
            self.server.loop.call_soon_threadsafe(self.server.drain)

    def on_loop(self, task: Callable[[], Any]) -> None:
        assert self.server.loop is not None
        self.server.loop.call_soon_threadsafe(task)

    @property
    def door(self) -> Any:
        assert self.server.door is not None
        return self.server.door

    @property
    def routes_app(self) -> Any:
        return self.server.application.dispatcher.app

    def counted(self, code: str, op: str) -> float:
        """Requests counted under a code."""
        text = self.metrics.render()[0].decode()
        line = f'attnd_requests_total{{code="{code}",op="{op}"}} '
        other = f'attnd_requests_total{{op="{op}",code="{code}"}} '
        for found in text.splitlines():
            for start in (line, other):
                if found.startswith(start):
                    return float(found.removeprefix(start))
        return 0.0


def receive_all(peer: socket.socket) -> bytes:
    data = bytearray()
    while piece := peer.recv(2**20):
        data += piece
    return bytes(data)


RULES: Final = SessionConfig(
    instance_id="scripted",
    routes={name: operation.number for name, operation in BY_NAME.items()},
    limits={},
    max_arena_bytes=2**30,
    default_deadline_s=30.0,
    admission=Admission(secret=SECRET),
)


@contextmanager
def serving(
    directory: Path, *arguments: str, script: Script = as_sent, uds: Path | None = None
) -> Iterator[Running]:
    """A ready door with these settings; on the Unix socket `uds` when that is given."""
    where = () if uds is None else ("--server.uds", str(uds))
    settings = load_settings([*where, *arguments])
    engine = Engine(script)
    listener = listen_on(uds)
    metrics = Metrics()
    with scripted_end(directory, engine.behave, RULES) as end:
        engine.end = end
        server = HttpServer(
            Setup(settings, metrics, str(end.path), "http-0", SECRET, sockets=[listener])
        )
        thread = threading.Thread(target=server.run, name="door")
        thread.start()
        port = 0 if uds is not None else listener.getsockname()[1]
        running = Running(server, thread, engine, metrics, port)
        try:
            wait_for(lambda: server.started and running.door.link.state[0] == "ready", "the door")
            yield running
        finally:
            if thread.is_alive():
                engine.open_gate()
                running.drain()
            thread.join(WAIT_S)
            listener.close()
            assert not thread.is_alive(), "the door did not stop"


def listen_on(uds: Path | None) -> socket.socket:
    if uds is None:
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(uds))
    listener.listen()
    return listener


def decode_body(rows: int = 1, width: int = 8) -> bytes:
    """A request for decode, its q of `rows * width * 4` bytes."""
    q = np.arange(rows * width, dtype=np.float32).reshape(rows, 1, width)
    return write_image({"layer": 0, "sequences": ["a"]}, {"q": q})


def post(client: httpx.Client, path: str, body: bytes, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, content=body, headers={"content-type": SAFETENSORS, **given})


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    """One HTTP/1.1 request as bytes."""
    lines = {"host": "localhost", "content-type": SAFETENSORS, "content-length": str(len(body))}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = {name: value for name, value in {**lines, **given}.items() if value}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@dataclass(frozen=True, slots=True)
class Reply:
    """One response taken from a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == PROBLEM, self
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        assert document["title"] and document["detail"] and document["type"]
        return document


def replies(data: bytes) -> list[Reply]:
    """The final responses in a stream of bytes; interim ones are passed over."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        if status < 200:
            continue
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
        assert headers["x-request-id"] and headers["server-timing"] and headers["date"]
        length = int(headers.get("content-length", "0"))
        assert len(data) >= length, "a response is cut off"
        found.append(Reply(status, headers, data[:length]))
        data = data[length:]
    return found


def only(data: bytes) -> Reply:
    """The one response in a stream of bytes."""
    (reply,) = replies(data)
    return reply
