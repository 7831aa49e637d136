"""`ResponseReader`: bytes of one connection become responses, without any input or output.

The head is read by httptools (llhttp). A body of known length is received straight into the array
that the answer's own arrays are views of.
"""

from __future__ import annotations

from typing import Final

import httptools
import numpy as np

from attnd.errors import ProtocolError, ReplyLost
from attnd.http.messages import Response
from attnd.wire.images import Bytes

SCRATCH_BYTES: Final = 16 * 1024
"""Received at once before the length is known: a small answer comes whole in one call."""
MAX_HEAD_BYTES: Final = 64 * 1024


class Parsing:
    """One response in httptools' parser, with the values of its callbacks."""

    __slots__ = ("chunks", "complete", "headers", "keep_alive", "parser", "status")

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.status = 0
        self.keep_alive = False
        self.complete = False
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, received: bytes | bytearray | memoryview) -> None:
        if self.parser is None:
            raise RuntimeError("bytes after the response was read: this is a bug")
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None  # an interrupt in a callback
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ProtocolError(f"the answer is not HTTP: {error}") from error

    def end(self) -> None:
        """Delete the parser: it and this refer to each other."""
        self.parser = None

    @property
    def length(self) -> int | None:
        """Bytes of the body; None where chunks or the connection's end delimit it."""
        if self.status in (204, 304):
            return 0
        length = self.headers.get("content-length")
        return None if length is None else int(length)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower().decode("ascii")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.parser is not None:
            self.status = self.parser.get_status_code()
            self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class ResponseReader:
    """Receive into `buffer()` and call `received` with the count, until it returns a response."""

    def __init__(self, unanswered: str = "") -> None:
        """`unanswered`: why a connection may be closed before its first answer."""
        self._unanswered = unanswered
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._have = 0
        self._parsing: Parsing | None = None
        self._body: Bytes | None = None
        self.reusable = True
        """Whether the connection may carry another request after the response last given."""

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._body is not None:
            return self._body.data[self._have :]
        if self._have == len(self._scratch):
            self._scratch = self._scratch + bytes(self._have)
            self._view = memoryview(self._scratch)
        return self._view[self._have :] if self._have else self._view

    def received(self, count: int) -> Response | None:
        """`count` bytes came into `buffer()`; raises `ProtocolError` when they are not HTTP."""
        self._have += count
        if self._body is not None:
            return self._finish(self._body) if self._have == len(self._body) else None
        if self._parsing is not None:
            return self._stream(self._parsing, 0)
        return self._read_head(max(0, self._have - count - 3))

    def ended(self) -> Response:
        """The other side closed; raises `ReplyLost` unless that is how this body ends."""
        parsing = self._parsing
        if parsing is None or self._body is not None or "transfer-encoding" in parsing.headers:
            if parsing is None and not self._have:
                raise ReplyLost(f"the connection was closed without an answer{self._unanswered}")
            raise ReplyLost("the connection was closed before the answer was whole")
        return self._finish(joined(parsing.chunks))

    def _read_head(self, searched: int) -> Response | None:
        while True:
            end = self._scratch.find(b"\r\n\r\n", searched, self._have) + 4
            if end < 4:
                if self._have >= MAX_HEAD_BYTES:
                    raise ProtocolError(f"the answer's head has more than {MAX_HEAD_BYTES} bytes")
                return None
            parsing = Parsing()
            parsing.feed(self._scratch[:end])
            if not 100 <= parsing.status < 200:
                break
            parsing.end()  # an interim answer: the real one follows it
            left = self._scratch[end : self._have]
            self._view[: len(left)] = left
            self._have, searched = len(left), 0
        self._parsing = parsing
        length = parsing.length
        if length is None:
            return self._stream(parsing, end)
        rest = self._have - end
        if rest > length:
            raise ProtocolError(f"{rest - length} bytes follow an answer of {length}")
        body: Bytes = np.empty(length, np.uint8)
        body.data[:rest] = self._view[end : self._have]
        if rest == length:
            return self._finish(body)
        self._body = body
        self._have = rest
        return None

    def _stream(self, parsing: Parsing, begin: int) -> Response | None:
        """A body in chunks, or one that ends with the connection."""
        parsing.feed(self._view[begin : self._have])
        self._have = 0
        return self._finish(joined(parsing.chunks)) if parsing.complete else None

    def _finish(self, content: Bytes) -> Response:
        parsing = self._parsing
        if parsing is None:
            raise RuntimeError("a body without a head: this is a bug")
        parsing.end()
        self.reusable = parsing.keep_alive
        self._parsing = self._body = None
        self._have = 0
        self._unanswered = ""
        return Response(parsing.status, parsing.headers, content)


def joined(chunks: list[bytes]) -> Bytes:
    """Chunks as one array that may be written to."""
    return np.frombuffer(bytearray(b"".join(chunks)), np.uint8)
