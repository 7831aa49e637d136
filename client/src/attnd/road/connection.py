"""One session with the engine: greeting, frames out, answers in, and the arena's growth.

Calls of several threads are pipelined. Whoever waits and finds nobody reading reads for all, until
its own answer is there; then another one that waits goes on. There is no thread of its own.
"""

from __future__ import annotations

import _thread
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from attnd.errors import (
    ArenaFull,
    AttndError,
    ConnectionFailed,
    ProtocolError,
    ReplyLost,
    TimedOut,
    service_error,
)
from attnd.results import Meta
from attnd.road import frames
from attnd.road.areas import Areas, Laid
from attnd.road.arena import Slot
from attnd.road.frames import Answer, FrameReader
from attnd.road.greeting import greet, remaining
from attnd.road.stepping import StepCall
from attnd.road.waiting import Waiting

Posted = tuple[int, Waiting]
"""A call that was sent: its number, and who waits for the answer."""
LOOK_S: Final = 0.05
"""Between two looks of a thread that waits for another one which reads."""
STEPPING: Final = (frames.OPENED, frames.DONE)
"""Frames that begin with a step's number."""


class Connection:
    """A session that the engine has welcomed. `broken` says why it is over, else is empty."""

    def __init__(self, path: str, arena_bytes: int, ends: float, *, own: bool, key: str) -> None:
        """Connect and greet by `ends`; with `own`, an engine of another user is refused.

        Raises `ConnectionFailed`, `TimedOut`, `ProtocolError`, or the `ServiceError` of a refusal.
        """
        self.broken = ""
        self.pid = os.getpid()
        self._closed = False
        self._refusal: dict[str, Any] | None = None
        self._numbers = 0
        self._pending: dict[int, Waiting] = {}
        self._growing: Waiting | None = None
        self._told_of: dict[tuple[int, int], Waiting] = {}
        """Who waits to be told what, by the frame's kind and the step (0: the arena's)."""
        self._reader = FrameReader()
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._is_read = False
        """Whether the thread that has `_reading` is at it; a signal may have ended it before."""
        self._only_one_grows = threading.Lock()
        self._socket, welcome, self.arena = greet(path, arena_bytes, self._reader, ends, own, key)
        self._socket.setblocking(False)
        self.routes = welcome.routes
        self.state, self.reason = welcome.state, welcome.reason
        self._largest = welcome.max_arena_bytes
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.areas = Areas(self.arena, self.take)
        self._dispatch()

    @property
    def is_usable(self) -> bool:
        """Whether it stands, and is this process's."""
        return not self.broken and self.pid == os.getpid()

    # calls

    def call(
        self, route: int, laid: Laid, *, deadline_us: int, request_id: bytes, ends: float
    ) -> Answer:
        """Send a call and wait for its answer; raises `TransportError` when there is none."""
        posted = self.post(route, laid, deadline_us, request_id, ends)
        return self.answer_to(posted, ends)

    def post(
        self, route: int, laid: Laid, deadline_us: int, request_id: bytes, ends: float
    ) -> Posted:
        """Send a call; raises `TransportError`. `answer_to` must follow."""
        waiting = Waiting(laid)
        with self._sending:
            self._numbers = number = self._numbers + 1
            frame = frames.call_frame(
                number,
                route,
                deadline_us,
                (laid.offset, laid.length),
                (laid.place.offset, laid.capacity),
                request_id,
            )
            self._pending[number] = waiting
            try:
                self._send(frame, ends)
            except BaseException:
                waiting.given_up = True
                if self._pending.pop(number, None) is not None:
                    waiting.settle()
                raise
        return number, waiting

    def answer_to(self, posted: Posted, ends: float) -> Answer:
        """Wait for the answer of a call; raises `TransportError` when there is none."""
        number, waiting = posted
        try:
            answer = self._wait(waiting, ends)
        except BaseException:
            waiting.given_up = True
            self._cancel(number)
            raise
        if not isinstance(answer, Answer):
            raise RuntimeError(f"call {number} was answered by {answer!r}: this is a bug")
        return answer

    def _send(self, frame: bytes, ends: float) -> None:
        """Send a whole frame; raises ConnectionFailed when none of it went out."""
        if self.broken:
            raise ConnectionFailed(self.broken)
        sent = 0
        try:
            while True:
                try:
                    sent += self._socket.send(frame[sent:] if sent else frame)
                    if sent == len(frame):
                        return
                except BlockingIOError:
                    pass
                self._wait_writable(remaining(ends))
        except TimeoutError as error:
            if sent:  # the engine would take the next frame for the rest of this one
                self._break("a frame went out in part")
            raise TimedOut("the engine does not read") from error
        except OSError as error:
            self._break(f"the connection broke: {error}")
            raise ConnectionFailed(f"the engine is gone: {error}") from error
        except BaseException:  # the engine may have got a part of the frame, or all of it
            self.abandon("the call was interrupted as its frame went out")
            raise

    def _wait_writable(self, timeout_s: float) -> None:
        """The engine reads more slowly than callers send: a rare thing."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        if not waiting.poll(timeout_s * 1e3):
            raise TimeoutError("nothing more can be sent")

    def _cancel(self, number: int) -> None:
        """Nobody waits for this call any more; its slots stay until the engine answers it."""
        if number in self._pending and not self.broken:
            with self._sending, suppress(AttndError):
                self._send(frames.cancel_frame(number), time.monotonic() + 0.1)

    # steps: see attnd.road.stepping

    def send_step(self, description: bytes, deadline_us: int, ends: float) -> StepCall:
        """Describe a step, without waiting for anything."""
        over, opened = Waiting(None), Waiting(None)
        with self._sending:
            self._numbers = number = self._numbers + 1
            self._pending[number] = over
            self._told_of[frames.OPENED, number] = opened
            try:
                self._send(frames.step_frame(number, deadline_us, bytes(16), description), ends)
            except BaseException:
                del self._pending[number], self._told_of[frames.OPENED, number]
                raise
        return StepCall(self, number, over, opened)

    def ask(
        self, frame: bytes, kind: int, number: int, ends: float
    ) -> Answer | int | dict[str, Any]:
        """Send a frame, and wait for the one of `kind` that answers it."""
        try:
            return self._wait(self.begin(frame, kind, number, ends), ends)
        finally:
            self._told_of.pop((kind, number), None)

    def begin(self, frame: bytes, kind: int, number: int, ends: float) -> Waiting:
        """Send a frame that one of `kind` answers, which may be waited for later."""
        waiting = Waiting(None)
        self._told_of[kind, number] = waiting
        try:
            with self._sending:
                self._send(frame, ends)
        except BaseException:
            self._told_of.pop((kind, number), None)
            raise
        return waiting

    def wait(self, waiting: Waiting, ends: float) -> Answer | int | dict[str, Any]:
        """What comes for someone who waits; raises `TransportError` when nothing does."""
        return self._wait(waiting, ends)

    def fileno(self) -> int:
        """The socket's, to see its end."""
        return self._socket.fileno()

    def cancel(self, number: int) -> None:
        """Take a step back; it is answered all the same."""
        self._cancel(number)

    def cancel_now(self, number: int) -> None:
        """`cancel` where it does not wait: the collector may call this anywhere."""
        if not self.is_usable or number not in self._pending:
            return
        if self._sending.acquire(blocking=False):
            try:
                with suppress(AttndError):
                    self._send(frames.cancel_frame(number), time.monotonic())
            finally:
                self._sending.release()

    # answers

    def _wait(self, waiting: Waiting, ends: float) -> Answer | int | dict[str, Any]:
        while (answer := waiting.answer) is None:
            if self.broken:
                if self._refusal is not None:
                    raise service_error(self._refusal, Meta())
                raise ReplyLost(self.broken)
            if self._reading.acquire(blocking=False):
                try:
                    self._is_read = True
                    while waiting.answer is None and not self.broken:
                        if not self._receive(ends - time.monotonic()):
                            raise TimedOut("no answer within the timeout")
                finally:
                    self._is_read = False
                    self._reading.release()
                    if self._pending or self._growing is not None or self._told_of:
                        self._wake_next()
            else:
                self._follow(waiting, ends)
        return answer

    def _follow(self, waiting: Waiting, ends: float) -> None:
        """Wait until whoever reads has the answer, or stops reading."""
        waiting.gate = gate = _thread.allocate_lock()
        gate.acquire()
        try:
            if waiting.answer is None and not self.broken and self._reading.locked():
                self._follow_reader(gate, ends)
        finally:
            waiting.gate = None

    def _follow_reader(self, gate: _thread.LockType, ends: float) -> None:
        """Wait for the thread that reads; give the connection up where a signal has ended it."""
        gone = False
        while not gate.acquire(timeout=max(0.0, min(LOOK_S, ends - time.monotonic()))):
            if time.monotonic() >= ends:
                raise TimedOut("no answer within the timeout")
            if gone and self._reading.locked() and not self._is_read:
                self.abandon("a thread was interrupted as it began or ended to read")
                return
            gone = self._reading.locked() and not self._is_read

    def _everyone(self) -> list[Waiting | None]:
        return [*self._pending.values(), self._growing, *self._told_of.values()]

    def _wake_next(self) -> None:
        """Let another one that waits read."""
        for waiting in self._everyone():
            if waiting is not None and waiting.answer is None and waiting.gate is not None:
                waiting.wake()
                return

    def _receive(self, timeout_s: float) -> bool:
        """One read's worth of frames, or the connection's end; False when none comes in time."""
        try:
            if timeout_s <= 0 or not self._poll.poll(timeout_s * 1e3):
                return False
        except OSError as error:
            if error.errno is None:
                raise  # of a signal's handler, not of the system
            self._break(f"the connection broke: {error}")
            return True
        try:
            count = self._socket.recv_into(self._reader.buffer())
            if count:
                self._reader.received(count)
                self._dispatch()
            else:
                self._break("the engine closed the connection")
        except (OSError, ProtocolError) as error:
            self._break(f"the connection broke: {error}")
        except BaseException:  # what was read may be lost
            self.abandon("the call was interrupted as its answer was read")
            raise
        return True

    def _dispatch(self) -> None:
        """Hand out the frames that came."""
        while (frame := self._reader.take()) is not None:
            kind, payload = frame
            if kind in STEPPING:
                self._told_step(kind, payload)
                continue
            if kind != frames.ANSWER:
                self._told(kind, frames.read_json(payload))
                continue
            number, answer = frames.read_answer(payload)
            waiting = self._pending.pop(number, None)
            if waiting is None:
                raise ProtocolError(f"an answer to call {number}, which waits for none")
            waiting.settle()
            waiting.answer = answer
            waiting.wake()
            if self._told_of:
                for told in (frames.OPENED, frames.DONE):
                    self._hand(told, number, answer)

    def _told_step(self, kind: int, payload: bytes) -> None:
        """A step has been accepted, or one of its layers is done."""
        number = frames.read_number(payload)
        rest = payload[frames.STEP_NUMBER.size :]
        self._hand(kind, number, frames.read_json(rest) if kind == frames.OPENED else number)

    def _hand(self, kind: int, number: int, answer: Answer | int | dict[str, Any]) -> None:
        waiting = self._told_of.pop((kind, number), None)
        if waiting is not None:
            waiting.answer = answer
            waiting.wake()

    def _told(self, kind: int, content: dict[str, Any]) -> None:
        """What the engine says beside its answers."""
        if kind == frames.STATE:
            self.state = str(content.get("state", ""))
            self.reason = str(content.get("reason", ""))
        elif kind == frames.GROWN and self._growing is not None:
            self.arena.grow(int(content.get("arena_bytes", 0)))
            self._growing.answer = self.arena.slots.size
            self._growing.wake()
        elif kind == frames.DEVICE_ARENA:
            self._hand(kind, 0, content)
        elif kind == frames.REFUSED:
            self._refusal = content
            self._break(f"the engine refused the session: {content.get('detail', '')}")

    def is_open(self) -> bool:
        """Read what came while nobody waited: the engine's state, or its end."""
        if not self.broken and self._reading.acquire(blocking=False):
            try:
                self._is_read = True
                while not self.broken and self._poll.poll(0):
                    self._receive(1.0)
            finally:
                self._is_read = False
                self._reading.release()
                self._wake_next()
        return not self.broken

    # the arena

    def take(self, size: int) -> Slot:
        """A slot, for which the arena grows if it must; raises `ArenaFull`."""
        slots = self.arena.slots
        slot = slots.take(size)
        while slot is None:
            before = slots.size
            self._grow(before, size)
            slot = slots.take(size)
            if slot is None and slots.size == before:
                raise ArenaFull(
                    f"{size} bytes are wanted, {slots.free} of the arena's {slots.size} are free, "
                    f"and it may have {self._largest}: keep fewer arrays of it, or copy them"
                )
        return slot

    def _grow(self, before: int, more: int) -> None:
        """Make the arena larger than `before`: twice as large, or by `more` bytes."""
        with self._only_one_grows:
            wanted = min(self._largest, before + max(before, more))
            if self.arena.slots.size > before or wanted <= before:
                return
            ends = time.monotonic() + 10.0
            self._growing = waiting = Waiting(None)
            try:
                with self._sending:
                    self._send(frames.json_frame(frames.GROW, {"arena_bytes": wanted}), ends)
                self._wait(waiting, ends)
            finally:
                self._growing = None

    # the end

    def abandon(self, reason: str) -> None:
        """End a session whose frames are in disorder, so that the engine undoes what is open."""
        self._break(reason)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _break(self, reason: str) -> None:
        """The first reason stays; everyone who waits is told."""
        self.broken = self.broken or reason
        for waiting in self._everyone():
            if waiting is not None:
                waiting.wake()

    def close(self) -> None:
        """End the session. Arrays of the arena stay what they are."""
        if self._closed:
            return
        self._closed = True
        self._break("the session is closed")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._socket.close()
        self.arena.close()
