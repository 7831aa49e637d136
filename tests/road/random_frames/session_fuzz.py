"""Hostile conversations played against sessions: what must hold, whatever a caller sends."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import struct
import time
from collections import Counter
from itertools import accumulate
from typing import Any, Final

from attnd.wire import frames as f

from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, SessionConfig
from service.road.engine_end.session import Session
from service.road.messages import State
from service.road.tcp import proof
from tests.road.random_frames.frame_fuzz import NUMBERS, Conversation, conversation, with_images

MAX_ARENA_BYTES: Final = 2**18
MAX_CALLS: Final = 32
SECRET: Final = "s" * 32


class Judge:
    """Plays conversations against sessions, answering late and out of order, and counts."""

    def __init__(self, is_remote: bool = False) -> None:
        """`is_remote`: over TCP, where images follow their frames."""
        self.is_remote = is_remote
        self.config = SessionConfig(
            instance_id="fuzz",
            routes={f"route{number}": number for number in NUMBERS},
            limits={},
            max_arena_bytes=MAX_ARENA_BYTES,
            default_deadline_s=30.0,
            max_calls=MAX_CALLS,
            admission=Admission(None, SECRET),
        )
        self.frames = 0
        self.outcomes: Counter[str] = Counter()

    def play(self, seed: int) -> None:
        """One conversation; AssertionError when anything that must hold does not."""
        talk = conversation(seed)
        rng = random.Random(~seed)
        near, far = socket.socketpair()
        near.setblocking(False)
        session = Session(far, 1, self.config, State("ready"), is_remote=self.is_remote)
        if session.incoming is not None:
            talk = with_images(talk, proof(SECRET, session.incoming.nonce), MAX_ARENA_BYTES, rng)
        listener = Listener(near, self.is_remote)
        waiting: list[Call] = []
        arrived = 0
        for piece in talk.pieces:
            send(near, piece, rng)
            arrived += len(piece)
            while True:  # an image that comes in is read by itself
                self.turn(session, waiting, rng)
                listener.listen()
                if session.ended or not select.select([far], [], [], 0)[0]:
                    break
            if session.ended:
                break
        whole = not session.ended
        self.settle(session, waiting, 0)
        listener.listen()
        self.check_end(talk, session, listener, whole)
        near.close()
        session.close()
        assert session.arena is None or session.arena.fd == -1, "the arena outlived its session"
        self.frames += sum(
            end <= arrived for end in accumulate(len(one.data) for one in talk.frames)
        )

    def turn(self, session: Session, waiting: list[Call], rng: random.Random) -> None:
        """The engine's reaction to a readable socket of a session."""
        for event in session.read():
            if isinstance(event, Call):
                self.check_call(session, event)
                waiting.append(event)
            else:
                assert event.call in waiting, "a CANCEL for a call that does not wait"
                assert event.call.cancelled, "a cancelled call does not say so"
        assert len(session.live) <= MAX_CALLS, f"{len(session.live)} calls wait"
        rng.shuffle(waiting)
        self.settle(session, waiting, rng.choice((0, 0, 5, MAX_CALLS)))

    def check_call(self, session: Session, call: Call) -> None:
        assert session.arena is not None, "a call came without an arena"
        assert call.operation in NUMBERS, f"route {call.operation} came through"
        assert session.live[call.id] is call, "a call came that does not wait"
        for place in (call.request, call.answer):
            assert len(place) <= session.arena.size, f"{len(place)} bytes in {session.arena.size}"
        if call.request:  # touching both ends shows a mapping that is too short
            call.request[0] = call.request[-1]
        if call.answer:
            call.answer[0] = call.answer[-1]

    def settle(self, session: Session, waiting: list[Call], leave: int) -> None:
        """Answer all waiting calls but `leave`."""
        while len(waiting) > leave:
            call = waiting.pop()
            if call.cancelled:
                session.fail(call, RuntimeError("it was cancelled"))
            else:
                session.answer(call, 200, len(call.answer), f.NO_STAGES)

    def check_end(
        self, talk: Conversation, session: Session, listener: Listener, whole: bool
    ) -> None:
        """The session ended if it had to, and otherwise answered every call once."""
        arrived = sum(map(len, talk.pieces))
        ends = 0
        fatal: bool | None = False
        calls = 0
        cut_off = False
        greeted = talk.frames[0].data[:2] == f.HELLO.to_bytes(2, "little")
        for sent in talk.frames:
            ends += len(sent.data)
            if fatal:
                break
            cut_off = self.is_remote and ends > arrived and sent.is_call
            if ends > arrived:  # the header of a fatal frame can be enough
                fatal = None if sent.fatal is not False else fatal
                break
            calls += sent.is_call
            fatal = None if fatal is None or sent.fatal is None else sent.fatal
        if fatal is False and greeted:
            assert whole, f"a session without fault ended: {session.ended}"
            early = listener.answers - calls
            # a call may be refused before its image has come, which then never does
            assert early == 0 or (early == 1 and cut_off), f"{early} answers more than calls"
        elif fatal:
            assert not whole, "a session went on after a frame that must end it"
        assert not session.ended or listener.refused or "frame" not in session.ended
        self.outcomes["refused" if listener.refused else "sound"] += 1
        self.outcomes["answers"] += listener.answers


class Listener:
    """The caller's end: the engine must send whole, correct frames."""

    def __init__(self, sock: socket.socket, has_images: bool = False) -> None:
        self.sock = sock
        self.reader = f.Reader(f.FROM_ENGINE)
        self.answers = 0
        self.refused = False
        self.has_images = has_images
        self.left = 0
        """Bytes of an answer's image that are still to come."""

    def listen(self) -> None:
        while True:
            try:
                if not self.reader.receive(self.sock):
                    return
            except (BlockingIOError, ConnectionError):
                return
            self.pass_over()
            for kind, start, size in self.reader.frames():
                assert not self.refused, "a frame came after REFUSED"
                self.answers += kind == f.ANSWER
                self.refused = kind == f.REFUSED
                if kind == f.ANSWER and self.has_images:
                    values = f.ANSWER_PAYLOAD.unpack_from(self.reader.buffer, start)
                    self.left = 0 if values[2] & f.INLINE else values[4]
                    self.pass_over()
                elif kind != f.ANSWER:
                    json.loads(bytes(self.reader.window[start : start + size]))

    def pass_over(self) -> None:
        """An answer's image is no frame."""
        while self.left and (count := self.reader.take(memoryview(bytearray(self.left)))):
            self.left -= count


def send(sock: socket.socket, data: bytes, rng: random.Random) -> None:
    """Send a piece, now and then with unexpected file descriptors."""
    if rng.random() < 0.01:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("2i", 0, 1))]
        sock.sendmsg([data], rights)
    else:
        sock.send(data)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(cases: int, seed: int, is_remote: bool = False) -> dict[str, Any]:
    """Play conversations of `cases` frames in total; prints the seed of one that fails."""
    judge = Judge(is_remote)
    before = open_descriptors()
    started = time.perf_counter()
    while judge.frames < cases:
        try:
            judge.play(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        seed += 1
    more = open_descriptors() - before  # fewer: garbage of before was collected meanwhile
    assert more <= 0, f"{more} descriptors leaked"
    seconds = time.perf_counter() - started
    return {"frames": judge.frames, "seconds": round(seconds, 1), **judge.outcomes}
