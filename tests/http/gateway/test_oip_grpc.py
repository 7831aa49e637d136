"""gRPC by itself: deadlines, cancellation, streams, limits, and messages that are none."""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc as grpcio
import httpx
import numpy as np
import pytest
from http_messages import KV_HEADS, LAYERS, QO_HEADS, rows
from http_service import Service, serving
from triton_callers import Gateway, Triton, gateway_of
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.harness.waiting import WAIT_S, wait_for

INFER = "/inference.GRPCInferenceService/ModelInfer"
FUZZ_CASES = 1500


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def channel(gateway: Gateway) -> Iterator[Any]:
    with grpcio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as made:
        yield made


def as_bytes(message: Any) -> bytes:
    found: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return found


def request(model: str, **parameters: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def add_input(made: Any, name: str, datatype: str, shape: list[int], **contents: Any) -> Any:
    given = made.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(given.contents, field).extend(values)
    return given


def ask(channel: Any, made: Any, **how: Any) -> Any:
    response = service_pb2.ModelInferResponse
    call = channel.unary_unary(
        INFER, request_serializer=as_bytes, response_deserializer=response.FromString
    )
    return call(made, timeout=how.pop("timeout", WAIT_S), **how)


def filled(triton: Triton, rng: np.random.Generator) -> Any:
    """A sequence of three tokens; a q for it."""
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    k = rows(rng, 3)
    triton.infer("append", {"k": k, "v": k}, layer=0, sequences=["a"], append_indptr=[0, 3])
    return rows(rng, 1, QO_HEADS)


def begin(triton: Triton, model: str, inputs: dict[str, Any], ended: queue.Queue[Any]) -> Any:
    """Call a model for `a` at layer 0; how it ends, None or an error, goes into the queue."""
    given = [triton.input(name, array) for name, array in inputs.items()]
    return triton.client.async_infer(
        model,
        given,
        lambda result, error: ended.put(error),
        parameters={"layer": 0, "sequences": '["a"]'},
    )


def test_a_clients_deadline_reaches_the_engine(
    over_grpc: Triton, service: Service, rng: np.random.Generator
) -> None:
    q = filled(over_grpc, rng)
    with service.gate_closed(), pytest.raises(InferenceServerException) as reply:
        over_grpc.infer("decode", {"q": q}, {"client_timeout": 0.1}, layer=0, sequences=["a"])
    assert reply.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    wait_for(lambda: service.num_waiting == 0, "the engine to release it")


def test_a_call_that_its_client_cancels_is_taken_back(
    over_grpc: Triton, gateway: Gateway, service: Service, rng: np.random.Generator
) -> None:
    q, k = filled(over_grpc, rng), rows(rng, 1)
    ended: queue.Queue[Any] = queue.Queue()
    with service.gate_closed():
        first = begin(over_grpc, "decode", {"q": q}, ended)
        assert service.backend.entered.wait(WAIT_S)
        second = begin(over_grpc, "decode", {"q": q, "k": k, "v": k}, ended)
        pending = gateway.link.caller.pending
        wait_for(lambda: len(pending) == 2, "the second call")
        second.cancel()
        wait_for(lambda: any(one.future.cancelled() for one in list(pending.values())), "the news")
        assert ended.get(timeout=WAIT_S).status() == "StatusCode.CANCELLED"
    assert ended.get(timeout=WAIT_S) is None
    assert over_grpc.infer("get_sequence", id="a")[0]["lengths"][0] == 3
    del first


def test_a_stream_answers_in_order_and_continues_after_an_error(
    over_grpc: Triton, rng: np.random.Generator
) -> None:
    filled(over_grpc, rng)
    reply: queue.Queue[tuple[Any, Any]] = queue.Queue()
    over_grpc.client.start_stream(lambda result, error: reply.put((result, error)))
    k = rows(rng, 1)
    for name in ("a", "b", "a"):
        inputs = [over_grpc.input("k", k), over_grpc.input("v", k)]
        parameters = {"layer": 0, "sequences": json.dumps([name])}
        over_grpc.client.async_stream_infer(
            "append", inputs, request_id=name, parameters=parameters
        )
    over_grpc.client.stop_stream()
    answers = [reply.get(timeout=WAIT_S) for _ in range(3)]
    lengths = [
        result.get_response().parameters["lengths"].string_param if result else error.message()
        for result, error in answers
    ]
    assert (lengths[0], lengths[2]) == ("[4]", "[5]")
    assert lengths[1].startswith("unknown_sequence: unknown sequence: b: ")


def test_inputs_may_be_spelled_out_where_the_protocol_has_a_place(channel: Any) -> None:
    made = request("merge")
    add_input(made, "o", "FP32", [1, 2, 1, 2], fp32_contents=[1, 2, 3, 4])
    add_input(made, "lse", "FP32", [1, 2, 1], fp32_contents=[0, -np.inf])
    add_input(made, "indptr", "INT32", [0], int_contents=[])
    assert "INVALID_ARGUMENT" in str(refusal(channel, made).code())
    del made.inputs[2]
    answer = ask(channel, made)
    raw = dict(zip([one.name for one in answer.outputs], answer.raw_output_contents, strict=True))
    assert np.frombuffer(raw["o"], np.float32).tolist() == [1, 2]


def refusal(channel: Any, made: Any, **how: Any) -> Any:
    with pytest.raises(grpcio.RpcError) as reply:
        ask(channel, made, **how)
    return reply.value


def test_what_does_not_hold_together_is_refused(channel: Any) -> None:
    made = request("merge")
    given = add_input(made, "o", "FP16", [1, 1, 1, 1], fp32_contents=[1])
    assert "raw_input_contents" in refusal(channel, made).details()
    made.raw_input_contents.extend([b"", b""])
    assert "raw_input_contents = 2 entries" in refusal(channel, made).details()
    del made.raw_input_contents[1]
    assert "must be given once" in refusal(channel, made).details()
    given.ClearField("contents")
    assert "o.data = 0 bytes: its shape needs 2" in refusal(channel, made).details()
    given.parameters["shared_memory_size"].int64_param = 2
    assert (
        "shared_memory_size = 2: this route has no such field" in refusal(channel, made).details()
    )
    made = request("prefill")
    add_input(made, "packed_mask", "UINT8", [1], uint_contents=[300])
    assert "must be within the range of UINT8" in refusal(channel, made).details()
    made = request("pool")
    made.parameters["x"].SetInParent()
    assert "x = None: this route has no such field" in refusal(channel, made).details()
    made = request("list_sequences", limit=1)
    made.inputs.extend([made.inputs.add()] * 64)
    assert "at most 64 tensors" in refusal(channel, made).details()


def test_an_error_brings_its_document_and_its_request_id(channel: Any) -> None:
    made = request("append", layer=0, sequences='["a"]', offsets="[7]")
    made.parameters["sequences"].string_param = '["unknown"]'
    for name in ("k", "v"):
        add_input(made, name, "FP32", [1, KV_HEADS, 64], fp32_contents=[0] * KV_HEADS * 64)
    error = refusal(channel, made, metadata=[("x-request-id", "mine")])
    behind = dict(error.trailing_metadata())
    assert json.loads(behind["attnd-problem"])["sequences"] == ["unknown"]
    assert behind["x-request-id"] == "mine" and behind["server-timing"].startswith("queue;dur=")


def test_more_calls_than_allowed_and_larger_messages_are_refused(rng: np.random.Generator) -> None:
    limits = ("--oip.max-calls", "1", "--oip.max-message-bytes", "100000")
    with serving() as service, gateway_of(service, *limits) as gateway, gateway.grpc() as made:
        q = filled(made, rng)
        k = np.zeros((5000, KV_HEADS, 64), np.float32)
        fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, 5000]}
        with pytest.raises(InferenceServerException) as reply:
            made.infer("append", {"k": k, "v": k}, **fields)
        assert reply.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        ended: queue.Queue[Any] = queue.Queue()
        with service.gate_closed():
            begin(made, "decode", {"q": q}, ended)
            assert service.backend.entered.wait(WAIT_S)
            with pytest.raises(InferenceServerException) as reply:
                made.client.get_server_metadata()
            assert reply.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            assert "oip.max_calls" in reply.value.message()
            assert made.client.is_server_live(), "probes need no place"
            problem = httpx.get(f"{gateway.url}/v2")
            assert problem.status_code == 429 and problem.headers["retry-after"] == "1"
        assert ended.get(timeout=WAIT_S) is None
        assert made.client.is_server_live()


