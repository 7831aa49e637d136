"""The receiving side of a connection: heads and bodies, one request after another.

Nothing of the next request is looked at before the one before it has been answered, so what is
wrong with one never meets the answer to another; what a client sends ahead waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from config.server import ServerSettings
from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.chunks import Chunks
from service.doors.http.protocol.heads import Head, HeadParser, SeenHead
from service.errors import AttndError, MalformedRequest

AHEAD_BYTES: Final = 64 * 2**10
"""How much a client may send ahead of its turn before nothing more is read from it."""
DISCARD_BYTES: Final = 256 * 2**10
"""Rest of a refused body that is still read, to keep the connection."""


class Intake:
    """What has come and is not answered. `is_held`: no further request may begin."""

    __slots__ = (
        "ahead",
        "body",
        "direct",
        "is_held",
        "limits",
        "on_head",
        "parser",
        "rest",
        "seen",
    )

    def __init__(self, limits: ServerSettings, on_head: Callable[[Head, Body], None]) -> None:
        self.limits = limits
        self.on_head = on_head
        self.parser: HeadParser | None = None
        """Of a head that has begun."""
        self.seen: SeenHead | None = None
        """The last head that came whole."""
        self.body: Body | None = None
        """Of the request whose head was read last, until it is answered."""
        self.direct: Body | None = None
        """The body whose slot the next bytes go to, past this object."""
        self.rest = 0
        """Bytes of a refused body that are still to be passed over."""
        self.ahead = b""
        self.is_held = False

    @property
    def is_underway(self) -> bool:
        """Whether a part of a request has come, and the rest has not."""
        body = self.body
        return body is not None and not body.complete if self.parser is None else True

    @property
    def is_blocked(self) -> bool:
        """Whether more bytes would only be in the way."""
        body = self.body
        if body is not None and not body.complete and not body.is_open:
            return True
        return len(self.ahead) > AHEAD_BYTES

    def read(self, data: bytearray | bytes, begin: int, end: int) -> None:
        """Take in `data[begin:end]`. Raises MalformedRequest and HeadersTooLarge for a head; what
        is wrong with a body fails the body."""
        while begin < end:
            body = self.body
            if self.rest:
                used = min(self.rest, end - begin)
                self.rest -= used
                begin += used
            elif body is not None and not body.complete and body.is_open:
                begin += feed(body, memoryview(data)[begin:end])
                self.look_at(body)
            elif body is None and not self.is_held:
                begin = self.read_head(data, begin, end)
            else:
                self.ahead += bytes(memoryview(data)[begin:end])
                return

    def read_head(self, data: bytearray | bytes, begin: int, end: int) -> int:
        """The first byte that is not the head's."""
        parser, seen = self.parser, self.seen
        found = seen.again(data, begin, end) if seen is not None and parser is None else None
        if found is None:
            if parser is None:
                limits = self.limits
                parser = HeadParser(limits.max_header_bytes, limits.max_header_count)
                self.parser = parser
            stop = parser.feed(data, begin, end)
            if stop is None:
                return end
            found, self.parser = (parser.head(), stop), None
            if parser.scanned == stop - begin:
                self.seen = SeenHead.of(bytes(data[begin:stop]), found[0])
        head, after = found
        self.body = body = body_of(head, self.limits)
        self.on_head(head, body)
        self.look_at(body)
        return after

    def look_at(self, body: Body) -> None:
        """Where the next bytes go."""
        straight = body.declared is not None and not body.complete and body.is_open
        self.direct = body if straight else None

    def go_on(self) -> None:
        """What has come ahead may be looked at now."""
        if self.body is not None:
            self.look_at(self.body)
        data, self.ahead = self.ahead, b""
        self.read(data, 0, len(data))

    def keeps_step(self, must_close: bool) -> bool:
        """Called when the request is about to be answered: whether the next one can be found.
        What is left of its body is passed over then, if that is not too much."""
        body = self.body
        self.direct = None
        if body is None or body.complete:
            return True
        if must_close or body.declared is None or body.failure or body.left > DISCARD_BYTES:
            return False
        self.rest = body.left
        return True

    def answered(self) -> None:
        """The request has been answered: the next one may begin."""
        self.body = None


def feed(body: Body, data: memoryview) -> int:
    """Hand bytes to a body; how many were its own. A broken one takes them all."""
    try:
        return body.feed(data)
    except AttndError as error:
        body.fail(error)
        return len(data)


def body_of(head: Head, limits: ServerSettings) -> Body:
    """The body that the head announces. llhttp has checked that it does so in one way only."""
    said = head.said
    encoding = said.transfer_encoding
    if encoding is None:
        return Body(said.content_length, None, limits.max_body_bytes)
    body = Body(None, Chunks(limits.max_header_bytes), limits.max_body_bytes)
    if encoding.strip().lower() != b"chunked":
        told = encoding.decode("latin-1")[:100]
        body.fail(MalformedRequest(f"Transfer-Encoding is {told}: send chunked, or none"))
    return body
