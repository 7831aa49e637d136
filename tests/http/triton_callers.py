"""tritonclient, unmodified, as the tests call it: one face over its HTTP and its gRPC client."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from http_messages import LAYERS, rows
from http_service import SECRET, Service
from tritonclient.utils import np_to_triton_dtype

from bench.driver.servers import free_port
from config.sections import OipSettings
from config.settings import load_settings
from service.doors.kit.process import Setup
from service.gateway.server import GatewayServer
from service.metrics import Metrics
from tests.harness.waiting import WAIT_S, wait_for


@dataclass
class Triton:
    """A client and its module, `tritonclient.http` or `tritonclient.grpc`."""

    module: Any
    client: Any

    def close(self) -> None:
        self.client.close()

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


@dataclass
class Gateway:
    """A running gateway, in a thread of this process."""

    server: GatewayServer

    @property
    def url(self) -> str:
        scheme = "http" if self.server.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self.server.settings.oip.http_port}"

    @property
    def grpc_port(self) -> int:
        port = self.server.settings.oip.grpc_port
        assert port is not None
        return port

    @property
    def core(self) -> Any:
        return self.server.gateway

    @property
    def link(self) -> Any:
        """Its session with the engine."""
        return self.core.upstream.link

    def http(self) -> AbstractContextManager[Triton]:
        address = self.url.partition("://")[2]
        return closing(Triton(tritonclient.http, tritonclient.http.InferenceServerClient(address)))

    def open_grpc(self) -> Triton:
        address = f"127.0.0.1:{self.grpc_port}"
        return Triton(tritonclient.grpc, tritonclient.grpc.InferenceServerClient(address))

    def grpc(self) -> AbstractContextManager[Triton]:
        return closing(self.open_grpc())

    def call_soon(self, act: Callable[[], object]) -> None:
        assert self.server.loop is not None
        self.server.loop.call_soon_threadsafe(act)


@contextmanager
def gateway_of(service: Service, *arguments: str, url: str = "") -> Iterator[Gateway]:
    """A gateway of a running service, at its engine or at `url`; drained at the end."""
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    given = load_settings(["--oip.http-port", "1", *arguments]).oip.model_dump() | ports
    settings = service.settings.model_copy(update={"oip": OipSettings(**given)})
    secret = "" if url else SECRET
    setup = Setup(settings, Metrics("oip-0"), service.engine_socket, "oip-0", secret)
    server = GatewayServer(setup, url)
    thread = threading.Thread(target=server.run, name="gateway")
    thread.start()
    try:
        wait_for(lambda: is_ready(server), "the gateway")
        yield Gateway(server)
    finally:
        if server.loop is not None and thread.is_alive():
            server.loop.call_soon_threadsafe(server.drain)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the gateway did not stop"
        assert not server.failed, server.failed


def is_ready(server: GatewayServer) -> bool:
    """Whether it listens on both ports, and has its session with the engine."""
    for port in (server.settings.oip.http_port, server.settings.oip.grpc_port):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return server.failed != ""
    upstream: Any = server.gateway and server.gateway.upstream
    return bool(server.url or (upstream and upstream.link.caller))


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
