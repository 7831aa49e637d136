"""Chunked bodies (RFC 9112 §7.1): finds each chunk's data in the received bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from service.errors import HeadersTooLarge, MalformedBody

MAX_LINE_BYTES: Final = 1024
"""Longest line with a chunk's size and its extensions, which are ignored."""
DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")
MAX_DIGITS: Final = 15
LINES_AT_ONCE: Final = 64
"""Lines of one body that are read in a pass of the loop: each takes as long as some kilobytes of
data, and a client can send chunks of one byte."""


class Chunks:
    """Reads one chunked body, in any number of pieces. Trailers are ignored."""

    def __init__(self, max_trailer_bytes: int) -> None:
        self.left = 0
        """Bytes of the chunk's data, and of the line end after it, that have not come yet."""
        self.line = b""
        """The beginning of a line whose end has not come yet."""
        self.in_trailers = False
        self.trailer_bytes = 0
        self.max_trailer_bytes = max_trailer_bytes
        self.done = False

    def read(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Stretches `(begin, end)` of `data` that are the body's; at the end see `done`.

        The last pair is empty, and its begin is the number of bytes used: not all where the body
        ends, or after `LINES_AT_ONCE` lines. Raises MalformedBody and HeadersTooLarge.
        """
        at, end, lines = 0, len(data), 0
        while at < end and not self.done and lines < LINES_AT_ONCE:
            if self.left > 2:
                stop = min(end, at + self.left - 2)
                self.left -= stop - at
                yield at, stop
                at = stop
            else:
                at = self.read_line(data, at)
                lines += 1
        yield at, at

    def read_line(self, data: memoryview, at: int) -> int:
        """One line, or as much of it as has come: a chunk's size, the end of its data, or a
        trailer; the first byte after it."""
        room = MAX_LINE_BYTES - len(self.line)
        piece = bytes(data[at : at + room])
        found = piece.find(b"\n")
        if found < 0:
            self.line += piece
            if len(self.line) >= MAX_LINE_BYTES:
                raise MalformedBody(f"a line between chunks passes {MAX_LINE_BYTES} bytes")
            return at + len(piece)
        line, self.line = self.line + piece[: found + 1], b""
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:  # others may end it at a lone CR
            raise MalformedBody("a line between chunks does not end with its only CR LF")
        self.on_line(line[:-2])
        return at + found + 1

    def on_line(self, line: bytes) -> None:
        if self.left:  # the line end after a chunk's data
            if line:
                raise MalformedBody("a chunk is longer than its size says")
            self.left = 0
        elif self.in_trailers:
            self.done = not line
            self.trailer_bytes += len(line)
            if self.trailer_bytes > self.max_trailer_bytes:
                raise HeadersTooLarge(f"the trailers pass {self.max_trailer_bytes} bytes")
        else:
            size = chunk_size(line)
            self.in_trailers = size == 0
            self.left = size + 2 if size else 0


def chunk_size(line: bytes) -> int:
    """The size in a chunk's first line, its extensions left out."""
    digits = line.partition(b";")[0].rstrip(b" \t")
    if not digits or len(digits) > MAX_DIGITS or not DIGITS.issuperset(digits):
        raise MalformedBody(f"a chunk's size is {digits[:40]!r}: not a hexadecimal number")
    return int(digits, 16)
