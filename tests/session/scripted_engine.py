"""An engine that plays a script over the road: frames and images written down here once more."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.harness.listener import Listener

Arrays = dict[str, NDArray[Any]]

CALL, ANSWER, CANCEL = 1, 2, 3
HELLO, WELCOME, GROW, GROWN, STATE, REFUSED = 16, 17, 18, 19, 20, 21
HEADER: Final = struct.Struct("<HHI")
CALL_PAYLOAD: Final = struct.Struct("<QHHIQQQQ16s")
ANSWER_PAYLOAD: Final = struct.Struct("<QHHIQQ6f")
NAMES: Final = (
    *("create_sequences", "list_sequences", "get_sequence", "delete_sequence", "truncate"),
    *("page_table", "append", "gather", "decode", "prefill", "ragged_prefill", "cascade"),
    *("merge", "info", "pool"),
)
ROUTES: Final = {name: number for number, name in enumerate(NAMES, 1)}
DTYPES: Final = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
STAGES: Final = (0.5, 0.25, 0.0, 2.0, 0.0, 0.125)


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
            connected.sendall(json_frame(STATE, {"state": state, "reason": reason}))


class Serving:
    """One connection and its arena."""

    def __init__(self, engine: ScriptedEngine, connected: socket.socket) -> None:
        self.engine = engine
        self.socket = connected
        self.fd = os.memfd_create("scripted", os.MFD_ALLOW_SEALING)
        self.later: list[tuple[Seen, Answers]] = []

    def run(self) -> None:
        try:
            while (frame := self.receive()) is not None:
                if not self.handle(*frame):
                    return
        finally:
            os.close(self.fd)

    def receive(self) -> tuple[int, bytes] | None:
        head = self.exactly(HEADER.size)
        if head is None:
            return None
        kind, flags, size = HEADER.unpack(head)
        assert flags == 0
        payload = self.exactly(size)
        return None if payload is None else (kind, payload)

    def exactly(self, size: int) -> bytes | None:
        received = b""
        while len(received) < size:
            more = self.socket.recv(size - len(received))
            if not more:
                return None
            received += more
        return received

    def handle(self, kind: int, payload: bytes) -> bool:
        """Deal with one frame; False ends the connection."""
        if kind == HELLO:
            return self.welcome(json.loads(payload))
        if kind == GROW:
            self.resize(min(json.loads(payload)["arena_bytes"], self.engine.limit))
            self.socket.sendall(json_frame(GROWN, {"arena_bytes": len(self.memory)}))
        elif kind == CANCEL:
            self.engine.cancelled.append(struct.unpack("<Q", payload)[0])
        elif kind == CALL:
            return self.call(payload)
        return True

    def welcome(self, hello: dict[str, Any]) -> bool:
        assert hello["version"] == 1
        assert hello["door"] is False
        if self.engine.refusal is not None:
            self.socket.sendall(json_frame(REFUSED, self.engine.refusal))
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
        socket.send_fds(self.socket, [json_frame(WELCOME, content)], [self.fd])
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
        number, route, reserved, *call, name = CALL_PAYLOAD.unpack(payload)
        _, offset, length, place, capacity = call
        assert reserved == 0
        assert offset % 64 == place % 64 == 0
        assert offset + length <= len(self.memory)
        assert place + capacity <= len(self.memory)
        size = int.from_bytes(self.memory[offset : offset + 8], "little")
        start = offset + 8 + size
        assert (start - offset) % 8 == 0
        table = json.loads(self.memory[offset + 8 : start])
        fields = json.loads(table.pop("__metadata__")["request"])
        views: Arrays = {}
        end = 0
        for name_, detail in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            begin, after = detail["data_offsets"]
            assert begin == end, "a hole"
            array = np.ndarray(detail["shape"], DTYPES[detail["dtype"]], self.memory, start + begin)
            assert array.nbytes == after - begin
            views[name_] = array
            end = after
        assert start + end == offset + length
        arrays = {key: array.copy() for key, array in views.items()}
        return Seen(number, NAMES[route - 1], *call, name, fields, arrays, views)

    def answer(self, seen: Seen, step: Answers) -> None:
        image = answer_image(step.fields, step.arrays)
        if len(image) > seen.capacity:
            numbers = {"size": len(image), "limit": seen.capacity}
            self.refuse(seen, 413, "answer_too_large", len(image), **numbers)
            return
        self.memory[seen.place : seen.place + len(image)] = image
        self.send(seen, step.status, 0, len(image), 0)

    def refuse(self, seen: Seen, status: int, code: str, needed: int, **numbers: Any) -> None:
        document = {"title": "A title", "status": status, "detail": "what happened", "code": code}
        image = metadata_image({"problem": json.dumps({**document, **numbers})})
        self.send(seen, status, 1, len(image), needed, image)

    def send(
        self, seen: Seen, status: int, flags: int, length: int, needed: int, inline: bytes = b""
    ) -> None:
        payload = ANSWER_PAYLOAD.pack(seen.number, status, flags, 0, length, needed, *STAGES)
        self.socket.sendall(HEADER.pack(ANSWER, 0, len(payload + inline)) + payload + inline)


def json_frame(kind: int, content: Mapping[str, Any]) -> bytes:
    payload = json.dumps(content).encode()
    return HEADER.pack(kind, 0, len(payload)) + payload


def answer_image(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    names = {dtype: name for name, dtype in DTYPES.items()}
    table: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        raw = array.tobytes()
        table[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return metadata_image({"response": json.dumps(fields)}, table) + data


def metadata_image(metadata: Mapping[str, str], table: Mapping[str, Any] = {}) -> bytes:
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
