"""Heads and chunked bodies by themselves: in one piece or in many, they are the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.doors.http.protocol.chunks import Chunks
from service.doors.http.protocol.heads import Head, HeadParser, SeenHead
from service.errors import AttndError, HeadersTooLarge, MalformedBody, MalformedRequest

HEAD = b"POST /v1/a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 50 + b"\r\n\r\n"
REST = b"body\r\n\r\nGET / HTTP/1.1\r\n\r\n"
CUTS = st.lists(st.integers(1, len(HEAD + REST) - 1), unique=True, max_size=8).map(sorted)


def parse(data: bytes, cuts: list[int], max_bytes: int = 2**16) -> tuple[Head, HeadParser, bytes]:
    """The head, its parser, and the bytes after it, when `data` comes in pieces."""
    parser = HeadParser(max_bytes, 100)
    for begin, end in pairwise([0, *cuts, len(data)]):
        after = parser.feed(data, begin, end)
        if after is not None:
            return parser.head(), parser, data[after:]
    raise AssertionError("the head does not end")


def read(data: bytes, cuts: list[int], max_bytes: int = 2**16) -> tuple[Head, bytes]:
    head, _, rest = parse(data, cuts, max_bytes)
    return head, rest


def seen_in(raw: bytes) -> SeenHead | None:
    head, parser, _ = parse(raw, [])
    return SeenHead.of(raw, head, parser.request_ids)


@given(cuts=CUTS, blank=st.integers(0, 3))
def test_a_head_ends_where_it_ends_in_whatever_pieces_it_comes(cuts: list[int], blank: int) -> None:
    head, rest = read(b"\r\n" * blank + HEAD + REST, cuts)
    assert rest == REST
    assert (head.method, head.target.path, head.target.query) == ("POST", "/v1/a b", b"c=d")
    assert head.raw_headers == [(b"host", b"x"), (b"x-long", b"y" * 50)]
    assert head.is_http_11 and head.keep_alive


@given(cuts=CUTS)
def test_a_head_may_have_as_many_bytes_as_the_limit_and_no_more(cuts: list[int]) -> None:
    assert read(HEAD + REST, cuts, len(HEAD))[1] == REST
    with pytest.raises(HeadersTooLarge):
        read(HEAD + REST, cuts, len(HEAD) - 1)


LINES = st.sampled_from(
    [
        *(b"Host: x", b"content-length: 5", b"Content-Type: application/json", b"Accept: */*"),
        *(b"connection: close", b"expect: 100-continue", b"authorization: Bearer k", b"a: "),
        *(b"x-request-id: 1", b"X-Request-ID:  2 ", b"x-request-id:3", b"x-request-id: 4 4"),
        *(b"x-request-id: ", b"x-request-id: \x7f", b"x-request-id2: 5", b"y: x-request-id: 6"),
        *(b"x-request-id: " + b"7" * 32, b"x-request-id: " + b"8" * 32, b"b: " + b"c" * 900),
    ]
)
HEADS = st.builds(
    lambda first, lines, blank: blank + b"\r\n".join([first, *lines, b"", b""]),
    st.sampled_from([b"POST /v1/decode HTTP/1.1", b"GET / HTTP/1.0"]),
    st.lists(LINES, max_size=4),
    st.sampled_from([b"", b"\r\n"]),
)


@given(first=HEADS, second=HEADS, lead=st.binary(max_size=3), used=st.integers(0, 400))
def test_a_repeated_head_is_recognized(first: bytes, second: bytes, lead: bytes, used: int) -> None:
    try:
        seen = seen_in(first)
    except AttndError:
        return
    if seen is None:
        return
    for sent in (first, second):
        data = lead + sent + REST
        again = seen.again(bytearray(data), len(lead), len(data))
        assert again is not None or sent != first or b"\x7f" in first
        if again is not None:
            request_id, after = again
            head, parser, rest = parse(sent + REST, [])
            assert (seen.head, request_id, data[after:]) == (head, parser.request_id, rest)
        cut = min(used, len(sent) - 1)
        assert seen.again(data, len(lead), len(lead) + cut) is None


def test_a_request_id_is_all_that_may_change_in_a_head_that_is_known() -> None:
    raw = b"POST /v1/decode HTTP/1.1\r\nx-request-id: abc\r\nhost: localhost\r\n\r\n"
    seen = seen_in(raw)
    assert seen is not None
    for given_id, known in [(b"xyz", True), (b"x z", False), (b"x\rz", False), (b"xyzz", False)]:
        sent = raw.replace(b"abc", given_id) + REST
        again = seen.again(sent, 0, len(sent))
        assert (again is not None) == known
        if again is not None:
            assert again[0] == given_id


@given(data=st.binary(max_size=200) | st.text("GET /:\r\n HTP1.", max_size=80).map(str.encode))
def test_whatever_comes_is_a_head_or_refused(data: bytes) -> None:
    parser = HeadParser(4096, 100)
    try:
        after = parser.feed(data, 0, len(data))
        assert after is None or isinstance(parser.head(), Head)
    except AttndError as error:
        assert isinstance(error, (MalformedRequest, HeadersTooLarge))


def body_of(data: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """A chunked body's data, and the bytes after it."""
    chunks, body = Chunks(4096), b""
    for begin, end in pairwise([0, *cuts, len(data)]):
        used = 0
        for first, last in chunks.read(memoryview(data)[begin:end]):
            body += data[begin + first : begin + last]
            used = last
        if chunks.done:
            return body, data[begin + used :]
        assert used == end - begin
    raise AssertionError("the body does not end")


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    extension=st.sampled_from([b"", b";a=b", b' ; a="x"']),
    trailers=st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"]),
    data=st.data(),
)
def test_a_chunked_body_is_the_same_in_whatever_pieces_it_comes(
    pieces: list[bytes], extension: bytes, trailers: bytes, data: st.DataObject
) -> None:
    sent = b"".join(b"%x%b\r\n%b\r\n" % (len(one), extension, one) for one in pieces)
    whole = sent + b"0\r\n" + trailers + b"\r\n" + REST
    cuts = st.lists(st.integers(1, len(whole) - 1), unique=True, max_size=8).map(sorted)
    assert body_of(whole, data.draw(cuts)) == (b"".join(pieces), REST)


@given(data=st.binary(max_size=100) | st.text("0123afx;\r\n", max_size=60).map(str.encode))
def test_whatever_comes_as_chunks_is_read_or_refused(data: bytes) -> None:
    chunks = Chunks(64)
    try:
        for first, last in chunks.read(memoryview(data)):
            assert 0 <= first <= last <= len(data)
    except AttndError as error:
        assert isinstance(error, (MalformedBody, HeadersTooLarge))
