"""tritonclient, unmodified, as the tests call it: one face over its HTTP and its gRPC client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from http_messages import LAYERS, rows
from http_service import SECRET, Service
from tritonclient.utils import np_to_triton_dtype

from service.doors.grpc.server import Server
from service.doors.kit.process import Setup
from service.metrics import Metrics
from tests.harness.waiting import WAIT_S, wait_for


@dataclass
class Triton:
    """A client and its module, `tritonclient.http` or `tritonclient.grpc`."""

    module: Any
    client: Any

    def input(self, name: str, array: Any, **how: Any) -> Any:
        made = self.module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array, **how)
        return made

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        options: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields and tensors of an answer; lists and objects go as JSON, and come so."""
        given = [self.input(name, array) for name, array in (inputs or {}).items()]
        parameters = {
            name: json.dumps(value) if isinstance(value, (list, dict)) else value
            for name, value in fields.items()
        }
        result = self.client.infer(model, given, parameters=parameters, **(options or {}))
        reply = result.get_response()
        if self.module is tritonclient.http:
            names = [one["name"] for one in reply["outputs"]]
            answered = reply.get("parameters", {})
        else:
            names = [one.name for one in reply.outputs]
            answered = {
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in reply.parameters.items()
            }
        spelled = {name: unspell(value) for name, value in answered.items()}
        return spelled, {name: result.as_numpy(name) for name in names}


def unspell(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value


def http_client(service: Service) -> Triton:
    url = service.url.removeprefix("http://")
    return Triton(tritonclient.http, tritonclient.http.InferenceServerClient(url))


def grpc_client(server: Server) -> Triton:
    url = f"127.0.0.1:{server.port}"
    return Triton(tritonclient.grpc, tritonclient.grpc.InferenceServerClient(url))


@contextmanager
def grpc_door(service: Service) -> Iterator[Server]:
    """A gRPC door of a running service, in a thread; drained at the end."""
    path, metrics = service.engine_socket, Metrics("grpc-0")
    server = Server(Setup(service.settings, metrics, path, "grpc-0", SECRET))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(0)), name="grpc")
    thread.start()
    try:
        wait_for(
            lambda: server.door is not None and server.door.link.state[0] == "ready",
            "the gRPC door",
        )
        yield server
    finally:
        if server.loop is not None and thread.is_alive():
            server.loop.call_soon_threadsafe(server.drain)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the gRPC door did not stop"
        assert not server.failed, server.failed


def fill(triton: Triton, rng: np.random.Generator, name: str, n: int) -> tuple[Any, Any]:
    """A sequence of n tokens at every layer; its k and v at layer 1."""
    triton.infer("create_sequences", sequences=[{"id": name}])
    for layer in range(LAYERS):
        k, v = rows(rng, n), rows(rng, n)
        indptr = np.array([0, n], np.int32)
        reply, _ = triton.infer(
            "append",
            {"k": k, "v": v, "append_indptr": indptr},
            layer=layer,
            sequences=[name],
            offsets=[0],
        )
        assert reply == {"lengths": [n]}
    return k, v
