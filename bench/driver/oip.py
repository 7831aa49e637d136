"""Ways into the doors of the Open Inference Protocol: bytes laid out once, or as messages."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

from bench.cases.loads import Half, Load, Request
from bench.driver.connections import Run, Sample, backend_seconds, loop

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
PATIENCE_S: Final = 120


def parameters(request: Request) -> dict[str, Any]:
    """A request's fields as the protocol has them."""
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in request.fields.items()
    }


def framed(request: Request) -> bytes:
    """An HTTP/1.1 request with its tensors as binary data."""
    inputs = [
        described(name, tensor) | {"parameters": {"binary_data_size": tensor.nbytes}}
        for name, tensor in request.tensors.items()
    ]
    given = {**parameters(request), "binary_data_output": True}
    data = [tensor.tobytes() for tensor in request.tensors.values()]
    return posted(request, {"inputs": inputs, "parameters": given}, data)


def described(name: str, tensor: Half) -> dict[str, Any]:
    return {"name": name, "datatype": "FP16", "shape": list(tensor.shape)}


def posted(request: Request, document: dict[str, Any], data: Sequence[bytes] = ()) -> bytes:
    """The document, and binary data behind it, as an HTTP/1.1 request."""
    text = json.dumps(document).encode()
    body = b"".join([text, *data])
    head = f"POST /v2/models/{request.operation}/infer HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"content-length: {len(body)}\r\ninference-header-content-length: {len(text)}\r\n\r\n"
    return head.encode() + body


def message(request: Request) -> bytes:
    """A gRPC request with its tensors as raw contents."""
    from service.doors.grpc import messages

    made = messages.message("ModelInferRequest")(model_name=request.operation)
    for name, value in parameters(request).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(made.parameters[name], kind, value)
    for name, tensor in request.tensors.items():
        made.inputs.add(name=name, datatype="FP16", shape=tensor.shape)
        made.raw_input_contents.append(tensor.tobytes())
    data: bytes = made.SerializeToString()
    return data


class Rpc:
    """Messages over a channel of grpcio, answers left as bytes."""

    def __init__(self, port: int, load: Load) -> None:
        self._port = port
        self._messages = [message(request) for request in load.requests()]

    def connect(self) -> tuple[Any, Any]:
        """A channel, and what calls its method."""
        import grpc

        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(f"127.0.0.1:{self._port}", options)
        return channel, channel.unary_unary(METHOD)

    def loop(self, count: int, limit_s: float) -> Run:
        channel, method = self.connect()
        given, num = self._messages, len(self._messages)
        with channel:
            loop(lambda turn: timed(method, given[turn]), num, limit_s)
            return loop(lambda turn: timed(method, given[turn % num]), count, limit_s)

    def crowd(self, connections: int, limit_s: float) -> float:
        """Requests a second of as many channels, each with a thread."""
        with ExitStack() as stack, ThreadPoolExecutor(connections) as pool:
            methods = []
            for _ in range(connections):
                channel, method = self.connect()
                stack.enter_context(channel)
                timed(method, self._messages[0])
                methods.append(method)
            started = time.perf_counter()
            ends = [started + limit_s] * connections
            counts = list(pool.map(self.count_until, methods, ends, range(connections)))
            return sum(counts) / (time.perf_counter() - started)

    def count_until(self, method: Any, ends: float, turn: int) -> int:
        """The calls that one channel makes until then."""
        count = 0
        while time.perf_counter() < ends:
            timed(method, self._messages[(turn + count) % len(self._messages)])
            count += 1
        return count


def timed(method: Any, data: bytes) -> Sample:
    """One call, and what it says of the backend."""
    started = time.perf_counter()
    _, call = method.with_call(data, timeout=PATIENCE_S, wait_for_ready=True)
    seconds = time.perf_counter() - started
    return Sample(seconds, backend_seconds(timing(call.trailing_metadata())))


def timing(metadata: Sequence[tuple[str, Any]]) -> bytes:
    """The stages as a header, as HTTP answers have them."""
    return f"\r\nserver-timing: {dict(metadata).get('server-timing', '')}\r\n".encode()
