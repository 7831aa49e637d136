"""One HTTP/1.1 connection: uvicorn's, which receives large bodies straight into the arena.

A body of declared length above `LARGE_BYTES` gets its slot before it arrives. Then the event loop
fills the slot itself: neither llhttp nor ASGI's `receive` copies the bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.doors.http.bodies import LARGE_BYTES, LEAST_BYTES, Body
from service.doors.http.door import Door
from service.doors.http.endpoints.responses import problem_bytes
from service.doors.http.exchange import CONNECTION, EXCHANGE, Exchange
from service.errors import AttndError, HeadersTooLarge, MalformedRequest

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

HEAD_END: Final = b"\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A connection of one door. `exchange` is the request whose client it watches."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.door: Door = config.loaded_app.door
        self.exchange: Exchange | None = None
        self.body: Body | None = None
        """A large body that is arriving."""
        self.head_bytes = 0
        """Of a head that has not come whole."""
        self.is_reading = False
        """Whether a request's body is arriving."""
        self.unsent = 0
        """Bytes of responses that the client had not read at the last check."""
        self.unread: asyncio.TimerHandle | None = None
        """The next check, while more responses wait."""

    # called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wait_for_head()
        if (refusal := self.door.admit(self)) is not None:
            self.refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.connections.pop(self, None)
        super().connection_lost(exc)
        self.resume_writing()
        self._unset_keepalive_if_required()
        if self.exchange is not None:
            self.exchange.hang_up()

    def data_received(self, data: bytes) -> None:
        limit = self.door.limits.max_header_bytes
        is_head = not self.is_reading
        if is_head and self.head_bytes + len(data) > limit and HEAD_END not in data[:limit]:
            self.refuse_head(limit)
            return
        super().data_received(data)
        if self.body is not None:
            if not self.body.is_complete and not self.transport.is_closing():
                self.transport.set_protocol(Receiver(self, self.body))
        elif self.is_idle and not self.transport.is_closing():
            if not self.is_reading:
                self.head_bytes += len(data)
            self.wait_for_head()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its response."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return "unix" if self.client is None else self.client[0]

    @property
    def idle_until(self) -> float:
        """When this connection ends if no byte comes, by the loop's clock; 0 while it has work."""
        timer = self.timeout_keep_alive_task
        if timer is None or self.transport.get_write_buffer_size():
            return 0.0
        return timer.when()

    def resume_reading(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def wait_for_head(self) -> None:
        """End the connection if it stays silent."""
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        """No byte has come for a while."""
        self.timeout_keep_alive_task = None
        if self.flow.write_paused:  # `check_unread` decides
            self.wait_for_head()
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unsent = self.transport.get_write_buffer_size()
        self.unread = self.loop.call_later(self.timeout_keep_alive, self.check_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def check_unread(self) -> None:
        """End the connection of a client that has read nothing for a while."""
        unsent, before = self.transport.get_write_buffer_size(), self.unsent
        if unsent == before:
            self.transport.abort()
        else:
            self.unsent = unsent
            self.unread = self.loop.call_later(self.timeout_keep_alive, self.check_unread)

    # called by the parser

    def on_headers_complete(self) -> None:
        is_first, self.head_bytes, self.is_reading = self.is_idle, 0, True
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        for name, value in self.headers:
            if name == b"content-length" and is_first and int(value) > LARGE_BYTES:
                self.begin_body()
            elif name == b"upgrade" and is_first and self.scope["method"] != "GET":
                self.refuse_upgrade()

    def on_body(self, body: bytes) -> None:
        if self.body is None:
            super().on_body(body)
            return
        self.body.room()[: len(body)] = body
        self.body.got(len(body))

    def on_message_complete(self) -> None:
        self.body, self.is_reading = None, False
        super().on_message_complete()

    def refuse_upgrade(self) -> None:
        """The parser skips the body of a request that asks for another protocol."""
        scope: Any = self.scope
        scope[EXCHANGE] = exchange = self.door.begin(scope)
        exchange.refuse(MalformedRequest("Upgrade: send requests of HTTP/1.1 without this header"))
        self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Without a body the header is ignored; the parser would stop at it."""
        self.renew_parser()

    # large bodies

    def begin_body(self) -> None:
        """Book the room of a large body."""
        scope: Any = self.scope
        scope[EXCHANGE] = exchange = self.door.begin(scope)
        self.body = exchange.body = self.door.book(exchange)
        if self.body is not None and self.cycle.waiting_for_100_continue:
            self.cycle.waiting_for_100_continue = False
            self.transport.write(CONTINUE)

    def end_body(self) -> None:
        """The body is whole; the parser has not seen its end."""
        self.transport.set_protocol(self)
        self.renew_parser()
        self.on_message_complete()

    def renew_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # errors of HTTP

    def send_400_response(self, msg: str) -> None:
        self.refuse(MalformedRequest(f"not an HTTP/1.1 request: {msg}"))

    def refuse_head(self, limit: int) -> None:
        self.refuse(
            HeadersTooLarge(
                f"the request line and headers pass {limit} bytes: send fewer, or raise "
                "server.max_header_bytes"
            )
        )

    def refuse(self, error: AttndError) -> None:
        """Respond to bytes that are no request, and close."""
        defaults = self.server_state.default_headers
        self.transport.write(problem_bytes(self.door, error, self.client, defaults))
        self.transport.close()


class Receiver(asyncio.BufferedProtocol):
    """Takes a connection's place while its body arrives."""

    def __init__(self, connection: Connection, body: Body) -> None:
        self.connection = connection
        self.body = body
        self.budget = connection.door.read_budget

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.budget.room(self.body.room())

    def buffer_updated(self, nbytes: int) -> None:
        self.body.got(nbytes)
        if self.body.is_complete:
            self.connection.end_body()
        if nbytes >= LEAST_BYTES and self.budget.is_spent(nbytes, self.connection.resume_reading):
            self.connection.transport.pause_reading()

    def eof_received(self) -> None:
        """The body will not come whole: the transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()
