"""One request and its answer: the headers that matter, its clock, and its answer's head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Final

from attnd.wire.frames import NO_STAGES
from attnd.wire.slots import ALIGNMENT

from service.doors.http.protocol.bodies import Body
from service.doors.http.protocol.heads import Head, Headers, Said
from service.doors.kit.headers import call_id_of, request_id_of, server_timing
from service.errors import AttndError, InvalidRequest, UnsupportedMediaType
from service.tenants import OPEN

if TYPE_CHECKING:
    from service.doors.http.protocol.connection import Connection

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
MAX_DIGITS: Final = 12
DEADLINE_HEADER: Final = "X-Attnd-Deadline-Ms"
MIN_DEADLINE_MS: Final = 1.0
MAX_DEADLINE_MS: Final = 3_600_000.0
NOTHING_SAID: Final = Said()
LEAD_BYTES: Final = 256
"""Room before a body that begins with JSON: the image's header may be longer than that."""
NO_BODY: Final = frozenset({204, 304})
STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class Exchange:
    """What is known of a request from its head, and what is told about it at the end."""

    __slots__ = (
        "body",
        "code",
        "connection",
        "deadline_us",
        "expects_continue",
        "filler",
        "head",
        "is_answered",
        "is_gone",
        "keep_alive",
        "method",
        "op",
        "path",
        "peer",
        "query",
        "refusal",
        "request_id",
        "said",
        "seconds",
        "stages",
        "started",
        "status",
        "tenant",
    )

    def __init__(self, head: Head | None, peer: str) -> None:
        """`head` None: what came was no request."""
        self.started = perf_counter()
        self.seconds = 0.0
        self.op = "unknown"
        self.status = 0
        self.code = "ok"
        self.peer = peer
        self.stages: Sequence[float] = NO_STAGES
        self.connection: Connection | None = None
        self.body: Body | None = None
        self.is_answered = self.is_gone = False
        self.tenant = OPEN
        self.refusal: AttndError | None = None
        """Why it has no tenant: only endpoints that need no key answer it."""
        self.deadline_us = 0
        self.filler = b""
        """What an answer that goes on may have between its parts, and means nothing."""
        self.head = head
        self.method = head.method if head else "-"
        self.path = head.target.path if head else "-"
        self.query = head.target.query if head else b""
        self.keep_alive = head.keep_alive if head else False
        said = head.said if head else NOTHING_SAID
        self.said = said
        self.expects_continue = said.expects_continue
        self.request_id = request_id_of(head.request_id if head else b"")

    @property
    def traceparent(self) -> bytes:
        """The caller's trace; empty when it has none."""
        return self.said.traceparent

    @property
    def call_id(self) -> bytes:
        """The request id as the road has it."""
        return call_id_of(self.request_id)

    @property
    def lead(self) -> int:
        """Bytes to leave free before the body, so that the tensors behind its JSON lie aligned and
        an image's header has room before them; 0 when it has no such parts."""
        digits = self.said.inference_header
        if not digits.isdigit() or len(digits) > MAX_DIGITS:
            return 0
        return LEAD_BYTES + -int(digits) % ALIGNMENT

    def read_deadline(self) -> None:
        """Take in how long the operation may wait, when the client says so."""
        if self.said.deadline is None:
            return
        try:
            milliseconds = float(self.said.deadline)
        except ValueError:
            milliseconds = math.nan
        if not MIN_DEADLINE_MS <= milliseconds <= MAX_DEADLINE_MS:
            rule = f"must be milliseconds, {MIN_DEADLINE_MS:.0f} to {MAX_DEADLINE_MS:.0f}"
            raise InvalidRequest(DEADLINE_HEADER, self.said.deadline.decode("latin-1"), rule)
        self.deadline_us = int(milliseconds * 1e3)

    def media_type(self, known: Sequence[str]) -> str:
        """The request's media type, one of `known`; raises UnsupportedMediaType."""
        given = self.said.content_type.split(b";", 1)[0].strip().lower().decode("latin-1")
        if given not in known:
            told = f"Content-Type is {given[:100] or 'not given'}: send {' or '.join(known)}"
            raise UnsupportedMediaType(told, supported=list(known))
        self.check_encoding()
        return given

    def check_encoding(self) -> None:
        """The body is as it is; raises UnsupportedMediaType."""
        if self.said.content_encoding not in (b"", b"identity"):
            encoding = self.said.content_encoding.decode("latin-1")[:100]
            raise UnsupportedMediaType(f"Content-Encoding is {encoding}: send the body as it is")

    def answer_type(self, given: str) -> str:
        """The media type of the answer: what Accept names first, else that of the request."""
        accept = self.said.accept
        if not accept or accept == b"*/*":
            return given
        for part in accept.lower().split(b","):
            name = part.split(b";", 1)[0].strip()
            if name == b"application/json":
                return JSON
            if name == b"application/vnd.safetensors":
                return SAFETENSORS
        return given

    def answer_head(self, status: int, length: int | None, date: bytes, headers: Headers) -> bytes:
        """Status line and headers of the answer, with those that every answer carries; `length`
        None: nobody knows it yet."""
        more = b"".join([b"%b: %b\r\n" % header for header in headers])
        if length is not None and status not in NO_BODY:
            more += b"content-length: %d\r\n" % length
        if not self.keep_alive:
            more += b"connection: close\r\n"
        if self.said.traceparent:
            more += b"traceparent: %b\r\n" % self.said.traceparent
        return b"%b%bx-request-id: %b\r\nserver-timing: %b\r\ndate: %b\r\n\r\n" % (
            STATUS_LINES[status],
            more,
            self.request_id,
            server_timing(self.stages),
            date,
        )

    def end(self, status: int, code: str) -> None:
        """The answer is out: stop the clock, and let go of what only the answer needed."""
        self.seconds = perf_counter() - self.started
        self.status = status
        self.code = code
        if self.body is not None:
            self.body.release()
        self.body = self.head = self.connection = None
