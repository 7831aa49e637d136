"""Frames: their sizes on the wire, and the reader that cuts a stream into them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from attnd.wire import frames as f


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.setblocking(False)
    with near, far:
        yield near, far


def read(reader: f.Reader) -> list[tuple[int, bytes]]:
    return [
        (kind, bytes(reader.window[start : start + size])) for kind, start, size in reader.frames()
    ]


def test_a_frame_in_single_bytes_is_read_when_its_last_byte_comes() -> None:
    reader = f.Reader(f.FROM_CALLER)
    data = f.frame(f.CANCEL, b"12345678")
    for i in range(len(data) - 1):
        reader.feed(data[i : i + 1])
        assert read(reader) == []
        assert reader.unfinished == i + 1
    reader.feed(data[-1:])
    assert read(reader) == [(f.CANCEL, b"12345678")]
    assert reader.unfinished == 0


def test_many_frames_in_one_piece_come_out_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    reader = f.Reader(f.FROM_CALLER)
    sent = [(f.CANCEL, number.to_bytes(8, "little")) for number in range(3000)]
    near.sendall(b"".join(f.frame(*one) for one in sent) + b"\x03\x00")
    got: list[tuple[int, bytes]] = []
    while len(got) < len(sent):
        assert reader.receive(far) > 0
        got += read(reader)
    assert got == sent
    assert reader.unfinished == 2


def test_a_frame_larger_than_the_buffer_is_read_and_its_room_forgotten() -> None:
    reader = f.Reader(f.FROM_ENGINE)
    payload = bytes(range(256)) * 1024
    data = f.frame(f.ANSWER, payload) + f.frame(f.STATE, b"{}")
    got: list[tuple[int, bytes]] = []
    for begin in range(0, len(data), 50_000):
        reader.feed(data[begin : begin + 50_000])
        got += read(reader)
    assert got == [(f.ANSWER, payload), (f.STATE, b"{}")]
    reader.feed(b"")
    assert len(reader.buffer) == f.BUFFER_BYTES


@pytest.mark.parametrize(
    ("header", "detail"),
    [
        ((0, 0, 8), "frame kind 0: this end reads 1 CALL, 3 CANCEL, 16 HELLO, 18 GROW"),
        ((f.ANSWER, 0, 56), "frame kind 2"),
        ((f.CALL, 1, 64), "frame flags 1 of CALL: version 1 has none, send 0"),
        ((f.CALL, 0, 63), "payload of 63 bytes in CALL: exactly 64 bytes"),
        ((f.HELLO, 0, 65537), "payload of 65537 bytes in HELLO: between 2 and 65536 bytes"),
        ((f.GROW, 0, 2**32 - 1), "payload of 4294967295 bytes in GROW"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_at_once(
    header: tuple[int, int, int], detail: str
) -> None:
    reader = f.Reader(f.FROM_CALLER)
    reader.feed(f.frame(f.CANCEL, bytes(8)) + f.HEADER.pack(*header))
    frames = reader.frames()
    assert next(frames)[0] == f.CANCEL, "what comes before the broken frame is still read"
    with pytest.raises(f.FrameError, match=detail):
        next(frames)


def test_the_end_of_the_stream_reads_as_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    reader = f.Reader(f.FROM_CALLER)
    with pytest.raises(BlockingIOError):
        reader.receive(far)
    near.close()
    assert reader.receive(far) == 0
