"""Requests of the Open Inference Protocol: as HTTP with binary tensors, and as gRPC messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.cases.loads import Decode, Request
from bench.driver.calls import Call, Sample
from bench.driver.raw import TIMEOUT_S, backend_seconds

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"


def parameters(request: Request) -> dict[str, Any]:
    """A request's fields as the protocol's parameters."""
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in request.fields.items()
    }


def http_request(request: Request) -> bytes:
    """An HTTP/1.1 request with its tensors as binary data behind the document."""
    inputs = [
        {
            "name": name,
            "datatype": "FP16",
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in request.tensors.items()
    ]
    document = {"inputs": inputs, "parameters": {**parameters(request), "binary_data_output": True}}
    text = json.dumps(document).encode()
    body = b"".join([text, *(tensor.tobytes() for tensor in request.tensors.values())])
    head = f"POST /v2/models/{request.operation}/infer HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"content-length: {len(body)}\r\ninference-header-content-length: {len(text)}\r\n\r\n"
    return head.encode() + body


def grpc_message(request: Request) -> bytes:
    """A ModelInferRequest with its tensors as raw contents."""
    from service.gateway.grpc_server import message

    made = message("ModelInferRequest")(model_name=request.operation)
    for name, value in parameters(request).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(made.parameters[name], kind, value)
    for name, tensor in request.tensors.items():
        made.inputs.add(name=name, datatype="FP16", shape=tensor.shape)
        made.raw_input_contents.append(tensor.tobytes())
    data: bytes = made.SerializeToString()
    return data


class GrpcWay:
    """Messages over a channel of grpcio; answers stay bytes."""

    def __init__(self, port: int, load: Decode) -> None:
        self._port = port
        self._messages = [grpc_message(request) for request in load.requests()]
        self.num_requests = len(self._messages)

    @contextmanager
    def connected(self) -> Iterator[Call]:
        import grpc

        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self._port}", options) as channel:
            method: Any = channel.unary_unary(METHOD)

            def call(turn: int) -> Sample:
                message = self._messages[turn % self.num_requests]
                started = time.perf_counter()
                _, state = method.with_call(message, timeout=TIMEOUT_S, wait_for_ready=True)
                seconds = time.perf_counter() - started
                metadata = dict(state.trailing_metadata() or ())
                timing = metadata.get("server-timing", "")
                return Sample(seconds, backend_seconds(f"\r\nserver-timing: {timing}".encode()))

            yield call
