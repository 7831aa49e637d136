"""`RoadCaller`: a door's session with the engine, for asyncio, with pipelined calls."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Final

from attnd.wire import frames as f

from service.errors import DeadlineExceeded, NotReady
from service.road.caller_end.greeting import PeerProcess, greet, greet_remote
from service.road.caller_end.slots import Mapping, OwnArena, Slot, Slots
from service.road.messages import (
    MOST_TENANTS,
    Announced,
    Grow,
    Grown,
    Hello,
    Refused,
    State,
    Welcome,
    message,
    read,
)
from service.road.output import Output, Unread
from service.road.tcp import Filling, connected, is_remote
from service.tenants import Tenant

MAX_OUTPUT_BYTES: Final = 8 * 2**20
"""Bytes of frames that the engine has not read; far more than the calls in flight need."""


class AnswerLost(NotReady):
    """The session ended before the answer came; the operation may have been applied."""


@dataclass(slots=True, eq=False)
class Answered:
    """An answer. `image` is a view of the answer's slot and keeps it taken, or came in the frame.

    `needed` is the capacity that would have held the answer, else 0; `stages` are seconds in the
    order of `frames.STAGES`; `held` is the number of pages that sequences and pins hold, None where
    the engine does not send it.
    """

    status: int
    image: memoryview
    needed: int
    stages: tuple[float, ...]
    held: int | None = None


@dataclass(slots=True, eq=False)
class Pending:
    """A call without its answer; it holds its slots until the engine is done with them."""

    future: asyncio.Future[Answered]
    request: Slot
    answer: Slot
    ends: float
    """When `RoadCaller.time_out` fails it, by the loop's clock."""


