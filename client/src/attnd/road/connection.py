"""One session with the engine: frames out, replies in, and the growth of the arena.

Calls of several threads are pipelined. There is no background thread: one waiting thread reads for
all the others until its own reply is there, then another waiting thread takes over.
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
from attnd.retries import remaining
from attnd.road.areas import Areas, PlacedCall
from attnd.road.arena import Slot
from attnd.road.greeting import Dial, greet, read_object
from attnd.road.pending import Answer, Pending, Reply, StepCall
from attnd.wire import frames as f
from attnd.wire.meta import Meta

WATCH_S: Final = 0.05
"""How often a waiting thread checks that the reading thread still reads."""


class Connection:
    """A session that the engine has accepted. `broken` is why it is over, else empty."""

    def __init__(
        self,
        dial: Dial,
        arena_bytes: int,
        ends: float,
        *,
        key: str = "",
    ) -> None:
        """Connect and greet by `ends`.

        Raises `ConnectionFailed`, `TimedOut`, `ProtocolError`, or the `ServiceError` with which the
        engine refuses the session.
        """
        self.broken = ""
        self.pid = os.getpid()
        self._closed = False
        self._refusal: dict[str, Any] | None = None
        self._last_number = 0
        self._calls: dict[int, Pending] = {}
        """Calls and steps without an ANSWER, by number."""
        self._messages: dict[tuple[int, int], Pending] = {}
        """Threads that wait for a frame of another kind, by (kind, step); step 0 is the arena's."""
        self._growing: Pending | None = None
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._is_read = False
        """Whether the owner of `_reading` reads; a signal may have interrupted it before."""
        self._only_one_grows = threading.Lock()
        self._socket, self._reader, welcome, self.arena = greet(dial, arena_bytes, ends, key)
        self._socket.setblocking(False)
        self.routes = welcome.routes
        self.state, self.reason = welcome.state, welcome.reason
        self._max_arena_bytes = welcome.max_arena_bytes
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.areas = Areas(self.arena, self.take)
        self._dispatch()

    @property
    def is_usable(self) -> bool:
        """Whether the session is open and belongs to this process (not to the parent of a fork)."""
        return not self.broken and self.pid == os.getpid()

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for a reply."""
        return self._reading.locked()

    # Calls.

    def post(
        self,
        route: int,
        place: PlacedCall,
        deadline_us: int,
        request_id: bytes,
        ends: float,
    ) -> tuple[int, Pending]:
        """Send a call; returns its number and its pending reply, for `answer_to`.

        Raises `TransportError`.
        """
        pending = Pending(place)
        with self._sending:
            self._last_number = number = self._last_number + 1
            self._calls[number] = pending
            try:
                head = (f.CALL, 0, f.CALL_PAYLOAD.size, number, route, 0, deadline_us)
                where = (place.offset, place.length, place.answer.offset, place.capacity)
                self._send(f.CALL_FRAME.pack(*head, *where, request_id), ends)
            except BaseException:
                pending.is_abandoned = True
                if self._calls.pop(number, None) is not None:
                    pending.release()
                raise
        return number, pending

    def answer_to(self, number: int, pending: Pending, ends: float) -> Answer:
        """Wait for the answer of a call; raises `TransportError` when none comes."""
        try:
            answer = self.wait(pending, ends)
        except BaseException:
            pending.is_abandoned = True
            self.cancel(number)
            raise
        if not isinstance(answer, Answer):
            raise RuntimeError(f"call {number} was answered by {answer!r}: this is a bug")
        return answer

    def _send(self, frame: bytes, ends: float) -> None:
        """Send a whole frame; raises ConnectionFailed when no byte of it was sent."""
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
                # Wait until the engine reads on, which is rare.
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not poll.poll(remaining(ends) * 1e3):
                    raise TimeoutError("the socket's buffer stayed full")
        except TimeoutError as error:
            if sent:  # the engine would take the next frame for the rest of this one
                self._break("partial frame sent")
            raise TimedOut("the engine does not read") from error
        except OSError as error:
            self._break(f"the connection broke: {error}")
            raise ConnectionFailed(f"no connection to the engine: {error}") from error
        except BaseException:  # the engine may have received a part of the frame, or all of it
            self.abandon("the call was interrupted while its frame was sent")
            raise

    def cancel(self, number: int) -> None:
        """Cancel a call or step. Its slots stay taken until the engine answers it."""
        if number in self._calls and not self.broken:
            with self._sending, suppress(AttndError):
                self._send(f.cancel_frame(number), time.monotonic() + 0.1)

    def cancel_now(self, number: int) -> None:
        """`cancel` without waiting for a lock: safe inside the garbage collector."""
        if number in self._calls and self.is_usable and self._sending.acquire(blocking=False):
            try:
                with suppress(AttndError):
                    self._send(f.cancel_frame(number), time.monotonic())
            finally:
                self._sending.release()

    # Steps: see attnd.road.pending.

    def send_step(self, description: bytes, deadline_us: int, ends: float) -> StepCall:
        """Describe a step, without waiting for a reply."""
        over, opened = Pending(None), Pending(None)
        with self._sending:
            self._last_number = number = self._last_number + 1
            self._calls[number] = over
            self._messages[f.OPENED, number] = opened
            try:
                self._send(f.step_frame(number, deadline_us, f.NO_REQUEST_ID, description), ends)
            except BaseException:
                del self._calls[number], self._messages[f.OPENED, number]
                raise
        return StepCall(self, number, over, opened)

    def begin(self, frame: bytes, kind: int, number: int, ends: float) -> Pending:
        """Send a frame whose reply is a frame of `kind` for step `number`; for `wait`."""
        pending = Pending(None)
        self._messages[kind, number] = pending
        try:
            with self._sending:
                self._send(frame, ends)
        except BaseException:
            self._messages.pop((kind, number), None)
            raise
        return pending

    def fileno(self) -> int:
        """The socket's descriptor: it becomes readable when the engine closes the session."""
        return self._socket.fileno()

    # Replies.

    def wait(self, pending: Pending, ends: float) -> Reply:
        """Wait for a reply; raises `TransportError` when none comes."""
        while (reply := pending.reply) is None:
            if self.broken:
                if self._refusal is not None:
                    raise service_error(self._refusal, Meta())
                raise ReplyLost(self.broken)
            if self._reading.acquire(blocking=False):
                try:
                    self._is_read = True
                    while pending.reply is None and not self.broken:
                        if not self._receive(ends - time.monotonic()):
                            raise TimedOut("no answer within the timeout")
                finally:
                    self._is_read = False
                    self._reading.release()
                    if self._calls or self._growing is not None or self._messages:
                        self._wake_next()
            else:
                self._follow(pending, ends)
        return reply

    def _follow(self, pending: Pending, ends: float) -> None:
        """Wait until the reading thread has the reply or stops reading."""
        pending.gate = gate = _thread.allocate_lock()
        gate.acquire()
        try:
            if pending.reply is None and not self.broken and self._reading.locked():
                self._follow_reader(gate, ends)
        finally:
            pending.gate = None

    def _follow_reader(self, gate: _thread.LockType, ends: float) -> None:
        """Wait at the gate; end the session if a signal interrupted the reader with its lock."""
        seen = False
        while not gate.acquire(timeout=max(0.0, min(WATCH_S, ends - time.monotonic()))):
            if self.broken or not self._reading.locked():
                return  # an interrupt as the answer was read; or the one that was woken gave up
            if time.monotonic() >= ends:
                raise TimedOut("no answer within the timeout")
            is_stuck = self._reading.locked() and not self._is_read
            if seen and is_stuck:
                self.abandon("a thread was interrupted as it began or ended to read")
                return
            seen = is_stuck

    def _all_pending(self) -> list[Pending]:
        growing = [] if self._growing is None else [self._growing]
        return [*self._calls.values(), *growing, *self._messages.values()]

    def _wake_next(self) -> None:
        """Let another waiting thread read."""
        for pending in self._all_pending():
            if pending.reply is None and pending.gate is not None:
                pending.wake()
                return

    def _receive(self, timeout_s: float) -> bool:
        """Read once: frames, or the connection's end. False when nothing comes in time."""
        try:
            if timeout_s <= 0 or not self._poll.poll(timeout_s * 1e3):
                return False
        except OSError as error:
            if error.errno is None:
                raise  # raised by a signal's handler, not by the system
            self._break(f"the connection broke: {error}")
            return True
        try:
            if self._reader.receive(self._socket):
                self._dispatch()
            else:
                self._break("the engine closed the connection")
        except (OSError, ProtocolError, f.FrameError) as error:
            self._break(f"the connection broke: {error}")
        except BaseException:  # bytes that were read may be lost
            self.abandon("the call was interrupted while its answer was read")
            raise
        return True

    def _dispatch(self) -> None:
        """Give the frames that have arrived to the threads that wait for them."""
        reader = self._reader
        while (found := reader.next()) is not None:
            kind, start, size = found
            if kind != f.ANSWER:
                self._on_message(kind, bytes(reader.window[start : start + size]))
                continue
            number, status, flags, _, length, needed, *seconds = f.ANSWER_PAYLOAD.unpack_from(
                reader.buffer, start
            )
            pending = self._calls.pop(number, None)
            if pending is None:
                raise ProtocolError(f"an answer to call {number}, which is not waiting for one")
            inline = None
            if flags & f.INLINE:
                inline = bytes(reader.window[start + f.ANSWER_PAYLOAD.size : start + size])
            if pending.place is not None:
                pending.release()
            pending.reply = answer = Answer(status, length, needed, tuple(seconds), inline)
            if pending.gate is not None:
                pending.wake()
            if self._messages:  # the end of a step also ends waits for its other frames
                for one in (f.OPENED, f.DONE):
                    self._resolve(one, number, answer)

    def _on_message(self, kind: int, payload: bytes) -> None:
        """A frame that is not an ANSWER."""
        if kind == f.DONE:
            number = f.CALL_ID.unpack_from(payload)[0]
            self._resolve(kind, number, number)
        elif kind == f.OPENED:
            number = f.CALL_ID.unpack_from(payload)[0]
            self._resolve(kind, number, read_object(payload[f.CALL_ID.size :]))
        elif kind == f.DEVICE_ARENA:
            self._resolve(kind, 0, read_object(payload))
        elif kind == f.STATE:
            content = read_object(payload)
            self.state = str(content.get("state", ""))
            self.reason = str(content.get("reason", ""))
        elif kind == f.GROWN and self._growing is not None:
            self.arena.grow(int(read_object(payload).get("arena_bytes", 0)))
            self._growing.reply = self.arena.slots.size
            self._growing.wake()
        elif kind == f.REFUSED:
            self._refusal = content = read_object(payload)
            self._break(f"the engine refused the session: {content.get('detail', '')}")

    def _resolve(self, kind: int, number: int, reply: Reply) -> None:
        pending = self._messages.pop((kind, number), None)
        if pending is not None:
            pending.reply = reply
            pending.wake()

    def is_open(self) -> bool:
        """Read frames that arrived while no thread waited: the engine's state, or its end."""
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

    # The arena.

    def take(self, size: int) -> Slot:
        """A slot of `size` bytes; the arena grows where needed. Raises `ArenaFull`."""
        slots = self.arena.slots
        slot = slots.take(size)
        while slot is None:
            before = slots.size
            self._grow(before, size)
            slot = slots.take(size)
            if slot is None and slots.size == before:
                raise ArenaFull(
                    f"{size} bytes are needed, {slots.free} of the arena's {slots.size} are free, "
                    f"and its limit is {self._max_arena_bytes}: keep fewer arrays of it, or copy "
                    "them"
                )
        return slot

    def _grow(self, before: int, more: int) -> None:
        """Double the arena, or add `more` bytes, unless it is larger than `before` by now."""
        with self._only_one_grows:
            wanted = min(self._max_arena_bytes, before + max(before, more))
            if self.arena.slots.size > before or wanted <= before:
                return
            ends = time.monotonic() + 10.0
            self._growing = pending = Pending(None)
            try:
                with self._sending:
                    self._send(f.json_frame(f.GROW, {"arena_bytes": wanted}), ends)
                self.wait(pending, ends)
            finally:
                self._growing = None

    # The end.

    def abandon(self, reason: str) -> None:
        """End a session whose frames are in disorder; the engine then aborts its open steps."""
        self._break(reason)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _break(self, reason: str) -> None:
        """End the session and wake all waiting threads. The first reason stays."""
        self.broken = self.broken or reason
        for pending in self._all_pending():
            pending.wake()

    def close(self) -> None:
        """End the session. Arrays of the arena keep their values."""
        if self._closed:
            return
        self._closed = True
        self._break("the session is closed")
        if self.pid == os.getpid():  # else the parent of a fork uses it on
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._socket.close()
        self.arena.close()