def test_accepted_calls_are_answered_before_the_gateway_ends(rng: np.random.Generator) -> None:
    with serving() as service, ThreadPoolExecutor() as pool:
        ended: queue.Queue[Any] = queue.Queue()
        with gateway_of(service) as gateway, gateway.grpc() as made, gateway.http() as other:
            q = filled(made, rng)
            with service.gate_closed():
                begin(made, "decode", {"q": q}, ended)
                assert service.backend.entered.wait(WAIT_S)
                fields = {"layer": 0, "sequences": ["a"]}
                late = pool.submit(other.infer, "decode", {"q": q}, **fields)
                pending = gateway.link.caller.pending
                wait_for(lambda: len(pending) == 2, "the second call")
                gateway.call_soon(gateway.server.drain)
                wait_for(gateway.core.draining.is_set, "the drain")
            assert ended.get(timeout=WAIT_S) is None
            assert late.result(WAIT_S)[1]["o"].shape == q.shape


def test_a_stream_on_which_nothing_comes_does_not_hold_up_the_end() -> None:
    reply: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with serving() as service:
        with gateway_of(service) as gateway:
            made = gateway.open_grpc()
            made.client.start_stream(lambda result, error: reply.put((result, error)))
            made.client.async_stream_infer("pool", [])
            result, _ = reply.get(timeout=WAIT_S)
            assert result.get_response().parameters["sequences"].int64_param == 0
            started = time.monotonic()
        assert time.monotonic() - started < 20.0, "it had 30 s"
        _, error = reply.get(timeout=WAIT_S)
        assert error.status() == "StatusCode.UNAVAILABLE" and "not_ready" in error.message()
        made.client.stop_stream(cancel_requests=True)
        made.close()


