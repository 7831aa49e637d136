"""The callers of the benchmarks: what they send, what they read, and how a crowd is served."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from bench.load import Connection, backend_seconds, crowd, framed, loop, timed
from bench.loads import Decode, Heads, Prefill, Ragged

HEADS = Heads(num_qo=4, num_kv=2, dim=8)
TIMING = b"queue;dur=9.0, plan;dur=0.5, copy-in;dur=0.25, kernel;dur=1.0, copy-out;dur=0.25"


class Parrot:
    """An HTTP server that answers every body with itself, in two writes, or with a status."""

    def __init__(self, status: bytes = b"200 OK") -> None:
        self.status = status
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.num_connections = 0
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, suppress(ConnectionError):
            while stream.readline():
                length = 0
                while (line := stream.readline()) != b"\r\n":
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = stream.read(length)
                head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nServer-Timing: %s\r\n\r\n"
                connection.sendall(head % (self.status, length, TIMING) + body[:1])
                connection.sendall(body[1:])


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    made = Parrot()
    yield made
    made.listener.close()


def test_a_body_comes_back_with_the_time_that_the_backend_took(parrot: Parrot) -> None:
    connection = Connection(parrot.port, 100)
    assert connection.answer(framed("/v1/decode", b"abc")) == b"abc"
    sample = timed(connection, framed("/v1/decode", b"abc"))
    connection.close()
    assert sample.backend_s == pytest.approx(0.002)
    assert sample.seconds > 0


def test_an_answer_that_is_no_200_is_an_error_with_what_it_says() -> None:
    parrot = Parrot(b"503 Service Unavailable")
    connection = Connection(parrot.port, 100)
    with pytest.raises(RuntimeError, match="503 Service Unavailable"):
        timed(connection, framed("/", b"abc"))
    connection.close()
    parrot.listener.close()


def test_without_server_timing_the_backend_took_nothing() -> None:
    assert backend_seconds(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == 0.0


def test_a_loop_ends_at_its_count_or_at_its_time(parrot: Parrot) -> None:
    connection = Connection(parrot.port, 100)
    request = framed("/", b"abc")
    assert len(loop(lambda turn: timed(connection, request), 5, 60.0).samples) == 5
    assert len(loop(lambda turn: timed(connection, request), 10**9, 0.05).samples) < 10**6
    connection.close()


def test_a_crowd_answers_on_every_connection_and_leaves_none_unanswered(parrot: Parrot) -> None:
    body = bytes(2**20)  # more than a socket takes at once
    connections = [Connection(parrot.port, len(body)) for _ in range(3)]
    per_second = crowd(connections, [framed("/", body), framed("/", b"abc")], 0.2)
    assert parrot.num_connections == 3
    assert per_second > 3
    assert all(connection.pump() for connection in connections)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "load",
    [
        Decode(("a", "b"), HEADS, kv_len=4, count=1),
        Decode(("a", "b"), HEADS, kv_len=4, count=1, appends=True),
        Prefill("a", HEADS, num_rows=3),
        Ragged(HEADS, num_rows=3),
    ],
)
def test_images_are_safetensors_bodies_with_aligned_tensors(load: Decode) -> None:
    (request,) = load.requests()
    image = request.image()
    size = int.from_bytes(image[:8], "little")
    assert (8 + size) % 64 == 0
    header = json.loads(image[8 : 8 + size])
    assert json.loads(header["__metadata__"]["request"]) == request.fields
    read = load_safetensors(image)
    assert read.keys() == request.tensors.keys()
    for name, tensor in request.tensors.items():
        assert np.array_equal(read[name], tensor), name


def test_decodes_go_over_the_layers_in_turn_and_foresee_their_answers() -> None:
    requests = Decode(("a", "b"), HEADS, kv_len=4, count=4, num_layers=2).requests()
    assert [request.fields["layer"] for request in requests] == [0, 1, 0, 1]
    assert requests[0].answer_bytes == 2 * 4 * 8 * 2 + 2 * 4 * 4
