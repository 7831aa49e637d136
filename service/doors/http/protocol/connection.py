"""One HTTP/1.1 connection: receives requests, sends responses, and closes.

The event loop fills the buffers that `get_buffer` returns, so a body comes straight into the arena.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Part

from service.doors.http.endpoints.responses import finish, problem_response, respond_problem, run
from service.doors.http.protocol.admission import ConnectionKey
from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.exchange import Exchange
from service.doors.http.protocol.half_closed import CONTINUE, HalfClosed
from service.doors.http.protocol.heads import Head
from service.doors.http.protocol.intake import LEAST_BYTES, Intake
from service.errors import AttndError, NotReady, RequestTimeout

if TYPE_CHECKING:
    from service.doors.http.door import Door

JOIN_BYTES: Final = 64 * 2**10
"""Up to this size, copying a body behind its head is cheaper than sending the two in place."""
WITH_BODY: Final = frozenset({"POST", "PUT"})
LINGER_S: Final = 2.0
"""How long a closed connection is still read, so that a TCP reset does not discard the response."""


class Connection(asyncio.BufferedProtocol):
    """A connection of one door; `deadline`, by the loop's clock, is checked by `Door.sweep`."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.loop = door.loop
        self.intake = Intake(door.limits, self.begin)
        self.exchange: Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self.key = None if door.authenticator is None else ConnectionKey(door.authenticator)
        self.is_paused = self.is_timed = self.is_tls = self.is_closing = False
        self.busy_in = ""
        """The namespace, if any, that this busy connection counts for."""
        self.is_known = False
        """Whether a request with a valid key has come; without keys, whether any has."""
        self.half_closed: HalfClosed | None = None
        """Set once the client has closed its sending side."""
        self.deadline = inf
        self.unsent = 0
        """Bytes of responses that the client had not read at the last check."""
        self.next_slice: asyncio.Handle | None = None
        """Resumes a body of many short chunks in the next pass of the loop."""
        self.writing: asyncio.Future[None] | None = None
        """Set while a stream waits for its reader."""
        self.peer = self.address = ""
        """The client's address with and without its port."""

    # called by the event loop

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        self.peer = name_of(transport.get_extra_info("peername"))
        self.address = self.peer.rpartition(":")[0]
        self.is_tls = transport.get_extra_info("sslcontext") is not None
        self.since = self.loop.time()
        """When it was accepted, or its last response was sent."""
        self.deadline = self.since + self.door.limits.idle_timeout_s
        if not self.door.admit(self):
            self.refuse(self.door.too_many())

    def connection_lost(self, error: Exception | None) -> None:
        self.door.connections.discard(self)
        self.become_idle()
        self.is_closing = True
        self.deadline = inf
        if self.half_closed is not None:
            self.half_closed.timer.cancel()
        if self.exchange is not None:
            self.hang_up(self.exchange)
        self.intake.close()

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        body = self.intake.direct
        return self.door.buffer if body is None else self.door.read_budget.room(body.room())

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closing:
            return
        if nbytes >= LEAST_BYTES and self.door.read_budget.is_spent(nbytes, self):
            self.transport.pause_reading()
        intake = self.intake
        body = intake.direct
        if body is None:
            try:
                intake.read(self.door.buffer, 0, nbytes)
            except AttndError as error:
                self.refuse(error)
                return
            self.update_deadline()
            return
        body.got(nbytes)
        if not body.is_open:  # complete, or it stalls
            intake.direct = None
            self.update_deadline()

    def read_again(self) -> None:
        """The next pass of the loop has begun."""
        if not self.is_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """The client has closed its side; returns whether to stay open for a response."""
        intake = self.intake
        if self.is_closing or intake.is_underway or (self.exchange is None and not intake.ahead):
            return False
        if self.is_tls:  # TLS ends for both sides at once
            return False
        self.half_closed = HalfClosed(self)
        return True

    def pause_writing(self) -> None:
        self.intake.is_held = True
        self.unsent = self.unsent_bytes()
        self.deadline = self.loop.time() + self.door.limits.idle_timeout_s

    def resume_writing(self) -> None:
        self.intake.is_held = False
        self.unsent = 0
        if self.exchange is not None:  # a stream
            self.deadline = inf
            if self.writing is not None and not self.writing.done():
                self.writing.set_result(None)
        elif not self.is_closing:
            self.become_idle()
            self.resume()

    # reading

    def update_deadline(self) -> None:
        """Set the deadline of a request that has begun; pause reading bytes that have no place."""
        intake = self.intake
        body = intake.body
        is_partial = body is not None and not body.complete
        if is_partial or intake.parser is not None:
            if not self.is_timed:
                self.is_timed = True
                self.deadline = self.loop.time() + self.door.limits.receive_timeout_s
        elif self.exchange is not None and not intake.is_held:
            self.is_timed, self.deadline = False, inf
        if (is_partial or intake.ahead) and intake.is_blocked and not self.is_paused:
            self.is_paused = not self.transport.is_closing()
            if self.is_paused:
                self.transport.pause_reading()
        if intake.is_sliced and self.next_slice is None:
            self.next_slice = self.loop.call_soon(self.resume)

    def begin(self, head: Head, request_id: bytes, body: Body) -> None:
        """A request's head is here: reserve room for its body, and start its task in its turn."""
        door, headers = self.door, head.headers
        exchange = Exchange(head, request_id, self.peer)
        exchange.connection = self
        exchange.body = body
        self.exchange = exchange
        if self.key is not None:
            self.key.authenticate(exchange)
            self.become_busy(exchange)
        if headers.host not in door.host_rule.accepted or headers.origin is not None:
            foreign = door.host_rule.refusal(headers.host, headers.origin)
            exchange.refusal = foreign or exchange.refusal
        caller = self.address if self.key is None else exchange.tenant.namespace
        if exchange.refusal is None:
            self.is_known = True
            if exchange.method in WITH_BODY:
                body.begin(door, caller)
        door.active += 1
        if door.turns.take():
            self.start(exchange)
        else:
            door.turns.wait(caller, partial(self.start, exchange))

    def start(self, exchange: Exchange) -> None:
        """Start the request's task."""
        self.task = self.loop.create_task(run(self.door, exchange))

    def become_busy(self, exchange: Exchange) -> None:
        """Count a request with a valid key for its namespace, or set its refusal."""
        self.become_idle()
        namespace = exchange.tenant.namespace
        if exchange.refusal is None:
            try:
                self.door.busy.enter(namespace)
            except AttndError as error:
                exchange.refuse(error)
            else:
                self.busy_in = namespace

    def become_idle(self) -> None:
        """All responses are sent, or the connection is closed."""
        if self.busy_in:
            self.door.busy.leave(self.busy_in)
            self.busy_in = ""

    @property
    def may_give_place(self) -> bool:
        """Whether it may be closed for a new connection: it has never had a valid request, or waits
        for a request's head or its end, and all responses are sent."""
        if not self.is_known:
            return True
        if self.is_closing:
            return not self.transport.get_write_buffer_size()
        return self.exchange is None and not self.intake.is_held and not self.intake.ahead

    def welcome_body(self, exchange: Exchange, body: Body) -> None:
        """An endpoint waits for the body: continue reading."""
        if exchange.expects_continue and not body.received and not self.transport.is_closing():
            self.transport.write(CONTINUE)
        exchange.expects_continue = False
        if (self.is_paused or self.intake.ahead) and self.next_slice is None:
            self.resume()

    def resume(self) -> None:
        """Read again, beginning with the bytes that came ahead."""
        if self.next_slice is not None:
            self.next_slice.cancel()
            self.next_slice = None
        try:
            self.intake.resume()
        except AttndError as error:
            self.refuse(error)
            return
        if self.transport.is_closing():
            return
        if self.is_paused and not self.intake.is_blocked and self.half_closed is None:
            self.is_paused = False
            self.transport.resume_reading()
        self.update_deadline()
        if self.half_closed is not None and self.exchange is None:
            self.transport.close()  # half a request, and no more will come

    # responding

    def prepare_to_close(self, exchange: Exchange) -> None:
        """Decide whether the connection ends with this response."""
        if not self.intake.can_continue(exchange.expects_continue):
            exchange.keep_alive = False
        if self.half_closed is not None and not self.intake.ahead:
            exchange.keep_alive = False

    def send(self, head: bytes, parts: Sequence[Part]) -> None:
        """Send a response; a large body is sent without a copy."""
        if self.transport.is_closing():
            return
        if sum(map(len, parts)) <= JOIN_BYTES:
            self.transport.write(b"".join((head, *parts)))
        else:
            self.transport.writelines((head, *parts))

    async def wait_until_read(self) -> None:
        """Return when the client has read most of a stream; `check` ends one that reads nothing."""
        if self.intake.is_held:
            self.writing = self.loop.create_future()
            await self.writing

    def answered(self, exchange: Exchange, is_whole: bool) -> None:
        """The transport has the response: on to the next request, or to the end. `is_whole`: the
        request was received to its end."""
        self.exchange = self.task = None
        intake = self.intake
        intake.body = None
        if self.busy_in and not intake.is_held:
            self.become_idle()
        if self.is_closing:
            return
        if not exchange.keep_alive:
            self.close(softly=not is_whole)
            return
        self.is_timed = False
        self.since = self.loop.time()
        self.deadline = self.since + self.door.limits.idle_timeout_s
        if not intake.is_held and (intake.ahead or self.is_paused):
            self.loop.call_soon(self.resume)

    # closing

    def refuse(self, error: AttndError) -> None:
        """Respond to bytes that are no request, or come too late, and close."""
        exchange = Exchange(None, b"", self.peer)
        status, code, document, headers = problem_response(error, exchange)
        self.transport.write(
            exchange.response_head(status, len(document), self.door.date, headers) + document
        )
        finish(self.door, exchange, status, code)
        self.close(softly=True)

    def close(self, *, softly: bool) -> None:
        """Close when everything is sent. Softly: after the client has closed too, or a short while;
        closing while the client still sends would cost it the response."""
        intake = self.intake
        softly = (softly or bool(intake.ahead)) and self.half_closed is None
        self.is_closing = True
        intake.direct, intake.ahead = None, b""
        if not softly or not self.door.may_linger(self):
            self.deadline = self.loop.time() + self.door.limits.idle_timeout_s
            self.transport.close()
            return
        self.deadline = self.loop.time() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.is_paused:
            self.is_paused = False
            self.transport.resume_reading()

    def give_place(self) -> None:
        """Close at once, in favour of another connection."""
        self.is_closing = True
        self.transport.abort()

    def hang_up(self, exchange: Exchange) -> None:
        """The client has left: cancel its request."""
        exchange.is_disconnected = True
        if self.task is not None and exchange.is_running:  # a task that is cancelled before its
            self.task.cancel()  # first step runs nothing, and would release nothing

    def drain(self) -> None:
        """The door drains: refuse a request that has not been received to its end."""
        refusal = NotReady(self.door.draining)
        if self.exchange is not None:
            self.exchange.keep_alive = False
            if self.exchange.body is not None and not self.exchange.body.complete:
                self.exchange.body.fail(refusal)
        elif self.intake.is_underway and not self.is_closing:
            self.refuse(refusal)

    def give_up(self, error: AttndError) -> None:
        """Respond with an error, and cancel the request."""
        exchange, task = self.exchange, self.task
        if exchange is not None and task is not None:
            exchange.keep_alive = False
            respond_problem(self.door, exchange, error)
            task.cancel()

    def check(self, now: float) -> None:
        """Close the connection, or end its request, if the deadline has passed."""
        if now < self.deadline:
            return
        self.deadline = inf
        unsent = self.unsent_bytes()
        is_sent = self.exchange is None or self.exchange.is_answered
        if unsent and unsent != self.unsent and is_sent:  # the client reads, slowly
            self.unsent = unsent
            self.deadline = now + self.door.limits.idle_timeout_s
        elif self.is_closing or unsent:
            self.transport.abort()
        elif self.intake.is_underway:
            self.time_out()
        else:
            self.transport.close()

    def unsent_bytes(self) -> int:
        """Bytes of responses that the client has not acknowledged; those in the system's buffer
        count only while others wait behind them."""
        size: int = self.transport.get_write_buffer_size()
        return size + held_by_system(self.transport.get_extra_info("socket")) if size else 0

    def time_out(self) -> None:
        """Fail a request that has not been received in time."""
        seconds = self.door.limits.receive_timeout_s
        error = RequestTimeout(
            f"the request was not received within {seconds:g} s: send it faster, or raise "
            "server.receive_timeout_s"
        )
        if self.exchange is not None and self.exchange.body is not None:
            self.exchange.body.fail(error)
        else:
            self.refuse(error)


def held_by_system(sock: Any) -> int:
    """Bytes in a socket's send buffer; 0 where the system does not report it."""
    try:
        size = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))  # SIOCOUTQ, for sockets
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(size, sys.byteorder)


def name_of(peer: Any) -> str:
    """A client's address, for the log."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"
