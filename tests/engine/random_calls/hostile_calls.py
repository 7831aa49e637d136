"""Hostile callers against a live engine on its socket: what must hold, whatever they do."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, Final

import numpy as np
from attnd.wire import frames as f

from service.image.writing import image
from service.operations.schema.fields import ID_PATTERN, MAX_ID_LENGTH
from service.operations.table import BY_NAME
from tests.engine.random_calls.frame_fuzz import conversation
from tests.engine.random_calls.hostile_caller import (
    ARENA_BYTES,
    SLOT_BYTES,
    Session,
    connected,
    live_engine,
)
from tests.engine.random_calls.image_fuzz import INFO, VALUES, broken_image

BATCH: Final = 64
"""Calls that are sent at once: half of their slots are for requests, half for answers."""
BATCH_S: Final = 0.004
"""Interval between batches: waking up for every answer would slow both threads down."""
CHECK_EVERY: Final = 1000
IDLE_S: Final = 15.0
"""Imports expire before that: cases give theirs 5 seconds for each part."""
ROOMS: Final = (0, 1, 64, 200, 512, 1024, SLOT_BYTES)
KNOWN: Final = "known"
KNOWN_TOKENS: Final = 9
NAMED: Final = ("a", "b", "chat-1")
"""The sequences that images name when they are right."""
SCRIBBLER: Final = """
import mmap, os, random, sys, time
fd, size = int(sys.argv[1]), int(sys.argv[2])
arena, rng = mmap.mmap(fd, size), random.Random(int(sys.argv[3]))
while os.getppid() == int(sys.argv[4]):
    for _ in range(50):
        at = rng.randrange(size // 4096) * 4096 + int(rng.expovariate(0.01)) % 4000
        arena[at:at + 8] = rng.choice((rng.randbytes(8), arena[at + 8:at + 16], b"99999999"))
    time.sleep(0.0005)
"""
"""Another process that never stops writing to the arena while the engine reads it."""


class Fuzz:
    """Sends cases to one engine, and counts them and how they went."""

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.seed = seed
        self.rng = random.Random(seed)
        self.cases = 0
        self.checked = 0
        self.outcomes: Counter[str] = Counter()
        self.judge = Session.connect(path)
        self.mine = Session.connect(path)
        self.expected = self.make_known()

    def close(self) -> None:
        self.judge.close()
        self.mine.close()

    # what must hold

    def ask(self, name: str, fields: dict[str, Any], **tensors: Any) -> bytes:
        """A right call by the judge; its answer's image."""
        body = b"".join(image("request", json.dumps(fields), tensors))
        judge = self.judge
        judge.sock.sendall(judge.call(BY_NAME[name].number, body, 0, ARENA_BYTES - SLOT_BYTES))
        ((_, status, length, _, inline),) = judge.answers(1)
        assert status < 300, (name, fields, inline)
        return bytes(judge.arena[SLOT_BYTES : SLOT_BYTES + length])

    def fields(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        answer = self.ask(name, fields)
        header = json.loads(answer[8 : 8 + int.from_bytes(answer[:8], "little")])
        reply: dict[str, Any] = json.loads(header["__metadata__"]["response"])
        return reply

    def make_known(self) -> bytes:
        """A sequence that no case names, and the answer of a decode over it."""
        self.ask("create_sequences", {"sequences": [{"id": KNOWN}]})
        numbers = np.random.default_rng(5)
        shape = (KNOWN_TOKENS, INFO.num_kv_heads, INFO.head_dim)
        k, v = numbers.standard_normal((2, *shape)).astype(np.float32)
        fields = {"layer": 0, "sequences": [KNOWN], "append_indptr": [0, KNOWN_TOKENS]}
        self.ask("append", fields, k=k, v=v)
        return self.decode_known()

    def decode_known(self) -> bytes:
        q = np.ones((1, 2, INFO.head_dim), np.float32)
        return self.ask("decode", {"layer": 0, "sequences": [KNOWN]}, q=q)

    def check(self) -> None:
        """The known numbers are the same, all pages are there, and the engine says it is sound."""
        self.checked = self.cases
        assert self.decode_known() == self.expected, "the known decode changed"
        pool = self.fields("pool", {})
        assert pool["integrity"] == "ok", pool
        while True:
            listed = self.fields("list_sequences", {"limit": 10})["sequences"]
            others = [one["id"] for one in listed if one["id"] != KNOWN]
            for name in others:
                self.ask("delete_sequence", {"id": name})
            if not others:
                break
        self.give_up_imports()
        given_up_by = time.monotonic() + IDLE_S
        while (pool := self.fields("pool", {}))["imports"] and time.monotonic() < given_up_by:
            time.sleep(0.1)  # its name may have a changed byte
        assert pool["imports"] == 0, pool
        pages = -(-KNOWN_TOKENS // INFO.page_size)
        assert (pool["sequences"], pool["integrity"]) == (1, "ok"), pool
        assert pool["referenced"] == pages or pool["leases"] > 0, pool

    def give_up_imports(self) -> None:
        """Cancel imports that a case may have begun, under its own name or a default one."""
        texts = [one for one in VALUES if isinstance(one, str) and len(one) <= MAX_ID_LENGTH]
        names = [one for one in texts if re.fullmatch(ID_PATTERN, one)]
        for name in ("moved", *names):
            body = b"".join(image("request", json.dumps({"id": name}), {}))
            number = BY_NAME["cancel_import"].number
            self.judge.sock.sendall(self.judge.call(number, body, 0, SLOT_BYTES))
            ((_, status, *_),) = self.judge.answers(1)
            assert status in (204, 404), (name, status)

    # what callers do

    def run(self, cases: int) -> None:
        moves = (self.images, self.images, self.images, self.frames, self.deaths)
        with self.scribbled() as scribbled:
            self.check()
            while self.cases < cases:
                move = self.rng.choice(moves)
                if self.rng.random() < 0.1:
                    self.images(scribbled)
                else:
                    move()
                if self.cases >= self.checked + CHECK_EVERY:
                    self.check()
            self.check()

    def batch(self, session: Session) -> list[bytes]:
        """Frames of calls with images of all kinds, some of them at places of no sense."""
        rng, sent = self.rng, []
        for place, name in enumerate(NAMED):  # there may be none of them any more
            body = b"".join(image("request", json.dumps({"sequences": [{"id": name}]}), {}))
            sent.append(session.call(BY_NAME["create_sequences"].number, body, place, SLOT_BYTES))
        for place in range(len(NAMED), BATCH):
            self.seed += 1
            case = broken_image(self.seed)
            route = BY_NAME[case.operation].number
            deadline_us = rng.choice((*(0,) * 18, 1, 1000))
            if rng.random() < 0.9:
                room = rng.choice(ROOMS) if rng.random() < 0.3 else SLOT_BYTES
                sent.append(session.call(route, case.body, place, room, deadline_us))
            else:
                sent.append(session.frame(route, deadline_us, *self.places()))
        return sent

    def places(self) -> tuple[int, int, int, int]:
        """A request and an answer anywhere: over each other, over others', outside."""
        rng = self.rng

        def offset() -> int:
            if rng.random() < 0.9:
                return rng.randrange(ARENA_BYTES // 64) * 64
            return rng.choice((1, ARENA_BYTES, 2**32, 2**63, 2**64 - 64, rng.getrandbits(64)))

        def length() -> int:
            return rng.choice((0, 64, 1000, SLOT_BYTES, ARENA_BYTES, rng.getrandbits(64)))

        return offset(), length(), offset(), length()

    def images(self, session: Session | None = None) -> None:
        """Calls in a pipeline, some taken back: each is answered once, and none with a bug."""
        mine = self.mine if session is None else session
        first = mine.last_id + 1
        frames = self.batch(mine)
        for number in range(first, mine.last_id + 1):
            if self.rng.random() < 0.03:
                frames.insert(self.rng.randrange(len(frames) + 1), f.cancel_frame(number))
        mine.sock.sendall(b"".join(frames))
        time.sleep(BATCH_S)
        open_calls = set(range(first, mine.last_id + 1))
        for number, status, length, needed, inline in mine.answers(BATCH):
            open_calls.remove(number)
            assert status != 500, inline
            assert length <= ARENA_BYTES and needed <= ARENA_BYTES * 64, (length, needed)
            self.outcomes[str(status)] += 1
        assert not open_calls, open_calls
        self.cases += BATCH

    def frames(self) -> None:
        """A conversation of frames, most right, some broken, and then the end in some manner."""
        self.seed += 1
        talk = conversation(self.seed, arena_bytes=2**16)
        ends = list(accumulate(map(len, talk.frames)))
        sent, arena = 0, False
        with connected(self.path) as sock, suppress(ConnectionError):
            for piece in talk.pieces:
                sock.sendall(piece)
                sent += len(piece)
                if not arena and sent >= ends[0]:
                    arena = True
                    self.fill_arena(sock)
            if self.rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                self.listen_to(sock)
        self.cases += sum(end <= sent for end in ends)
        self.outcomes["conversations"] += 1

    def fill_arena(self, sock: socket.socket) -> None:
        """Take the arena, if the engine gives one, and lay images into it."""
        _, descriptors, _, _ = socket.recv_fds(sock, 2**16, 4)
        for fd in descriptors:
            with mmap.mmap(fd, 2**16) as memory:
                for at in range(0, 2**16 - 1024, 1024):
                    self.seed += 1
                    body = broken_image(self.seed).body[:1024]
                    memory[at : at + len(body)] = body
            os.close(fd)

    def listen_to(self, sock: socket.socket) -> None:
        """The rest of the engine's output is whole frames without an internal error."""
        reader = f.Reader(f.FROM_ENGINE)
        while reader.receive(sock):
            for kind, start, _ in reader.frames():
                if kind == f.ANSWER:
                    status = f.ANSWER_PAYLOAD.unpack_from(reader.window, start)[1]
                    assert status != 500, bytes(reader.window[start : start + 1000])

    def deaths(self) -> None:
        """A caller that sends its calls and disconnects, often in the middle of a frame."""
        session = Session.connect(self.path)
        stream = b"".join(self.batch(session))
        session.sock.sendall(
            stream[: self.rng.choice((len(stream), self.rng.randrange(len(stream))))]
        )
        session.close()
        self.cases += BATCH
        self.outcomes["deaths"] += 1

    @contextmanager
    def scribbled(self) -> Iterator[Session]:
        """A session whose arena another process writes to all the time."""
        session = Session.connect(self.path)
        numbers = (session.fd, ARENA_BYTES, self.seed, os.getpid())
        command = [sys.executable, "-c", SCRIBBLER, *map(str, numbers)]
        process = subprocess.Popen(command, pass_fds=(session.fd,))
        try:
            yield session
        finally:
            process.kill()
            process.wait()
            session.close()


def run(cases: int, seed: int) -> dict[str, Any]:
    """Send `count` cases to an engine; prints the seed of a failure."""
    print(f"seed {seed}")
    started = time.perf_counter()
    descriptors = len(os.listdir("/proc/self/fd"))
    with live_engine() as path:
        fuzz = Fuzz(path, seed)
        try:
            fuzz.run(cases)
        finally:
            print(f"at seed {fuzz.seed}, {fuzz.cases} cases: {fuzz.outcomes}")
            fuzz.close()
    leaked = len(os.listdir("/proc/self/fd")) - descriptors
    assert leaked <= 0, f"{leaked} descriptors leaked"
    seconds = time.perf_counter() - started
    return {"cases": fuzz.cases, "seconds": round(seconds, 1), **fuzz.outcomes}
