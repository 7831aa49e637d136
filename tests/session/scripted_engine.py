"""An engine that plays a script over the road, and the sessions that a test has with it."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd import Retries, Session
from attnd.wire import frames as f
from attnd.wire.images import contents_of
from numpy.typing import NDArray

from service.operations.table import BY_NUMBER, OPERATIONS
from tests.harness.listener import Listener
from tests.images import write_image

Arrays = dict[str, NDArray[Any]]
ROUTES: Final = {one.name: one.number for one in OPERATIONS}
STAGES: Final = (0.5, 0.25, 0.0, 2.0, 0.0, 0.125)
QUICK: Final = Retries(2, first_wait_s=0.01, max_wait_s=0.05)
MIB: Final = 2**20


@dataclass(slots=True, eq=False)
class Seen:
    """A call that came: what its frame and its image say, and where they were."""

    number: int
    operation: str
    deadline_us: int
    offset: int
    length: int
    place: int
    capacity: int
    request_id: bytes
    fields: dict[str, Any]
    arrays: Arrays
    views: Arrays
    """The arrays in the arena."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """An answer with fields and arrays; one that is too long is refused with the size it needs."""

    fields: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """An error inside the frame."""

    status: int
    code: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


class Drop:
    """Close the connection without an answer."""


class Never:
    """Do not answer."""


class Later:
    """Answer when the next call has been answered, after it."""

    def __init__(self, step: Answers) -> None:
        self.step = step


Step = Answers | Problem | Drop | Never | Later
Script = Callable[[Seen], Step]


class Scripted:
    """Plays one step per call, the last one for ever."""

    def __init__(self, *steps: Step | Script) -> None:
        self.steps = list(steps)

    def __call__(self, seen: Seen) -> Step:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step(seen) if callable(step) else step


class ScriptedEngine(Listener):
    """Listens at `path`; every call is answered as `script` says. Close it, or use `with`."""

    def __init__(
        self, path: str, script: Script, *, state: str = "ready", limit: int = 1 << 26
    ) -> None:
        self.script = script
        self.limit = limit
        self.state = state
        self.seen: list[Seen] = []
        self.cancelled: list[int] = []
        self.arena_sizes: list[int] = []
        self.refusal: dict[str, Any] | None = None
        super().__init__(path)

    def serve(self, connected: socket.socket) -> None:
        Serving(self, connected).run()

    def send_state(self, state: str, reason: str = "") -> None:
        """Push a state to every session."""
        self.state = state
        for connected in self.connections:
            connected.sendall(f.json_frame(f.STATE, {"state": state, "reason": reason}))


class Serving:
    """One connection and its arena."""

    def __init__(self, engine: ScriptedEngine, connected: socket.socket) -> None:
        self.engine = engine
        self.socket = connected
        self.fd = os.memfd_create("scripted", os.MFD_ALLOW_SEALING)
        self.later: list[tuple[Seen, Answers]] = []

    def run(self) -> None:
        reader = f.Reader(f.FROM_CALLER)
        try:
            while reader.receive(self.socket):
                for kind, start, size in reader.frames():
                    if not self.handle(kind, bytes(reader.window[start : start + size])):
                        return
        finally:
            os.close(self.fd)

    def handle(self, kind: int, payload: bytes) -> bool:
        """Deal with one frame; False ends the connection."""
        if kind == f.HELLO:
            return self.welcome(json.loads(payload))
        if kind == f.GROW:
            self.resize(min(json.loads(payload)["arena_bytes"], self.engine.limit))
            self.socket.sendall(f.json_frame(f.GROWN, {"arena_bytes": len(self.memory)}))
        elif kind == f.CANCEL:
            self.engine.cancelled.append(f.CALL_ID.unpack(payload)[0])
        elif kind == f.CALL:
            return self.call(payload)
        return True

    def welcome(self, hello: dict[str, Any]) -> bool:
        assert hello["version"] == 1
        assert not hello.get("door", False)
        if self.engine.refusal is not None:
            self.socket.sendall(f.json_frame(f.REFUSED, self.engine.refusal))
            return False
        self.resize(min(hello["arena_bytes"], self.engine.limit))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        content = {
            "version": 1,
            "session": len(self.engine.connections),
            "instance_id": "scripted",
            "arena_bytes": len(self.memory),
            "max_arena_bytes": self.engine.limit,
            "pinned_bytes": 0,
            "routes": ROUTES,
            "limits": {},
            "state": self.engine.state,
            "reason": "",
        }
        socket.send_fds(self.socket, [f.json_frame(f.WELCOME, content)], [self.fd])
        return True

    def resize(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self.engine.arena_sizes.append(size)

    def call(self, payload: bytes) -> bool:
        seen = self.read(payload)
        self.engine.seen.append(seen)
        step = self.engine.script(seen)
        if isinstance(step, Drop):
            return False
        if isinstance(step, Later):
            self.later.append((seen, step.step))
        elif isinstance(step, Problem):
            self.refuse(seen, step.status, step.code, 0, **step.numbers)
        elif isinstance(step, Answers):
            self.answer(seen, step)
            while self.later:
                self.answer(*self.later.pop())
        return True

    def read(self, payload: bytes) -> Seen:
        number, route, reserved, *call, name = f.CALL_PAYLOAD.unpack(payload)
        _, offset, length, place, capacity = call
        assert reserved == 0
        assert offset % 64 == place % 64 == 0
        assert place + capacity <= len(self.memory)
        image = np.frombuffer(self.memory, np.uint8, length, offset)
        start, contents = contents_of(image)
        views = {
            one.name: np.ndarray(one.shape, one.dtype, image, start + one.begin)
            for one in contents.entries
        }
        arrays = {key: array.copy() for key, array in views.items()}
        fields = contents.metadata["request"]
        return Seen(number, BY_NUMBER[route].name, *call, name, fields, arrays, views)

    def answer(self, seen: Seen, step: Answers) -> None:
        image = write_image(step.fields, step.arrays, "response")
        if len(image) > seen.capacity:
            numbers = {"size": len(image), "limit": seen.capacity}
            self.refuse(seen, 413, "answer_too_large", len(image), **numbers)
            return
        self.memory[seen.place : seen.place + len(image)] = image
        self.send(seen, step.status, 0, len(image), 0)

    def refuse(self, seen: Seen, status: int, code: str, needed: int, **numbers: Any) -> None:
        document = {"title": "A title", "status": status, "detail": "what happened", "code": code}
        image = write_image(document | numbers, {}, "problem")
        self.send(seen, status, 1, len(image), needed, image)

    def send(
        self, seen: Seen, status: int, flags: int, length: int, needed: int, inline: bytes = b""
    ) -> None:
        payload = f.ANSWER_PAYLOAD.pack(seen.number, status, flags, 0, length, needed, *STAGES)
        self.socket.sendall(f.frame(f.ANSWER, payload + inline))


class Bench:
    """An engine and sessions with it; `close` closes all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.engine: ScriptedEngine | None = None
        self.sessions: list[Session] = []

    def start(self, *steps: Step | Script, **options: Any) -> ScriptedEngine:
        self.engine = ScriptedEngine(self.path, Scripted(*steps), **options)
        return self.engine

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()
            os.unlink(self.path)
        self.engine = None

    def session(self, **options: Any) -> Session:
        settings = {"retries": QUICK, "timeout": 5.0, "arena_bytes": MIB, **options}
        self.sessions.append(Session(self.path, **settings))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.stop()