def test_the_arena_is_as_free_after_calls_as_before(
    triton: Triton, gateway: Gateway, rng: np.random.Generator
) -> None:
    q = filled(triton, rng)
    arena = gateway.link.arena

    def is_free() -> bool:
        gateway.call_soon(arena.spare.free)
        return bool(arena.slots.free() == arena.slots.size)

    for name in ("a", "b"):
        with suppress(InferenceServerException):
            triton.infer("decode", {"q": q}, layer=0, sequences=[name])
    wait_for(is_free, "all slots to be free")


def test_mutated_messages_do_no_harm(
    channel: Any, over_grpc: Triton, client: httpx.Client, rng: np.random.Generator
) -> None:
    """Whatever comes is answered or refused, and the door still gives the right numbers."""
    q = filled(over_grpc, rng)
    before = over_grpc.infer("decode", {"q": q}, layer=0, sequences=["a"])[1]["o"]
    seeds = [
        request("create_sequences", sequences='[{"id":"b"},{"parent":"a","length":2}]'),
        request("truncate", id="b", length=0),
        request("page_table", sequences='["a"]', layer=1),
        request("list_sequences", limit=5),
        decode_of(q),
    ]
    send_mutated(channel, seeds)
    after = over_grpc.infer("decode", {"q": q}, layer=0, sequences=["a"])[1]["o"]
    np.testing.assert_array_equal(before, after)
    assert client.get("/v1/sequences/a").json()["lengths"] == [3, *[0] * (LAYERS - 1)]
    assert client.get("/v1/pool").json()["integrity"] == "ok"


def send_mutated(channel: Any, seeds: list[Any]) -> None:
    chance = random.Random(11)
    for _ in range(FUZZ_CASES):
        data = mutate(as_bytes(chance.choice(seeds)), chance)
        try:
            ask(channel, data)
        except grpcio.RpcError as error:
            assert error.code() not in (
                grpcio.StatusCode.UNKNOWN,
                grpcio.StatusCode.INTERNAL,
                grpcio.StatusCode.DEADLINE_EXCEEDED,
            ), (data, error.details())


def decode_of(q: Any) -> Any:
    made = request("decode", layer=0, sequences='["a"]', timeout=10_000_000)
    add_input(made, "q", "FP32", list(q.shape))
    made.outputs.add(name="o")
    made.raw_input_contents.append(q.astype(np.float32).tobytes())
    return made


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, cut, doubled or put in; most of them near the front."""
    body = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = min(int(chance.expovariate(1 / 60)), len(body) - 1)
        match chance.randrange(5):
            case 0:
                body[at] = chance.randrange(256)
            case 1:
                body[at] ^= 1 << chance.randrange(8)
            case 2:
                del body[at : at + chance.randint(1, 8)]
            case 3:
                body[at:at] = body[at : at + chance.randint(1, 30)]
            case 4:
                body[at:at] = chance.randbytes(chance.randint(1, 5))
        if not body:
            return b""
    return bytes(body)
