"""Calls that say nothing, have no key, or are too many: none of them closes the gateway."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from threading import Event
from typing import Any

import grpc
import pytest
from http_secrets import keys_file
from http_service import serving
from triton_callers import Gateway, gateway_of

from service.gateway import grpc_server
from service.gateway.grpc_server import MORE_CALLS, message
from tests.harness.waiting import WAIT_S, wait_for

NAME = "/inference.GRPCInferenceService/"
RED = ("authorization", "Bearer a-key-of-red")
BLUE = ("authorization", "Bearer a-key-of-blue")
PLACES = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
CALL = message("ModelInferRequest")(model_name="pool").SerializeToString()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with (
        serving(*keys_file(tmp_path_factory.mktemp("keys"))) as service,
        gateway_of(service, "--oip.max-calls", str(PLACES)) as gateway,
    ):
        yield gateway


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def connect(door: Gateway, stack: ExitStack) -> Any:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{door.grpc_port}", options))


def be_silent(
    channel: Any, stack: ExitStack, method: str, *metadata: tuple[str, str], count: int = 1
) -> list[Any]:
    """Calls whose metadata goes out, and no message behind it."""
    over = Event()
    stack.callback(over.set)

    def nothing() -> Iterator[bytes]:
        over.wait(WAIT_S)
        yield from ()

    calls = [
        channel.stream_stream(NAME + method)(nothing(), metadata=metadata) for _ in range(count)
    ]
    for call in calls:
        stack.callback(call.cancel)
    return calls


def ended(call: Any) -> Any:
    """How a call has ended, waited for."""
    with suppress(grpc.RpcError):
        list(call)
    return call.code()


def infer(channel: Any, *metadata: tuple[str, str], data: bytes = CALL) -> bytes:
    answer: bytes = channel.unary_unary(NAME + "ModelInfer")(
        data, metadata=metadata, timeout=WAIT_S, wait_for_ready=True
    )
    return answer


def code_of(channel: Any, *metadata: tuple[str, str], data: bytes = CALL) -> Any:
    with pytest.raises(grpc.RpcError) as reply:
        infer(channel, *metadata, data=data)
    return reply.value.code()


def is_live(channel: Any) -> bool:
    for method in ("ServerLive", "ServerReady"):
        channel.unary_unary(NAME + method)(b"", timeout=WAIT_S, wait_for_ready=True)
    return True


METHODS = ("ModelStreamInfer", "ModelInfer", "ServerLive", "ServerMetadata", "NoSuchMethod")


@pytest.mark.parametrize("method", METHODS)
def test_silent_calls_without_a_key_take_no_place(
    guarded: Gateway, stack: ExitStack, method: str
) -> None:
    calls = be_silent(connect(guarded, stack), stack, method, count=3 * PLACES)
    expected = {
        "ServerLive": grpc.StatusCode.OK,
        "NoSuchMethod": grpc.StatusCode.UNIMPLEMENTED,
    }.get(method, grpc.StatusCode.UNAUTHENTICATED)
    assert set(map(ended, calls)) == {expected}, "answered before anything is sent"
    channel = connect(guarded, stack)
    assert is_live(channel) and infer(channel, RED)
    wait_for(lambda: not guarded.core.calls, "the place to be free")


def test_one_namespace_leaves_places_for_others_and_for_probes(
    guarded: Gateway, stack: ExitStack
) -> None:
    calls = be_silent(connect(guarded, stack), stack, "ModelStreamInfer", RED, count=3 * PLACES)
    wait_for(lambda: sum(call.done() for call in calls) == 3 * PLACES - PLACES // 2, "the rest")
    assert guarded.core.calls == {"red": PLACES // 2}
    channel = connect(guarded, stack)
    assert is_live(channel) and infer(channel, BLUE)
    assert code_of(channel, RED) == grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    wait_for(lambda: not guarded.core.calls, "the places to be free")
    assert infer(channel, RED)


@pytest.mark.parametrize("method", ["ModelStreamInfer", "ModelInfer", "ServerMetadata"])
def test_a_call_that_stays_silent_is_ended(stack: ExitStack, method: str) -> None:
    with (
        serving("--server.receive-timeout-s", "0.5") as service,
        gateway_of(service, "--oip.max-calls", "2") as door,
        stack,
    ):
        channel = connect(door, stack)
        began = time.monotonic()
        calls = be_silent(channel, stack, method, count=2)
        wait_for(lambda: door.core.calls.total() == 2, "both to begin")
        assert code_of(channel) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert set(map(ended, calls)) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        wait_for(lambda: not door.core.calls, "the places to be free")
        assert infer(channel) and time.monotonic() - began < 10


def test_a_stream_may_be_silent_between_its_messages(stack: ExitStack) -> None:
    with (
        serving("--server.receive-timeout-s", "0.3") as service,
        gateway_of(service) as door,
        stack,
    ):
        channel = connect(door, stack)
        more = Event()

        def twice() -> Iterator[bytes]:
            yield CALL
            more.wait(WAIT_S)
            yield CALL

        answers = channel.stream_stream(NAME + "ModelStreamInfer")(twice())
        assert next(answers)
        time.sleep(1.0)
        more.set()
        assert next(answers)
        assert list(answers) == []


def test_nothing_is_parsed_without_a_key(
    guarded: Gateway, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(grpc_server, "read_request", lambda data: parsed.append(len(data)))
    channel = connect(guarded, stack)
    for metadata in ((), (("authorization", "Bearer nobodys"),), (("authorization", "x"),)):
        for size in (0, 10, 10 * 2**20):
            assert code_of(channel, *metadata, data=bytes(size)) == grpc.StatusCode.UNAUTHENTICATED
    assert parsed == []


@pytest.mark.parametrize("second", [RED, BLUE, ("authorization", "")])
def test_two_keys_are_refused(guarded: Gateway, stack: ExitStack, second: tuple[str, str]) -> None:
    channel = connect(guarded, stack)
    for metadata in ((RED, second), (second, RED)):
        assert code_of(channel, *metadata) == grpc.StatusCode.UNAUTHENTICATED


def test_a_connection_has_a_limit_of_streams(guarded: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", guarded.grpc_port), WAIT_S) as peer:
        peer.sendall(PREFACE)
        length, kind = struct.unpack(">HB", peer.recv(9, socket.MSG_WAITALL)[1:4])
        assert kind == 4
        settings = dict(struct.iter_unpack(">HI", peer.recv(length, socket.MSG_WAITALL)))
    assert settings[3] == PLACES + MORE_CALLS


def test_compressed_messages_are_refused(guarded: Gateway) -> None:
    address, gzip = f"127.0.0.1:{guarded.grpc_port}", grpc.Compression.Gzip
    with grpc.insecure_channel(address, compression=gzip) as channel:
        assert code_of(channel, RED) == grpc.StatusCode.UNIMPLEMENTED


def test_descriptors_stay_for_all_else_than_connections(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4
    monkeypatch.setattr(grpc_server, "descriptors", lambda: (100 + most, 100))
    service = stack.enter_context(serving())
    door = stack.enter_context(gateway_of(service))
    address = ("127.0.0.1", door.grpc_port)

    def num_served() -> int:
        """Of one connection more than are allowed; those before it may not have ended yet."""
        first_bytes = []
        with ExitStack() as ending:
            peers = [ending.enter_context(socket.create_connection(address, 1)) for _ in range(5)]
            for peer in peers:
                with suppress(OSError):
                    peer.sendall(PREFACE)
                    first_bytes.append(peer.recv(1))
        return sum(map(bool, first_bytes))

    wait_for(lambda: num_served() == most, "the connections that are left")
    assert num_served() <= most
