"""The blocking transport: keep-alive connections over TCP, TLS or a Unix socket, for any thread."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from struct import Struct
from typing import Final, Protocol

from attnd.errors import ConnectionFailed, ReplyLost, TimedOut
from attnd.http.messages import Request, Response
from attnd.http.origin import KEEP_IDLE_S, MAX_CONNECTIONS, Origin, no_connection
from attnd.http.responses import ResponseReader
from attnd.retries import remaining
from attnd.wire.dtypes import Part

TIMEVAL: Final = Struct("ll")
MAX_PARTS: Final = 16
"""Buffers in one system call."""


class Transport(Protocol):
    """How `Client` sends requests. `send` raises `ConnectionFailed`, `ReplyLost` or `TimedOut`."""

    def send(self, request: Request) -> Response: ...

    def close(self) -> None: ...


class SocketTransport:
    """Connections to one origin. The one that was used last is used next; idle ones expire."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._idle: deque[Connection] = deque()
        self._closed = False
        self._begin_process()

    def _begin_process(self) -> None:
        """Connections at a fork belong to the parent: two readers would mix up their answers."""
        self._pid = os.getpid()
        inherited, self._idle = self._idle, deque()
        for connection in inherited:
            connection.close()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(MAX_CONNECTIONS):
            self._room.put(None)

    def send(self, request: Request) -> Response:
        """One attempt, from a connection to the whole answer, within `request.timeout_s`."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._pid != os.getpid():
            self._begin_process()
        ends = time.monotonic() + request.timeout_s
        try:
            self._room.get(timeout=request.timeout_s)
        except Empty as error:
            raise ConnectionFailed(
                f"{MAX_CONNECTIONS} calls are in flight, and none ended in time"
            ) from error
        try:
            return self._send(request, ends)
        finally:
            self._room.put(None)

    def _send(self, request: Request, ends: float) -> Response:
        parts = (self._origin.head(request), *request.body)
        connection = self._take()
        if connection is None or not connection.write(parts, ends):
            # None idle, or it was closed before a byte of this request went out.
            connection = Connection(self._origin, ends)
            if not connection.write(parts, ends):
                raise ConnectionFailed(f"{self._origin} closed the connection at once")
        response = connection.read(ends)
        if connection.reusable and not self._closed:
            connection.idle_since = now = time.monotonic()
            self._idle.append(connection)
            with suppress(IndexError):  # other threads may take it
                if now - self._idle[0].idle_since >= KEEP_IDLE_S:
                    self._idle.popleft().close()
        else:
            connection.close()
        return response

    def _take(self) -> Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_good():
                return connection
            connection.close()

    def close(self) -> None:
        """Close the idle connections; calls under way close theirs when they end."""
        self._closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class Connection:
    """One connection, made within the time given. Anything raised here leaves it closed."""

    def __init__(self, origin: Origin, ends: float) -> None:
        self.idle_since = 0.0
        self._reader = ResponseReader(origin.unanswered)
        self._cut_short = False
        self._tls = origin.context is not None
        self._socket = connect(origin, ends)
        self._read_timeout_s = 0.0
        if not self._tls:  # the system's own timeout: Python's would cost a call of it each time
            self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    @property
    def reusable(self) -> bool:
        """Whether another request may follow the answer just read."""
        return self._reader.reusable and not self._cut_short

    def is_good(self) -> bool:
        """Whether it is young enough, and nothing came on it, not even its end."""
        return time.monotonic() - self.idle_since < KEEP_IDLE_S and not self._poll.poll(0)

    def write(self, parts: Sequence[Part], ends: float) -> bool:
        """Send all parts; False when the connection was closed before anything was sent.

        An answer that comes before all was sent (a refusal) ends the sending.
        """
        sent = 0
        try:
            if self._tls:
                self._socket.settimeout(remaining(ends))
                self._socket.sendall(b"".join(parts))
                return True
            while True:
                try:
                    count = self._socket.sendmsg(parts[:MAX_PARTS], (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    count = 0
                sent += count
                parts = unsent(parts, count)
                if not parts:
                    return True
                if self._answers_early(ends):
                    self._cut_short = True
                    return True
        except TimeoutError as error:
            self.close()
            raise TimedOut(f"timed out after {sent} bytes of the request") from error
        except OSError:
            if sent == 0:
                self.close()
                return False
            self._cut_short = True  # it may have answered before it closed
            return True
        except BaseException:
            self.close()
            raise

    def _answers_early(self, ends: float) -> bool:
        """Wait until more can be sent; whether instead something came, a refusal or the end."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN | select.POLLOUT)
        events = waiting.poll(remaining(ends) * 1e3)
        if not events:
            raise TimeoutError("nothing more can be sent")
        return any(event & ~select.POLLOUT for _, event in events)

    def read(self, ends: float) -> Response:
        reader = self._reader
        try:
            while True:
                left = remaining(ends)
                if self._tls:
                    self._socket.settimeout(left)
                elif not left / 2 <= self._read_timeout_s <= left:
                    self._set_read_timeout(0.75 * left)
                try:
                    count = self._socket.recv_into(reader.buffer())
                except BlockingIOError:  # nothing came in that time
                    continue
                response = reader.received(count) if count else reader.ended()
                if response is not None:
                    return response
        except TimeoutError as error:
            self.close()
            raise TimedOut("no whole answer within the timeout") from error
        except OSError as error:
            self.close()
            raise ReplyLost(f"the connection broke: {error}") from error
        except BaseException:
            self.close()
            raise

    def _set_read_timeout(self, seconds: float) -> None:
        """Seconds after which a read gives up: less than the call's timeout, set again rarely."""
        self._read_timeout_s = seconds
        whole = int(seconds)
        packed = TIMEVAL.pack(whole, max(1, int(1e6 * (seconds - whole))))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)

    def close(self) -> None:
        self._socket.close()


def connect(origin: Origin, ends: float) -> socket.socket:
    """A connected socket; raises `ConnectionFailed`."""
    with ExitStack() as undo:
        try:
            if origin.uds is not None:
                made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                made.settimeout(remaining(ends))
                made.connect(origin.uds)
            else:
                address = (origin.host, origin.port)
                made = undo.enter_context(socket.create_connection(address, remaining(ends)))
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.context is not None:
                made = origin.context.wrap_socket(made, server_hostname=origin.host)
        except OSError as error:
            raise no_connection(origin, error) from error
        undo.pop_all()
    return made


def unsent(parts: Sequence[Part], count: int) -> Sequence[Part]:
    """The rest of `parts` after `count` bytes."""
    if count == sum(map(len, parts)):
        return ()
    for i, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[i + 1 :]]
        count -= len(part)
    return ()
