"""The asyncio transport: keep-alive connections of one event loop."""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from contextlib import suppress
from typing import Final, Protocol, cast

from attnd.errors import ConnectionFailed, ProtocolError, ReplyLost, TimedOut
from attnd.http.messages import Request, Response
from attnd.http.origin import KEEP_IDLE_S, MAX_CONNECTIONS, Origin, no_connection
from attnd.http.responses import ResponseReader
from attnd.wire.dtypes import Part

JOINED_BYTES: Final = 64 * 1024
"""Requests up to this length are written in one piece."""
PIECE_BYTES: Final = 1 << 20
"""Bytes of a longer one written at a time, because the part that the system does not take at once
is copied."""


class AsyncTransport(Protocol):
    """How `AsyncClient` sends requests: `Transport`, awaited."""

    async def send(self, request: Request) -> Response: ...

    async def aclose(self) -> None: ...


class LoopTransport:
    """Connections to one origin. The one that was used last is used next; idle ones expire."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._idle: deque[Connection] = deque()
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    async def send(self, request: Request) -> Response:
        """One attempt, from a connection to the whole answer, within `request.timeout_s`."""
        if self._closed:
            raise RuntimeError("the client is closed")
        ends = time.monotonic() + request.timeout_s
        if self._under_way >= MAX_CONNECTIONS:
            await self._wait_for_room(request.timeout_s)
        self._under_way += 1
        try:
            return await self._send(request, ends)
        finally:
            self._under_way -= 1
            self._wake_one()

    async def _wait_for_room(self, timeout_s: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await turn
                except asyncio.CancelledError:
                    if not turn.cancelled():  # woken at the same time: another call goes on
                        self._wake_one()
                    raise
        except TimeoutError as error:
            raise ConnectionFailed(
                f"{MAX_CONNECTIONS} calls are in flight, and none ended in time"
            ) from error
        finally:
            with suppress(ValueError):
                self._waiting.remove(turn)

    def _wake_one(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _send(self, request: Request, ends: float) -> Response:
        connection = self._take()
        if connection is None:
            connection = await connect(self._origin, ends)
        response = await connection.exchange((self._origin.head(request), *request.body), ends)
        if connection.reusable and not self._closed:
            connection.idle_since = now = time.monotonic()
            self._idle.append(connection)
            if now - self._idle[0].idle_since >= KEEP_IDLE_S:
                self._idle.popleft().close()
        else:
            connection.close()
        return response

    def _take(self) -> Connection | None:
        """An idle connection of this loop that is still good."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.loop is loop and connection.is_good():
                return connection
            connection.close()
        return None

    async def aclose(self) -> None:
        """Close the idle connections; calls under way close theirs when they end."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn


class Connection(asyncio.BufferedProtocol):
    """One connection: asyncio receives straight into the reader's buffers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unanswered: str = "") -> None:
        self.loop = loop
        self.idle_since = 0.0
        self._reader = ResponseReader(unanswered)
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[Response] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._poll = select.poll()
        self._good = True

    @property
    def reusable(self) -> bool:
        """Whether another request may follow the answer just read."""
        return self._good and self._reader.reusable

    def is_good(self) -> bool:
        """Whether it is young enough, and nothing came on it, not even its end."""
        young = time.monotonic() - self.idle_since < KEEP_IDLE_S
        return self._good and young and not self._poll.poll(0)

    async def exchange(self, parts: tuple[Part, ...], ends: float) -> Response:
        """Send a request and await its answer; anything raised here leaves this closed."""
        answer: asyncio.Future[Response] = self.loop.create_future()
        self._answer = answer
        timer = self.loop.call_later(ends - time.monotonic(), self._expire)
        try:
            if sum([len(part) for part in parts]) <= JOINED_BYTES:
                self._transport.write(b"".join(parts))
            else:
                await self._write_pieces(parts, answer)
            return await answer
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._answer = None
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved, else asyncio logs it

    async def _write_pieces(
        self, parts: tuple[Part, ...], answer: asyncio.Future[Response]
    ) -> None:
        """Write as fast as the other side reads; an answer (a refusal) ends it."""
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), PIECE_BYTES):
                if self._writable is not None:
                    await asyncio.wait(
                        (self._writable, answer), return_when=asyncio.FIRST_COMPLETED
                    )
                if answer.done():
                    self._good = False
                    return
                self._transport.write(view[begin : begin + PIECE_BYTES])

    def _expire(self) -> None:
        self._fail(TimedOut("no whole answer within the timeout"))

    def _fail(self, error: BaseException) -> None:
        self._good = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """Close at once without sending waiting bytes; safe in another loop's thread."""
        self._good = False
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._transport.abort)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None:  # bytes without a request: the connection cannot be used any more
            self.close()
            return
        try:
            response = self._reader.received(nbytes)
        except ProtocolError as error:
            self._fail(error)
            return
        if response is not None and not self._answer.done():
            self._answer.set_result(response)

    def eof_received(self) -> None:
        self._good = False
        if self._answer is None or self._answer.done():
            return
        try:
            self._answer.set_result(self._reader.ended())
        except ReplyLost as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = ReplyLost(f"the connection broke: {exc or 'closed'}")
        lost.__cause__ = exc
        self._fail(lost)
        self.resume_writing()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None


async def connect(origin: Origin, ends: float) -> Connection:
    """A connection, made within the time given; raises `ConnectionFailed`."""
    loop = asyncio.get_running_loop()

    def make() -> Connection:
        return Connection(loop, origin.unanswered)

    try:
        async with asyncio.timeout(max(0.0, ends - time.monotonic())):
            if origin.uds is not None:
                _, connection = await loop.create_unix_connection(make, origin.uds)
            else:
                _, connection = await loop.create_connection(
                    make, origin.host, origin.port, ssl=origin.context
                )
    except OSError as error:
        raise no_connection(origin, error) from error
    return connection
