"""The engine's end of one session: its frames, its arena, and the calls that wait for an answer."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any, Final

from attnd.wire import frames as f
from attnd.wire.images import PROBLEM, header
from attnd.wire.slots import ALIGNMENT

from service.errors import (
    AttndError,
    MalformedRequest,
    NoSuchRoute,
    Overloaded,
    Unauthorized,
    problem,
)
from service.image.json_text import dump_json
from service.road.arena import Arena, check_place
from service.road.engine_end.admission import Standing
from service.road.engine_end.calls import (
    STEPPING,
    Call,
    Cancel,
    Event,
    SessionConfig,
    read_stepping,
)
from service.road.engine_end.door_arena import ReceivedArena
from service.road.engine_end.incoming import Incoming
from service.road.engine_end.listening import permit_descriptors
from service.road.messages import Challenge, Grow, Grown, Hello, State, Welcome, message, read
from service.road.messages import refusal as refused
from service.road.output import Output, Unread

CallValues = tuple[int, int, int, int, int, int, int, int, bytes]
Stages = tuple[float, ...]
NOTHING: Final = memoryview(b"")
READ_BYTES: Final = 16 * 2**10
"""Bytes of frames read at once: 220 calls, some milliseconds where each is refused."""


class Session:
    """Reads frames and writes answers without ever blocking; the engine's loop calls it.

    `ended` is why the session is over. The engine then calls `close`, and still gives one answer
    for every call in `live`: the arena is freed with the last of them.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        config: SessionConfig,
        state: State,
        pid: int = -1,
        uid: int = -1,
        *,
        is_remote: bool = False,
    ) -> None:
        """`is_remote`: over TCP, where images follow their frames. `pid` is 0 or less where the
        process is not visible."""
        sock.setblocking(False)
        self.sock = sock
        self.pid = pid
        self.uid = uid
        self.number = number
        self.config = config
        self.state = state
        self.started = time.monotonic()
        self.name = ""
        self.standing = Standing(config.admission)
        self.tenants = self.standing.tenants
        self.ended = ""
        self.closed = False
        self.watched_for_room = False
        """Whether the engine's loop waits until the socket can be written, too."""
        self.live: dict[int, Call] = {}
        self.num_devices = 0
        """Requests for a device arena that have no reply yet."""
        self.reader = f.Reader(f.FROM_CALLER)
        self.incoming: Incoming | None = None
        """Images that follow the frames of calls; over TCP only."""
        answers = config.max_arena_bytes if is_remote else 0
        self.output = Output(sock, config.max_output_bytes + answers)
        self.arena: Arena | None = None
        self.door_arena = ReceivedArena()
        self.repeated: dict[Any, Any] = {}
        """Requests that the engine remembers by their places in the arena; cleared when those
        move."""
        self.growth = 0
        """The size in a GROW that waits, because calls keep a pinned arena in place."""
        if is_remote:
            self.incoming = Incoming(self.live, config.max_arena_bytes)
            self.send(message(f.CHALLENGE, Challenge(self.incoming.nonce)))

    @property
    def greeted(self) -> bool:
        """Whether HELLO has arrived; the engine closes connections that never send it."""
        return self.arena is not None

    @property
    def pinned(self) -> bool:
        """Whether the device reaches the whole arena by DMA."""
        return self.arena is not None and len(self.arena.pinned) > 0

    @property
    def wants_write(self) -> bool:
        """Whether to call `flush` when the socket becomes writable."""
        return bool(self.output.waiting)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    # Input.

    def read(self) -> list[Event]:
        """The events that have arrived, in order; never raises. Check `ended` and `wants_write`."""
        events: list[Event] = []
        if self.ended:
            return events
        reader = self.reader
        try:
            incoming = self.incoming
            if incoming is not None and incoming.is_underway:
                if not incoming.receive(self.sock, events):
                    self.end("the caller left in the middle of an image")
                return events
            if self.arena is None and incoming is None:
                received = self.door_arena.receive(self.sock, reader)
            else:
                received = reader.receive(self.sock, READ_BYTES)
            if not received:
                rest = reader.unfinished
                self.end("the caller left" + (f", {rest} bytes into a frame" if rest else ""))
                return events
            while not self.ended and (found := reader.next()) is not None:
                kind, start, size = found
                if kind == f.CALL:
                    values = f.CALL_PAYLOAD.unpack_from(reader.buffer, start)
                    call = self.read_call(values)
                    if incoming is not None:
                        call = incoming.begin(call, values[5], reader)
                    if call is not None:
                        events.append(call)
                elif kind == f.CANCEL:
                    waiting = self.live.get(f.CALL_ID.unpack_from(reader.buffer, start)[0])
                    if waiting is not None and not waiting.cancelled:
                        waiting.cancelled = True
                        events.append(Cancel(waiting))
                else:
                    self.read_rare(kind, bytes(reader.window[start : start + size]), events)
        except (BlockingIOError, InterruptedError):
            return events
        except (f.FrameError, Unauthorized, Overloaded) as error:
            is_malformed = isinstance(error, f.FrameError)
            self.refuse(MalformedRequest(str(error)) if is_malformed else error)
        except OSError as error:
            self.end(f"the connection broke: {error}")
        return events

    def read_call(self, values: CallValues) -> Call | None:
        """The call in a CALL frame; None when it was refused here."""
        number, route, who, deadline_us, request, length, answer, capacity, name = values
        arena, live, config = self.arena, self.live, self.config
        if arena is None:
            raise f.FrameError("CALL before HELLO: a session begins with HELLO")
        tenant = self.tenants.get(who)
        if tenant is None:
            raise f.FrameError(f"tenant field of CALL {number} is {who}: send 0")
        if number in live:
            raise f.FrameError(f"CALL {number} while call {number} waits for its answer")
        if (
            route not in config.numbers
            or (request | answer) % ALIGNMENT
            or request + length > arena.size
            or answer + capacity > arena.size
            or len(live) >= config.max_calls
        ):
            self.refuse_call(values, arena.size)
            return None
        seconds = deadline_us * 1e-6 if deadline_us else config.default_deadline_s
        given = arena.memory[request : request + length]
        place = arena.memory[answer : answer + capacity]
        at = (request, length, answer, capacity)
        call = live[number] = Call(self, number, route, seconds, given, place, name, tenant, at)
        return call

    def refuse_call(self, values: CallValues, size: int) -> None:
        """Answer a call that breaks a rule; the session continues."""
        number, route, _, _, request, length, answer, capacity, _ = values
        try:
            if route not in self.config.numbers:
                raise NoSuchRoute(f"route {route}: WELCOME lists the routes and their numbers")
            check_place("request", request, length, size)
            check_place("answer", answer, capacity, size)
            waiting = f"{len(self.live)} calls of this session wait for their answers"
            most = f"at most {self.config.max_calls} may: wait for some"
            raise Overloaded(f"{waiting}, {most}", retry_after_s=1.0)
        except AttndError as error:
            self.send_problem(number, error)

    def read_rare(self, kind: int, payload: bytes, events: list[Event]) -> None:
        """Process a frame of steps, or a message about the session."""
        if kind not in STEPPING:
            self.read_message(kind, payload)
        elif self.incoming is not None:
            raise f.FrameError(f"{f.NAMES[kind]} over TCP: steps are for callers on the same host")
        elif (event := read_stepping(self, kind, payload)) is not None:
            events.append(event)

    def read_message(self, kind: int, payload: bytes) -> None:
        """HELLO, TENANT or GROW."""
        if kind == f.HELLO:
            if self.arena is not None:
                raise f.FrameError("HELLO came twice: GROW makes the arena larger")
            hello = read(kind, payload, Hello)
            self.name = hello.name
            self.standing.greet(hello, "" if self.incoming is None else self.incoming.nonce)
            if not self.standing.is_door:
                self.config.make_room(self.standing.tenants[0].namespace)
            if hello.brings_arena and not self.standing.is_door:
                raise f.FrameError("brings_arena from a caller that is no door: leave it out")
            if hello.brings_arena and not self.door_arena.has_come:
                if permit_descriptors(self.sock):
                    return  # HELLO comes again, with it
                raise f.FrameError("brings_arena without a descriptor: send it with HELLO")
            self.welcome(hello)
            return
        if kind == f.TENANT:
            self.standing.announce(payload)
            return
        if self.arena is None:
            raise f.FrameError("GROW before HELLO: a session begins with HELLO")
        if self.growth:
            raise f.FrameError("GROW while another waits for its GROWN: one at a time")
        self.growth = max(read(kind, payload, Grow).arena_bytes, 1)
        self.grow()

    # The arena.

    def welcome(self, hello: Hello) -> None:
        """Reply to HELLO, with the descriptor of an arena that was made here."""
        config = self.config
        try:
            self.arena = arena = self.door_arena.arena(hello, config)
        except OSError as error:
            self.refuse(Overloaded(f"no memory for an arena: {error}", retry_after_s=1.0))
            return
        finally:
            self.door_arena.drop()
        content = Welcome(
            version=f.VERSION,
            session=self.number,
            instance_id=config.instance_id,
            arena_bytes=arena.size,
            max_arena_bytes=arena.limit,
            pinned_bytes=len(arena.pinned),
            routes=dict(config.routes),
            limits=dict(config.limits),
            state=self.state.state,
            reason=self.state.reason,
            proof=self.standing.proof(hello) if self.incoming is not None else "",
        )
        data = message(f.WELCOME, content)
        if self.incoming is not None or arena.is_shared:
            self.send(data)
            return
        sent = socket.send_fds(self.sock, [data], [arena.fd])
        if sent < len(data):
            self.output.waiting += data[sent:]

    def grow(self) -> None:
        """Answer a GROW; a pinned arena moves only while the engine uses none of it."""
        arena = self.arena
        if arena is None or self.ended or (self.pinned and self.live):
            return
        wanted, self.growth = self.growth, 0
        self.repeated.clear()
        with suppress(OSError):  # GROWN has the actual size
            arena.grow(wanted)
        self.send(message(f.GROWN, Grown(arena.size, len(arena.pinned))))

    # Output.

    def answer(self, call: Call, status: int, length: int, stages: Stages, held: int = 0) -> None:
        """Answer a call whose image of `length` bytes is at its answer place. A door also gets the
        number of pages `held` now by all tenants."""
        image = NOTHING if self.incoming is None else call.answer[:length]
        self.done(call)
        flags, held = (f.HELD, held) if self.standing.is_door else (0, 0)
        self.send(
            f.ANSWER_FRAME.pack(
                f.ANSWER, 0, f.ANSWER_PAYLOAD.size, call.id, status, flags, held, length, 0, *stages
            )
        )
        if image:
            self.send(image)
        if self.growth:
            self.grow()

    def fail(
        self, call: Call, error: BaseException, stages: Stages = f.NO_STAGES, *, needed: int = 0
    ) -> None:
        """Answer a call that failed, with its problem inside the frame."""
        self.done(call)
        self.send_problem(call.id, error, stages, needed)
        if self.growth:
            self.grow()

    def send_state(self, state: State) -> None:
        self.state = state
        if self.greeted:
            self.send(message(f.STATE, state))

    def flush(self) -> None:
        """Send waiting bytes; the socket can be written."""
        if not self.ended:
            try:
                self.output.flush()
            except OSError as error:
                self.end(f"the connection broke: {error}")

    def done(self, call: Call) -> None:
        """The engine does not use the call's places any more."""
        if self.live.pop(call.id, None) is not call:
            raise RuntimeError(f"call {call.id} was answered twice; this is a bug")
        if self.closed and not self.live:
            self.release()

    def send_problem(
        self, number: int, error: BaseException, stages: Stages = f.NO_STAGES, needed: int = 0
    ) -> None:
        status, image = problem_image(error)
        length = len(image)
        size = f.ANSWER_PAYLOAD.size + length
        head = f.ANSWER_FRAME.pack(
            f.ANSWER, 0, size, number, status, f.INLINE, 0, length, needed, *stages
        )
        self.send(head + image)

    def send(self, data: bytes | memoryview) -> None:
        """Send a frame now or later; a caller that does not read is dropped in the end."""
        if self.ended:
            return
        try:
            self.output.send(data)
        except Unread as error:
            self.end(f"the caller does not read: {error}")
        except OSError as error:
            self.end(f"the connection broke: {error}")

    # The end.

    def refuse(self, error: BaseException) -> None:
        """Send the caller the reason, and end the session."""
        self.send(refused(error))
        self.end(f"refused: {error}")

    def end(self, reason: str) -> None:
        """The first reason stays."""
        self.ended = self.ended or reason

    def close(self) -> None:
        """Close the connection. The arena stays until every call in `live` has its answer; its door
        learns from the end of the connection that the engine does not use it any more."""
        self.end("the engine closed it")
        if self.closed:
            return
        self.closed = True
        self.door_arena.drop()
        if self.arena is None or not self.arena.is_shared:
            self.sock.close()
        if not self.live:
            self.release()

    def release(self) -> None:
        """Close the arena; its memory is freed with the last view of it."""
        self.sock.close()
        self.repeated.clear()
        self.incoming = None
        if self.arena is not None:
            self.arena.close()


def problem_image(error: BaseException) -> tuple[int, bytes]:
    """The status of an error, and an image of its problem document without tensors."""
    document = problem(error)
    return int(document["status"]), header(PROBLEM, dump_json(document), ())
