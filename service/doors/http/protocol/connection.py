"""One HTTP/1.1 connection: what its socket brings, what is sent on it, and when it ends.

The loop fills the buffers that are given here, so a body comes straight into the arena.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part

from service.doors.http.endpoints.problems import tell
from service.doors.http.endpoints.responses import answer_problem, run
from service.doors.http.protocol.authentication import Entrance
from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.client_gone import ClientGone
from service.doors.http.protocol.exchange import PROBLEM, Exchange
from service.doors.http.protocol.half_closed import CONTINUE, Watch
from service.doors.http.protocol.heads import Head
from service.doors.http.protocol.intake import Intake
from service.errors import AttndError, NotReady, RequestTimeout

if TYPE_CHECKING:
    from service.doors.http.door import Door

JOIN_BYTES: Final = 64 * 2**10
"""Below this, copying an answer behind its head is cheaper than sending the two as they lie."""
WITH_BODY: Final = frozenset({"POST", "PUT"})
LINGER_S: Final = 2.0
"""How long a closed connection is read, so that what it was told is not lost to a reset."""


class Connection(asyncio.BufferedProtocol):
    """Belongs to one door. `deadline` is when, by the loop's clock, patience ends."""

    __slots__ = (
        "address",
        "deadline",
        "door",
        "entrance",
        "exchange",
        "intake",
        "is_known",
        "is_paused",
        "is_timed",
        "is_tls",
        "leaving",
        "loop",
        "peer",
        "since",
        "task",
        "transport",
        "unsent",
        "watch",
    )

    def __init__(self, door: Door) -> None:
        self.door = door
        self.loop = door.loop
        self.intake = Intake(door.limits, self.begin)
        self.exchange: Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self.entrance = None if door.gate is None else Entrance(door.gate)
        self.is_paused = self.is_timed = self.is_tls = self.leaving = False
        self.is_known = False
        """Whether a request has come whose key is valid; without keys, whether any has."""
        self.watch: Watch | None = None
        """Once the client has closed its side."""
        self.deadline = inf
        self.unsent = 0
        """Bytes of answers that the client has not taken, when last looked at."""
        self.peer = self.address = ""
        """The client with its port, and its host."""

    # what the loop calls

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        self.peer = name_of(transport.get_extra_info("peername"))
        self.address = self.peer.rpartition(":")[0]
        self.is_tls = transport.get_extra_info("sslcontext") is not None
        self.since = self.loop.time()
        """When it was accepted, or its last answer was sent."""
        self.deadline = self.since + self.door.limits.idle_timeout_s
        if not self.door.admit(self):
            self.refuse(self.door.too_many())

    def connection_lost(self, error: Exception | None) -> None:
        self.door.forget(self)
        self.leaving = True
        self.deadline = inf
        if self.watch is not None:
            self.watch.stop()
        if self.exchange is not None:
            self.hang_up(self.exchange)

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        body = self.intake.direct
        return self.door.buffer if body is None else body.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self.leaving:
            return
        body = self.intake.direct
        if body is None:
            self.read(self.door.buffer, nbytes)
            return
        body.got(nbytes)
        if body.complete:
            self.intake.look_at(body)
            self.is_timed, self.deadline = False, inf
        elif not body.is_open:
            self.intake.look_at(body)
            self.see_how_far()

    def eof_received(self) -> bool:
        """The client has closed its side; whether the connection stays open for an answer."""
        intake = self.intake
        if self.leaving or intake.is_underway or (self.exchange is None and not intake.ahead):
            return False
        if self.is_tls:  # it ends for both sides at once
            return False
        self.watch = Watch(self)
        return True

    def pause_writing(self) -> None:
        self.intake.is_held = True
        self.unsent = self.unsent_bytes()

    def resume_writing(self) -> None:
        self.intake.is_held = False
        self.unsent = 0
        if self.exchange is None and not self.leaving:
            self.go_on()

    # reading

    def read(self, data: bytearray | bytes, end: int) -> None:
        """Bytes in the order they came."""
        intake = self.intake
        try:
            intake.read(data, 0, end)
        except AttndError as error:
            self.refuse(error)
            return
        self.see_how_far()

    def see_how_far(self) -> None:
        """Set the clock for a request that has begun; stop reading what would be in the way."""
        intake = self.intake
        if intake.is_underway:
            if not self.is_timed:
                self.is_timed = True
                self.deadline = self.loop.time() + self.door.limits.receive_timeout_s
        elif self.exchange is not None:
            self.is_timed, self.deadline = False, inf
        if intake.is_blocked and not self.is_paused and not self.transport.is_closing():
            self.is_paused = True
            self.transport.pause_reading()

    def begin(self, head: Head, body: Body) -> None:
        """A request's head is here: make room for its body, and let it be answered."""
        exchange = Exchange(head, self.peer)
        exchange.connection = self
        exchange.body = body
        self.exchange = exchange
        if self.entrance is not None:
            self.entrance.authenticate(exchange)
        exchange.refusal = self.door.host_rule.refusal(exchange.said) or exchange.refusal
        self.is_known = self.is_known or exchange.refusal is None
        if exchange.method in WITH_BODY and exchange.refusal is None:
            body.begin(self.door, self.caller_of(exchange), exchange.lead)
        self.task = self.loop.create_task(run(self.door, exchange))

    def caller_of(self, exchange: Exchange) -> str:
        """Whose share of the arena a request takes."""
        if self.entrance is None:
            return self.address
        return exchange.tenant.namespace

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request's head, and all answers are sent."""
        if self.exchange is not None or self.leaving:
            return False
        return not self.intake.is_held and not self.intake.ahead

    def welcome_body(self, exchange: Exchange, body: Body) -> None:
        """Somebody waits for the body: it may come now."""
        if exchange.expects_continue and not body.received and not self.transport.is_closing():
            self.transport.write(CONTINUE)
        exchange.expects_continue = False
        if self.is_paused or self.intake.ahead:
            self.go_on()

    def go_on(self) -> None:
        """Read again, what has come ahead first."""
        try:
            self.intake.go_on()
        except AttndError as error:
            self.refuse(error)
            return
        if self.transport.is_closing():
            return
        if self.is_paused and not self.intake.is_blocked and self.watch is None:
            self.is_paused = False
            self.transport.resume_reading()
        self.see_how_far()
        if self.watch is not None and self.exchange is None:
            self.transport.close()  # half a request, and no more

    # answering

    def prepare_to_close(self, exchange: Exchange) -> None:
        """Decide whether the connection ends with this answer."""
        if not self.intake.keeps_step(exchange.expects_continue):
            exchange.keep_alive = False
        if self.watch is not None and not self.intake.ahead:
            exchange.keep_alive = False

    def send(self, head: bytes, parts: Sequence[Part]) -> None:
        """The whole answer; a large body is sent as it lies in memory."""
        if self.transport.is_closing():
            return
        if sum(map(len, parts)) <= JOIN_BYTES:
            self.transport.write(b"".join((head, *parts)))
        else:
            self.transport.writelines((head, *parts))

    def answered(self, exchange: Exchange, is_whole: bool) -> None:
        """The answer is with the transport: on to the next request, or to the end. `is_whole`: the
        request had been read to its end."""
        self.exchange = self.task = None
        self.intake.answered()
        if self.leaving:
            return
        if not exchange.keep_alive:
            self.close(softly=not is_whole)
            return
        self.is_timed = False
        self.since = self.loop.time()
        self.deadline = self.since + self.door.limits.idle_timeout_s
        if not self.intake.is_held and (self.intake.ahead or self.is_paused):
            self.loop.call_soon(self.go_on)

    # endings

    def refuse(self, error: AttndError) -> None:
        """Answer what is no request, or comes at a bad time, and close."""
        exchange = Exchange(None, self.peer)
        status, code, document, headers = tell(error, exchange)
        headers = [(b"content-type", PROBLEM.encode()), *headers]
        head = exchange.answer_head(status, len(document), self.door.date, headers)
        self.transport.write(head + document)
        exchange.end(status, code)
        self.door.ledger.add(exchange)
        self.close(softly=True)

    def close(self, *, softly: bool) -> None:
        """Close when all is sent; softly: when the client has closed too, or after a short while,
        for closing while it still sends would cost it the answer."""
        intake = self.intake
        softly = (softly or bool(intake.ahead)) and self.watch is None
        self.leaving = True
        intake.direct, intake.ahead = None, b""
        if not softly or not self.door.may_linger(self):
            self.transport.close()
            return
        self.deadline = self.loop.time() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.is_paused:
            self.is_paused = False
            self.transport.resume_reading()

    def give_place(self) -> None:
        """Close at once, for another connection."""
        self.leaving = True
        self.transport.abort()

    def hang_up(self, exchange: Exchange) -> None:
        """The client is gone: whatever waits for its answer may stop."""
        exchange.is_gone = True
        if exchange.body is not None and not exchange.body.complete:
            exchange.body.fail(ClientGone())
        elif self.task is not None:
            self.task.cancel()

    def drain(self) -> None:
        """The door takes no more: what has not come whole is refused."""
        refusal = NotReady(self.door.draining)
        if self.exchange is not None:
            self.exchange.keep_alive = False
            if self.exchange.body is not None and not self.exchange.body.complete:
                self.exchange.body.fail(refusal)
        elif self.intake.is_underway and not self.leaving:
            self.refuse(refusal)

    def give_up(self, error: AttndError) -> None:
        """Answer a request whose work nobody will wait for any longer."""
        exchange, task = self.exchange, self.task
        if exchange is not None and task is not None:
            exchange.keep_alive = False
            answer_problem(self.door, exchange, tell(error, exchange))
            task.cancel()

    def check(self, now: float) -> None:
        """End what has taken too long."""
        if now < self.deadline:
            return
        self.deadline = inf
        unsent = self.unsent_bytes()
        if unsent and unsent != self.unsent and self.exchange is None:  # the client reads, slowly
            self.unsent = unsent
            self.deadline = now + self.door.limits.idle_timeout_s
        elif self.leaving or unsent:
            self.transport.abort()
        elif self.intake.is_underway:
            self.time_out()
        else:
            self.transport.close()

    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not acknowledged; those that the system holds for it
        count only while there are more."""
        size: int = self.transport.get_write_buffer_size()
        return size + held_by_system(self.transport.get_extra_info("socket")) if size else 0

    def time_out(self) -> None:
        """A request has not come whole in time."""
        seconds = self.door.limits.receive_timeout_s
        told = f"the request did not arrive whole within {seconds:g} s: send it faster, or raise "
        error = RequestTimeout(f"{told}server.receive_timeout_s")
        if self.exchange is not None and self.exchange.body is not None:
            self.exchange.body.fail(error)
        else:
            self.refuse(error)


def held_by_system(sock: Any) -> int:
    """Bytes in a socket's send buffer, 0 where the system does not say."""
    try:
        told = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))  # SIOCOUTQ, for sockets
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(told, sys.byteorder)


def name_of(peer: Any) -> str:
    """A client's address, for the log."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"
