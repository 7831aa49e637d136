"""Request heads: parsed by llhttp, within the limits on their bytes and lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

import httptools

from service.doors.kit.headers import JSON, REQUEST_ID, SAFETENSORS, traceparent_of
from service.errors import AttndError, HeadersTooLarge, MalformedRequest

END: Final = b"\r\n\r\n"
REMEMBERED_BYTES: Final = 128
"""Longest target whose parts are cached."""
SEEN_BYTES: Final = 1024
"""Longest head that a connection caches."""
REQUEST_ID_LINE: Final = re.compile(rb"\r\nx-request-id:[ \t]*([\x21-\x7e]+)[ \t]*(?=\r\n)", re.I)
SCHEMES: Final = (b"http", b"https")
AUTHORITY_END: Final = re.compile(rb"[/?#]")
RawHeaders = list[tuple[bytes, bytes]]
LENGTH_DIGITS: Final = 20
"""Of `Content-Length`; llhttp accepts any number of zeros before it."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a request's target."""

    path: str
    raw_path: bytes
    query: bytes
    authority: bytes = b""
    """Of a target that is a whole URL: it replaces the header Host (RFC 9112, 3.2.2)."""


@dataclass(slots=True)
class Headers:
    """The headers that a door reads. Of `Accept` and `traceparent`, which may be repeated, the last
    one counts."""

    host: bytes | None = None
    origin: bytes | None = None
    content_length: int = 0
    transfer_encoding: bytes | None = None
    media_type: str = ""
    """`Content-Type` in lower case, without parameters."""
    content_encoding: bytes = b""
    """Empty for `identity`, too."""
    accepted: str = ""
    """The first of JSON and safetensors in `Accept`; empty: the media type of the request."""
    authorization: bytes = b""
    traceparent: bytes = b""
    deadline: bytes | None = None
    """Milliseconds, as the client wrote them."""
    expects_continue: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """A request's first line and headers. `raw_headers` has lower-case names, and no request id:
    heads that differ in the id only are one object."""

    method: str
    target: Target
    raw_headers: RawHeaders
    is_http_11: bool
    keep_alive: bool
    headers: Headers


ONCE: Final = frozenset(
    {
        *(b"host", b"origin", b"authorization", b"expect", b"last-event-id"),
        *(b"content-length", b"transfer-encoding", b"content-type", b"content-encoding"),
        b"x-attnd-deadline-ms",
    }
)
"""Headers that must not be repeated: a proxy in front may read another one of the two."""


def check_once(raw: RawHeaders) -> None:
    """Raises MalformedRequest for a header of `ONCE` that is repeated."""
    seen: set[bytes] = set()
    for name, _ in raw:
        if name in ONCE:
            if name in seen:
                raise MalformedRequest(f"the header {name.decode()} is given twice: send it once")
            seen.add(name)


def read_headers(raw: RawHeaders) -> Headers:
    """Raises MalformedRequest for a header that is repeated and must not be, and for a length that
    is not a short number."""
    found = Headers()
    if len(dict(raw)) < len(raw):
        check_once(raw)
    for name, value in raw:
        match name:
            case b"host":
                found.host = value
            case b"origin":
                found.origin = value
            case b"content-length":
                if len(value) > LENGTH_DIGITS:
                    text = f"Content-Length has {len(value)} digits: send {LENGTH_DIGITS} at most"
                    raise MalformedRequest(text)
                found.content_length = int(value)
            case b"transfer-encoding":
                found.transfer_encoding = value
            case b"content-type":
                found.media_type = value.split(b";", 1)[0].strip().lower().decode("latin-1")
            case b"content-encoding":
                found.content_encoding = b"" if value.lower() == b"identity" else value
            case b"accept":
                found.accepted = first_accepted(value)
            case b"authorization":
                found.authorization = value
            case b"traceparent":
                found.traceparent = traceparent_of(value)
            case b"x-attnd-deadline-ms":
                found.deadline = value
            case b"expect":
                found.expects_continue = value.lower() == b"100-continue"
    return found


def first_accepted(accept: bytes) -> str:
    """The first media type of `Accept` that operations answer in; empty for none."""
    for part in accept.lower().split(b","):
        name = part.split(b";", 1)[0].strip().decode("latin-1")
        if name in (JSON, SAFETENSORS):
            return name
    return ""