class RoadCaller:
    """One session, for the thread of its event loop. `lost` is why it is over, else empty."""

    def __init__(
        self,
        sock: socket.socket,
        reader: f.Reader,
        welcome: Welcome,
        mapping: Mapping,
        own: OwnArena | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.sock = sock
        self.reader = reader
        self.welcome = welcome
        self.mapping = mapping
        self.own = own
        self.slots = Slots(mapping) if own is None else own.slots
        self.reach = welcome.arena_bytes
        """Bytes of the arena that the engine can use; a shared arena may be longer."""
        self.pinned_bytes = welcome.pinned_bytes
        self.state = State(welcome.state, welcome.reason)
        self.output = Output(sock, MAX_OUTPUT_BYTES)
        self.is_writing = False
        self.pending: dict[int, Pending] = {}
        self.last_id = 0
        self.numbers: dict[Tenant, int] = {}
        self.growing = asyncio.Lock()
        self.grown: asyncio.Future[int] | None = None
        self.is_remote = False
        self.filling: tuple[Filling, int, Answered] | None = None
        """Over TCP only: the image that follows an ANSWER's frame, its call, and the answer."""
        self.beat = self.loop.time()
        """Time of the last STATE by the loop's clock; the engine sends one every second."""
        self.lost = ""
        self.on_lost: Callable[[str], object] | None = None
        self.on_state: Callable[[State], object] | None = None
        self.peer = PeerProcess()
        """The engine's process. `on_lost` may keep it; otherwise it is closed with the session."""

    @classmethod
    async def connect(
        cls,
        path: str,
        arena_bytes: int,
        *,
        name: str = "",
        secret: str = "",
        key: str = "",
        own: OwnArena | None = None,
        on_reached: Callable[[], object] | None = None,
    ) -> RoadCaller:
        """A session at the engine's socket: a door's with the service's `secret`, else one in the
        namespace of `key`. `path` may be `tcp:HOST:PORT`, for doors. `own`: an arena that a door
        shares with several engines. `on_reached` is called once the connection is made.
        Raises OSError, NotReady when refused, FrameError.
        """
        sock, peer = await connected(path), PeerProcess()
        try:
            if on_reached is not None:
                on_reached()
            hello = Hello(f.VERSION, arena_bytes, name, bool(secret), key, secret)
            meet = greet_remote if is_remote(path) else greet
            greeted = await meet(sock, hello, None if own is None else own.mapping, peer)
            caller = cls(sock, *greeted, own)
            caller.peer = peer
            if is_remote(path):
                caller.is_remote = True
                caller.output.limit += caller.welcome.max_arena_bytes
        except BaseException:
            sock.close()
            peer.close()
            raise
        caller.loop.add_reader(sock, caller.on_readable)
        caller.loop.call_soon(caller.on_frames)
        return caller

    def number_of(self, tenant: Tenant) -> int:
        """The number of a tenant in calls; the first time it is announced to the engine.

        The number of the tenant that was announced first is taken where there is no other: calls
        that were sent before keep their tenant. Raises NotReady.
        """
        number = self.numbers.get(tenant)
        if number is None:
            number = len(self.numbers) + 1
            if number > MOST_TENANTS:
                number = self.numbers.pop(next(iter(self.numbers)))
            content = Announced(number, tenant.namespace, tuple(tenant.scopes))
            self.send(message(f.TENANT, content))
            self.numbers[tenant] = number
        return number

    def take(self, size: int) -> Slot:
        """A slot for a request or an answer. Raises ArenaFull, or NotReady when all is over."""
        if self.lost:
            raise NotReady(self.lost)
        return self.slots.take(size)

    async def call(
        self,
        operation: int,
        request: Slot,
        length: int,
        answer: Slot,
        *,
        deadline_us: int = 0,
        request_id: bytes = f.NO_REQUEST_ID,
        tenant: int = 0,
        ends: float = inf,
    ) -> Answered:
        """Send the image of `length` bytes in `request`; the answer goes to `answer` if it fits.

        `tenant` is the number of the tenant a door calls for; `ends` is when `time_out` fails the
        call, by the loop's clock.

        Cancelling this cancels the call; both slots stay taken until the engine has answered, for
        it may still read and write them. Raises NotReady when the session is or gets lost.
        """
        self.last_id = number = self.last_id + 1
        future: asyncio.Future[Answered] = self.loop.create_future()
        data = f.CALL_FRAME.pack(
            f.CALL,
            0,
            f.CALL_PAYLOAD.size,
            number,
            operation,
            tenant,
            min(deadline_us, f.LONGEST_DEADLINE_US),
            request.offset,
            length,
            answer.offset,
            answer.size,
            request_id,
        )
        self.send(data)
        if self.is_remote:
            self.send(request.view(length))
        request.holds += 1  # the engine reads and writes them from now on
        answer.holds += 1
        self.pending[number] = Pending(future, request, answer, ends)
        try:
            return await future
        except (asyncio.CancelledError, DeadlineExceeded):
            if number in self.pending:
                with suppress(NotReady):  # the engine has cancelled all by its end
                    self.send(f.cancel_frame(number))
            raise

    def time_out(self, now: float) -> None:
        """Fail calls whose time is over; the engine may still apply them."""
        for pending in self.pending.values():
            if now > pending.ends and not pending.future.done():
                text = "no engine replied in time; the operation may have been applied"
                pending.future.set_exception(DeadlineExceeded(text))

    async def grow(self, arena_bytes: int) -> int:
        """Ask for a larger arena; its size then, which may be less. Raises NotReady."""
        async with self.growing:
            if self.grown is not None:  # an earlier caller was cancelled: one GROW at a time
                await asyncio.shield(self.grown)
            self.send(message(f.GROW, Grow(arena_bytes)))
            self.grown = self.loop.create_future()
            size = await asyncio.shield(self.grown)
            self.grown = None
            return size

    def close(self) -> None:
        """End the session; calls that wait raise NotReady."""
        self.lose("the session was closed")

    # Called by the event loop.

    def on_readable(self) -> None:
        try:
            if self.filling is not None:
                self.fill(self.filling)
                return
            if not self.reader.receive(self.sock):
                self.lose("the engine closed the connection")
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.lose(f"the connection to the engine broke: {error}")
        self.on_frames()

    def on_frames(self) -> None:
        reader = self.reader
        try:
            while not self.lost and (found := reader.next()) is not None:
                kind, start, size = found
                if kind == f.ANSWER:
                    self.on_answer(start, size)
                else:
                    self.on_message(kind, bytes(reader.window[start : start + size]))
        except f.FrameError as error:
            self.lose(f"the engine sent an invalid frame: {error}")

    def on_answer(self, start: int, size: int) -> None:
        """Resolve the call of an answer, and free its slots."""
        reader = self.reader
        number, status, flags, held, length, needed, *stages = f.ANSWER_PAYLOAD.unpack_from(
            reader.buffer, start
        )
        pending = self.pending.get(number)
        if pending is None:
            raise f.FrameError(f"an answer to call {number}, which waits for none")
        if not flags & f.INLINE and length > pending.answer.size:
            raise f.FrameError(f"an answer of {length} bytes in {pending.answer.size}")
        if flags & f.INLINE:
            begin = start + f.ANSWER_PAYLOAD.size
            image = memoryview(bytes(reader.window[begin : start + size]))
        else:
            image = pending.answer.view(length)
        answered = Answered(status, image, needed, tuple(stages), held if flags & f.HELD else None)
        if self.is_remote and not flags & f.INLINE:
            filling = Filling(image, length)
            filling.feed(reader)
            if filling.left:
                self.filling = filling, number, answered
                return
        self.settle(number, answered)

    def fill(self, underway: tuple[Filling, int, Answered]) -> None:
        """Receive more of an answer that follows its frame."""
        filling, number, answered = underway
        if not filling.receive(self.sock):
            self.lose("the engine left in the middle of an answer")
        elif not filling.left:
            self.filling = None
            self.settle(number, answered)

    def settle(self, number: int, answered: Answered) -> None:
        """Resolve a call whose answer is complete."""
        pending = self.pending.pop(number)
        if not pending.future.done():
            pending.future.set_result(answered)
        pending.request.free()
        pending.answer.free()

    def on_message(self, kind: int, payload: bytes) -> None:
        if kind == f.STATE:
            before, self.beat = self.state, self.loop.time()
            self.state = read(kind, payload, State)
            if self.on_state is not None and self.state != before:
                self.on_state(self.state)
        elif kind == f.GROWN:
            self.on_grown(read(kind, payload, Grown))
        elif kind == f.REFUSED:
            self.lose(f"the engine ended the session: {read(kind, payload, Refused).detail}")
        else:
            raise f.FrameError(f"{f.NAMES[kind]} came twice")

    def on_grown(self, grown: Grown) -> None:
        """Remap the arena, unless the door provides it."""
        if self.own is None:
            if self.is_remote:
                os.ftruncate(self.mapping.fd, grown.arena_bytes)
            self.mapping.grow(grown.arena_bytes)
            self.slots.grow(grown.arena_bytes)
        self.reach = grown.arena_bytes
        self.pinned_bytes = grown.pinned_bytes
        if self.grown is not None and not self.grown.done():
            self.grown.set_result(grown.arena_bytes)

    def send(self, data: bytes | memoryview) -> None:
        """Send a frame now, or when the socket can be written. Raises NotReady."""
        if self.lost:
            raise NotReady(self.lost)
        try:
            self.output.send(data)
        except (Unread, OSError) as error:
            self.lose(f"the connection to the engine broke: {error}")
            raise NotReady(self.lost) from error
        if self.output.waiting and not self.is_writing:
            self.is_writing = True
            self.loop.add_writer(self.sock, self.on_writable)

    def on_writable(self) -> None:
        try:
            self.output.flush()
        except OSError as error:
            self.lose(f"the connection to the engine broke: {error}")
        if not self.output.waiting and not self.lost:
            self.is_writing = False
            self.loop.remove_writer(self.sock)

    def lose(self, reason: str) -> None:
        """End the session: all pending calls fail."""
        if self.lost:
            return
        self.lost = reason
        self.state = State("lost", reason)
        self.loop.remove_reader(self.sock)
        if self.is_writing:
            self.loop.remove_writer(self.sock)
        for call in self.pending.values():
            if not call.future.done():
                call.future.set_exception(AnswerLost(reason))
        if self.grown is not None and not self.grown.done():
            self.grown.set_exception(NotReady(reason))
        self.release()
        if self.on_lost is not None:
            self.on_lost(reason)
        self.peer.close()

    def release(self) -> None:
        """Close the connection; free the arena, or the slots of pending calls in a shared one."""
        slots = [slot for call in self.pending.values() for slot in (call.request, call.answer)]
        self.pending.clear()
        if self.own is None:
            self.sock.close()
            self.mapping.close()
        elif slots and not self.is_remote:
            self.own.leave(self.loop, self.sock, slots)
        else:  # no other process writes there
            self.sock.close()
            for slot in slots:
                slot.free()
