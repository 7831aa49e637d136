"""Request heads: parsed by llhttp, within the limits on their bytes and lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

import httptools

from service.doors.kit.headers import REQUEST_ID, traceparent_of
from service.errors import AttndError, HeadersTooLarge, MalformedRequest

END: Final = b"\r\n\r\n"
REMEMBERED_BYTES: Final = 128
"""Longest target whose parts are remembered."""
SEEN_BYTES: Final = 1024
"""Longest head that a connection remembers."""
REQUEST_ID_LINE: Final = re.compile(rb"\r\nx-request-id:[ \t]*([\x21-\x7e]+)[ \t]*(?=\r\n)", re.I)
SCHEMES: Final = (b"http", b"https")
AUTHORITY_END: Final = re.compile(rb"[/?#]")
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a request's target."""

    path: str
    raw_path: bytes
    query: bytes
    authority: bytes = b""
    """Of a target that is a whole URL: it stands in place of the header Host (RFC 9112, 3.2.2)."""


@dataclass(slots=True)
class Said:
    """The headers that matter to a door. Of `accept`, `traceparent` and the request id, which
    decide nothing that matters to others, the last."""

    host: bytes | None = None
    origin: bytes | None = None
    content_length: int = 0
    transfer_encoding: bytes | None = None
    content_type: bytes = b""
    content_encoding: bytes = b""
    accept: bytes = b""
    authorization: bytes = b""
    traceparent: bytes = b""
    deadline: bytes | None = None
    """Milliseconds, as the client wrote them."""
    inference_header: bytes = b""
    """How long the JSON is before the binary data of an inference request."""
    expects_continue: bool = False


@dataclass(slots=True)
class Head:
    """A request's first line and headers, their names in lower case. `request_id` as it was given,
    which may be empty or of no use."""

    method: str
    target: Target
    headers: Headers
    is_http_11: bool
    keep_alive: bool
    said: Said
    request_id: bytes