class SeenHead:
    """A head that may come again, byte by byte but for a request id of the same length: clients
    repeat most of their heads."""

    def __init__(self, raw: bytes, head: Head, found: re.Match[bytes] | None) -> None:
        """`found`: where `raw` has its request id, in the first group."""
        start, end = (len(raw), len(raw)) if found is None else found.span(1)
        self._before, self._after = raw[:start], raw[end:]
        self._at = end
        self._length = len(raw)
        self._has_id = found is not None
        self.head = head

    @classmethod
    def of(cls, raw: bytes, head: Head, request_ids: Sequence[bytes]) -> SeenHead | None:
        """None for a long head, or one with several request ids."""
        found = list(REQUEST_ID_LINE.finditer(raw))
        is_found = list(request_ids) == [match[1] for match in found]
        if len(raw) > SEEN_BYTES or not is_found or len(found) > 1:
            return None
        return cls(raw, head, found[0] if found else None)

    def again(self, data: bytearray | bytes, begin: int, end: int) -> tuple[bytes, int] | None:
        """If `data[begin:end]` begins with this head: the request id, empty for none, and the first
        byte after the head. None for another head, or a part of one."""
        after = begin + self._length
        if after > end or not data.startswith(self._before, begin):
            return None
        if not self._has_id:
            return b"", after
        if not data.startswith(self._after, begin + self._at):
            return None
        given = bytes(data[begin + len(self._before) : begin + self._at])
        return (given, after) if REQUEST_ID.fullmatch(given) else None


class HeadParser:
    """Reads one head, in any number of pieces. Bodies never come here."""

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        self.max_bytes = max_bytes
        self.max_lines = max_lines
        self.headers: RawHeaders = []
        self.request_ids: list[bytes] = []
        self.url = b""
        self.done = self.keep_alive = False
        self.tail = b""
        """The last bytes of earlier pieces: the end of the head may be split over pieces."""
        self.scanned = 0
        self.parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytearray | bytes, begin: int, end: int) -> int | None:
        """Read `data[begin:end]`; returns the first byte after the head, or None before its end.

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
        """The first byte after an empty line, which may begin in an earlier piece; else `end`.

        Empty lines may also precede a request.
        """
        if self.tail:
            joined = self.tail + bytes(memoryview(data)[begin : min(end, begin + len(END) - 1)])
            if (found := joined.find(END)) >= 0:
                return begin + found + len(END) - len(self.tail)
        found = data.find(END, begin, end)
        return end if found < 0 else found + len(END)

    def run(self, piece: bytes) -> None:
        """Have llhttp read a piece. Raises MalformedRequest, HeadersTooLarge."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # the door ignores upgrades: it speaks HTTP/1.1 only
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, AttndError):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError as error:
            raise MalformedRequest(f"not an HTTP/1.1 request: {error}") from None

    @property
    def request_id(self) -> bytes:
        """The last request id that was given; empty for none, or one that cannot be used."""
        given = self.request_ids[-1] if self.request_ids else b""
        return given if REQUEST_ID.fullmatch(given) else b""

    def head(self) -> Head:
        """The head, when `done`. Raises MalformedRequest for a wrong version or target."""
        parser = self.parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise MalformedRequest(f"HTTP/{version}: this service speaks HTTP/1.1")
        split = split_target if len(self.url) <= REMEMBERED_BYTES else split_target.__wrapped__
        headers = read_headers(self.headers)
        if version == "1.1" and not headers.host:
            raise MalformedRequest("HTTP/1.1 requires the header Host: send the service's name")
        if version == "1.0":
            if headers.transfer_encoding is not None:
                raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding: send Content-Length")
            headers.expects_continue = False  # HTTP/1.0 has no interim responses
        target = split(self.url)
        if target.authority:
            headers.host = target.authority
        return Head(
            method=parser.get_method().decode("ascii"),
            target=target,
            raw_headers=self.headers,
            is_http_11=version == "1.1",
            keep_alive=version == "1.1" and self.keep_alive,
            headers=headers,
        )

    def close(self) -> None:
        """Part from llhttp's parser, which refers to this object."""
        del self.parser

    # what llhttp calls

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.rstrip(b" \t")  # llhttp leaves white space behind it
        if name == b"x-request-id":
            self.request_ids.append(value)
        else:
            self.headers.append((name, value))
        if len(self.headers) + len(self.request_ids) > self.max_lines:
            raise HeadersTooLarge(
                f"more than {self.max_lines} headers: send fewer, or raise server.max_header_count"
            )

    def on_headers_complete(self) -> None:
        self.keep_alive = self.parser.should_keep_alive()  # forgotten at the end of the message
        self.done = True


@lru_cache(maxsize=1024)
def split_target(url: bytes) -> Target:
    """Path and query of a request's target. Raises MalformedRequest."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise MalformedRequest(f"the request's target {url[:100]!r} is not a path") from None
    raw_path = parsed.path or b"/"
    path = raw_path.decode("latin-1")
    path = unquote(path) if "%" in path else path
    if not path.isprintable():
        raise MalformedRequest(f"the path {path[:100]!r} has a control character: remove it")
    authority = b""
    if parsed.schema is not None:
        if parsed.schema.lower() not in SCHEMES:
            raise MalformedRequest(f"the request's target {url[:100]!r} is not an http URL")
        authority = AUTHORITY_END.split(url.partition(b"://")[2], 1)[0]
    return Target(path, raw_path, parsed.query or b"", authority)
