"""One request and its response: the headers that matter, its clock, and the response's head."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from random import getrandbits
from typing import TYPE_CHECKING, Final

from attnd.wire.frames import NO_STAGES

from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.heads import Head, Headers
from service.doors.kit.headers import (
    JSON,
    PROBLEM,
    SAFETENSORS,
    deadline_us_of,
    server_timing,
)
from service.errors import AttndError, UnsupportedMediaType
from service.tenants import OPEN

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection

NO_HEADERS: Final = Headers()
NO_BODY: Final = frozenset({204, 304})
STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
CONTENT_TYPES: Final = {
    name: f"content-type: {name}\r\n".encode() for name in (SAFETENSORS, JSON, PROBLEM)
}
"""The header line for each media type."""


class Exchange:
    """The facts in a request's head, and how the request ended."""

    def __init__(self, head: Head | None, request_id: bytes, peer: str) -> None:
        """`head` None: the bytes were not a request. An empty `request_id` is replaced."""
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.op = "unknown"
        self.status = 0
        self.code = "ok"
        self.peer = peer
        self.stages: Sequence[float] = NO_STAGES
        self.connection: Connection | None = None
        self.body: Body | None = None
        self.is_answered = self.is_disconnected = self.is_running = False
        self.tenant = OPEN
        self.refusal: AttndError | None = None
        """Why the request has no tenant: only endpoints without a key respond."""
        self.deadline_us = 0
        self.filler = b""
        """Meaningless bytes that may come between the parts of a streamed response."""
        self.request_id = request_id or b"%032x" % getrandbits(128)
        self.head = head
        if head is None:
            self.method, self.path, self.query = "-", "-", b""
            self.keep_alive = self.expects_continue = False
            self.headers = NO_HEADERS
        else:
            self.method, self.path, self.query = head.method, head.target.path, head.target.query
            self.keep_alive, self.headers = head.keep_alive, head.headers
            self.expects_continue = head.headers.expects_continue
        self.traceparent = self.headers.traceparent

    def read_deadline(self) -> None:
        """Set `deadline_us` from the header. Raises InvalidRequest."""
        if self.headers.deadline is not None:
            self.deadline_us = deadline_us_of(self.headers.deadline)

    def check_media_type(self, known: Sequence[str]) -> None:
        """Raises UnsupportedMediaType for a body of another media type, or an encoded one."""
        given = self.headers.media_type
        if given not in known:
            text = f"Content-Type is {given[:100] or 'missing'}: send {' or '.join(known)}"
            raise UnsupportedMediaType(text, supported=list(known))
        self.check_encoding()

    def check_encoding(self) -> None:
        """Raises UnsupportedMediaType for an encoded body."""
        if self.headers.content_encoding:
            encoding = self.headers.content_encoding.decode("latin-1")[:100]
            raise UnsupportedMediaType(f"Content-Encoding is {encoding}: send the body unencoded")

    def refuse(self, error: AttndError) -> None:
        """Set the refusal, without the frames that raised it: they refer to this exchange, and only
        a garbage collection would free both."""
        self.refusal = error.with_traceback(None)

    def response_head(self, status: int, length: int | None, date: bytes, headers: bytes) -> bytes:
        """Status line and headers: `headers`, whole lines, and the lines of every response.
        `length` None: not known yet."""
        if length is not None and status not in NO_BODY:
            headers += b"content-length: %d\r\n" % length
        if not self.keep_alive:
            headers += b"connection: close\r\n"
        if self.traceparent:
            headers += b"traceparent: %b\r\n" % self.traceparent
        return b"%b%bx-request-id: %b\r\nserver-timing: %b\r\ndate: %b\r\n\r\n" % (
            STATUS_LINES[status],
            headers,
            self.request_id,
            server_timing(self.stages),
            date,
        )
