"""The receiving side of a connection: heads and bodies, one request after another; and the limit of
bytes that all connections receive in a pass of the loop.

The next request is not parsed before the current one has its response, so an error in one never
mixes with the response to another. Bytes that a client sends ahead wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from config.server import ServerSettings
from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.chunks import Chunks
from service.doors.http.protocol.heads import Head, HeadParser, SeenHead
from service.errors import MalformedRequest

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection

AHEAD_BYTES: Final = 64 * 2**10
"""Bytes a client may send ahead before reading from it pauses."""
DISCARD_BYTES: Final = 256 * 2**10
"""Longest rest of a rejected body that is read and discarded, to keep the connection."""


class Intake:
    """Bytes that arrived and belong to no answered request. While `is_held`, no request begins."""

    def __init__(
        self, limits: ServerSettings, on_head: Callable[[Head, bytes, Body], None]
    ) -> None:
        """`on_head` gets a request's head, its request id (empty for none), and its body."""
        self.limits = limits
        self.on_head = on_head
        self.parser: HeadParser | None = None
        """Of a head that has begun."""
        self.seen: SeenHead | None = None
        """The last head that came whole."""
        self.body: Body | None = None
        """Of the request whose head was read last, until its response."""
        self.direct: Body | None = None
        """The body whose slot receives the next bytes, past this object."""
        self.rest = 0
        """Bytes of a rejected body that are still to be discarded."""
        self.ahead = b""
        self.is_held = False

    @property
    def is_underway(self) -> bool:
        """Whether a request has arrived in part."""
        body = self.body
        return self.parser is not None or (body is not None and not body.complete)

    @property
    def is_sliced(self) -> bool:
        """Whether bytes of an open body wait for the next pass of the loop."""
        return bool(self.ahead) and self.body is not None and self.body.is_open

    @property
    def is_blocked(self) -> bool:
        """Whether no more bytes can be used now."""
        if self.is_sliced:
            return True
        body = self.body
        if body is not None and not body.complete and not body.is_open:
            return True
        return len(self.ahead) > AHEAD_BYTES

    def read(self, data: bytearray | bytes, begin: int, end: int) -> None:
        """Use `data[begin:end]`. Raises MalformedRequest and HeadersTooLarge for a head; an error
        in a body fails the body."""
        while begin < end and not self.ahead:  # bytes that `resume` has yet to use come first
            body = self.body
            if self.rest:
                used = min(self.rest, end - begin)
                self.rest -= used
                begin += used
            elif body is None:
                if self.is_held:
                    break
                begin = self.read_head(data, begin, end)
            elif body.is_open:
                begin += body.feed(memoryview(data)[begin:end])
                if body.chunks is not None and body.is_open:
                    break
            else:
                break
        if begin < end:
            self.ahead += bytes(memoryview(data)[begin:end])
        body = self.body
        is_direct = body is not None and body.is_open and body.chunks is None
        self.direct = body if is_direct and not self.ahead else None

    def read_head(self, data: bytearray | bytes, begin: int, end: int) -> int:
        """Read a head; returns the first byte after it."""
        parser, seen, limits = self.parser, self.seen, self.limits
        found = seen.again(data, begin, end) if seen is not None and parser is None else None
        if found is not None and seen is not None:
            head = seen.head
            request_id, after = found
        else:
            if parser is None:
                parser = HeadParser(limits.max_header_bytes, limits.max_header_count)
                self.parser = parser
            stop = parser.feed(data, begin, end)
            if stop is None:
                return end
            head, request_id, after, self.parser = parser.head(), parser.request_id, stop, None
            parser.close()
            if parser.scanned == stop - begin:
                self.seen = SeenHead.of(bytes(data[begin:stop]), head, parser.request_ids)
        headers = head.headers
        if headers.transfer_encoding is None:
            body = Body(headers.content_length, None, limits.max_body_bytes)
        else:
            body = chunked_body(headers.transfer_encoding, limits)
        self.body = body
        self.on_head(head, request_id, body)
        return after

    def resume(self) -> None:
        """Read the bytes that came ahead."""
        data, self.ahead = self.ahead, b""
        self.read(data, 0, len(data))

    def close(self) -> None:
        """The connection has ended: no garbage collection is needed to free it."""
        if self.parser is not None:
            self.parser.close()
        self.parser = self.seen = None
        self.ahead = b""
        self.on_head = unexpected

    def can_continue(self, must_close: bool) -> bool:
        """Called before the response: whether the next request can be found. The rest of a body is
        discarded if it is short."""
        body = self.body
        self.direct = None
        if body is None or body.complete:
            return True
        if must_close or body.declared is None or body.failure or body.left > DISCARD_BYTES:
            return False
        self.rest = body.left
        return True


def unexpected(head: Head, request_id: bytes, body: Body) -> None:
    """A head after the connection's end."""


def chunked_body(encoding: bytes, limits: ServerSettings) -> Body:
    """A body of unknown length. llhttp has checked that its head declares only one length."""
    body = Body(None, Chunks(limits.max_header_bytes), limits.max_body_bytes)
    if encoding.lower() != b"chunked":
        text = encoding.decode("latin-1")[:100]
        body.fail(MalformedRequest(f"Transfer-Encoding is {text}: send chunked, or none"))
    return body


PASS_BYTES: Final = 2 * 2**20
"""Received in a pass, over all connections: some milliseconds, as new pages of shared memory are
slow to write."""
LEAST_BYTES: Final = 16 * 2**10
"""Received at once from each further connection in the same pass. Less is not counted."""


class ReadBudget:
    """Sixteen connections with 8 MiB each in the system's buffers would stall a loop for 0.2 s."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = PASS_BYTES
        self._paused: list[Connection] = []
        """Connections that have received their part of a pass."""

    def room(self, view: memoryview) -> memoryview:
        """The part of a body's room that may be filled now."""
        return view[: max(self._left, LEAST_BYTES)]

    def is_spent(self, nbytes: int, connection: Connection) -> bool:
        """Counts received bytes. If True the connection must pause until the next pass."""
        if self._left == PASS_BYTES:
            self._loop.call_soon(self._renew)
        self._left -= nbytes
        if self._left > 0:
            return False
        self._paused.append(connection)
        return True

    def _renew(self) -> None:
        self._left = PASS_BYTES
        paused, self._paused = self._paused, []
        for connection in paused:
            connection.read_again()