ONCE: Final = frozenset(
    {
        *(b"host", b"origin", b"authorization", b"expect", b"last-event-id"),
        *(b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"),
        *(b"x-attnd-deadline-ms", b"inference-header-content-length"),
    }
)
"""Headers that decide something: what stands before this service may read another of two."""


def check_once(headers: Headers) -> None:
    """Raises MalformedRequest for a header of `ONCE` that comes twice."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in ONCE:
            if name in seen:
                raise MalformedRequest(f"the header {name.decode()} is given twice: send it once")
            seen.add(name)


def said_in(headers: Headers) -> tuple[Said, bytes]:
    """What headers say, and the request id. Raises MalformedRequest for one that comes twice."""
    said, request_id = Said(), b""
    if len(dict(headers)) < len(headers):
        check_once(headers)
    for name, value in headers:
        match name:
            case b"host":
                said.host = value
            case b"origin":
                said.origin = value
            case b"content-length":
                said.content_length = int(value)
            case b"transfer-encoding":
                said.transfer_encoding = value
            case b"content-type":
                said.content_type = value
            case b"content-encoding":
                said.content_encoding = value
            case b"accept":
                said.accept = value
            case b"authorization":
                said.authorization = value
            case b"traceparent":
                said.traceparent = traceparent_of(value)
            case b"x-request-id":
                request_id = value
            case b"x-attnd-deadline-ms":
                said.deadline = value
            case b"inference-header-content-length":
                said.inference_header = value
            case b"expect":
                said.expects_continue = value.lower() == b"100-continue"
    return said, request_id


class SeenHead:
    """A head that may come again, byte by byte, but for a request id of the same length: clients
    send most of theirs over and over."""

    __slots__ = ("_after", "_at", "_before", "_head", "_index", "_length")

    def __init__(self, raw: bytes, head: Head, found: re.Match[bytes] | None) -> None:
        """`found`: where `raw` has its request id, in the first group."""
        start, end = (len(raw), len(raw)) if found is None else found.span(1)
        self._before, self._after = raw[:start], raw[end:]
        self._at = end
        self._length = len(raw)
        self._head = head
        names = [name for name, _ in head.headers]
        self._index = -1 if found is None else names.index(b"x-request-id")

    @classmethod
    def of(cls, raw: bytes, head: Head) -> SeenHead | None:
        """None for one that is long, or has several ids."""
        found = list(REQUEST_ID_LINE.finditer(raw))
        ids = [value for name, value in head.headers if name == b"x-request-id"]
        if len(raw) > SEEN_BYTES or ids != [match[1] for match in found] or len(ids) > 1:
            return None
        return cls(raw, head, found[0] if found else None)

    def again(self, data: bytearray | bytes, begin: int, end: int) -> tuple[Head, int] | None:
        """The head that `data[begin:end]` begins with, and the first byte after it; None where it
        is another one, or not whole."""
        after, start = begin + self._length, begin + len(self._before)
        if after > end or not data.startswith(self._before, begin):
            return None
        head = self._head
        if self._index < 0:
            return head, after
        if not data.startswith(self._after, begin + self._at):
            return None
        given = bytes(data[start : begin + self._at])
        if not REQUEST_ID.fullmatch(given):
            return None
        headers = head.headers.copy()
        headers[self._index] = (b"x-request-id", given)
        return (
            Head(
                head.method,
                head.target,
                headers,
                head.is_http_11,
                head.keep_alive,
                head.said,
                given,
            ),
            after,
        )


class HeadParser:
    """Reads one head, in as many pieces as it comes. Bodies never come here."""

    __slots__ = (
        "done",
        "headers",
        "keep_alive",
        "max_bytes",
        "max_lines",
        "parser",
        "scanned",
        "tail",
        "url",
    )

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        self.max_bytes = max_bytes
        self.max_lines = max_lines
        self.headers: Headers = []
        self.url = b""
        self.done = self.keep_alive = False
        self.tail = b""
        """The last bytes that came: an end may be cut by the pieces."""
        self.scanned = 0
        self.parser = httptools.HttpRequestParser(self)

    @property
    def started(self) -> bool:
        """Whether any byte of a head has come."""
        return self.scanned > 0

    def feed(self, data: bytearray | bytes, begin: int, end: int) -> int | None:
        """Take in `data[begin:end]`. When the head ends there: the first byte after it, else None.

        Raises MalformedRequest and HeadersTooLarge.
        """
        while begin < end and not self.done:
            stop = self.end_of_lines(data, begin, end)
            self.scanned += stop - begin
            if self.scanned > self.max_bytes:
                raise HeadersTooLarge(
                    f"the request line and headers pass {self.max_bytes} bytes: send fewer, or "
                    "raise server.max_header_bytes"
                )
            piece = bytes(memoryview(data)[begin:stop])
            self.run(piece)
            if not self.done:
                self.tail = (self.tail + piece)[1 - len(END) :]
            begin = stop
        return begin if self.done else None

    def end_of_lines(self, data: bytearray | bytes, begin: int, end: int) -> int:
        """The first byte after an empty line, which may have begun in an earlier piece; or `end`.

        Empty lines may also come before a request.
        """
        if self.tail:
            joined = self.tail + bytes(memoryview(data)[begin : min(end, begin + len(END) - 1)])
            if (found := joined.find(END)) >= 0:
                return begin + found + len(END) - len(self.tail)
        found = data.find(END, begin, end)
        return end if found < 0 else found + len(END)

    def run(self, piece: bytes) -> None:
        """Hand a piece to llhttp; what it refuses is no HTTP."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here: the request is answered as it is
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, AttndError):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError as error:
            raise MalformedRequest(f"this is no HTTP/1.1 request: {error}") from None

    def head(self) -> Head:
        """The head, when `done`. Raises MalformedRequest for a version or target of no use."""
        parser = self.parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise MalformedRequest(f"HTTP/{version}: this service speaks HTTP/1.1")
        split = split_target if len(self.url) <= REMEMBERED_BYTES else split_target.__wrapped__
        said, request_id = said_in(self.headers)
        if version == "1.1" and not said.host:
            raise MalformedRequest("HTTP/1.1 asks for the header Host: send the service's name")
        if version == "1.0" and said.transfer_encoding is not None:
            raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding: send Content-Length")
        target = split(self.url)
        if target.authority:
            said.host = target.authority
        return Head(
            method=parser.get_method().decode("ascii"),
            target=target,
            headers=self.headers,
            is_http_11=version == "1.1",
            keep_alive=version == "1.1" and self.keep_alive,
            said=said,
            request_id=request_id,
        )

    # what llhttp calls

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        if len(self.headers) > self.max_lines:
            raise HeadersTooLarge(
                f"more than {self.max_lines} headers: send fewer, or raise server.max_header_count"
            )

    def on_headers_complete(self) -> None:
        self.keep_alive = self.parser.should_keep_alive()  # forgotten at the end of the message
        self.done = True


@lru_cache(maxsize=1024)
def split_target(url: bytes) -> Target:
    """Path and query of a request's target; requests repeat theirs."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise MalformedRequest(f"the request's target {url[:100]!r} is no path") from None
    raw_path = parsed.path or b"/"
    path = raw_path.decode("latin-1")
    path = unquote(path) if "%" in path else path
    if not path.isprintable():
        raise MalformedRequest(f"the path {path[:100]!r} has a control character: leave it out")
    authority = b""
    if parsed.schema is not None:
        if parsed.schema.lower() not in SCHEMES:
            raise MalformedRequest(f"the request's target {url[:100]!r} is no http URL")
        authority = AUTHORITY_END.split(url.partition(b"://")[2], 1)[0]
    return Target(path, raw_path, parsed.query or b"", authority)
