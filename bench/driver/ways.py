"""Ways into the service: raw HTTP, raw frames, the client package, the Open Inference Protocol."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from bench.cases.loads import Decode, Request
from bench.driver import oip
from bench.driver.calls import BACKEND_STAGES, Call, Sample, Way
from bench.driver.raw import FrameConnection, HttpConnection, http_request

Kind = Literal[
    "http",
    "client",
    "road",
    "session",
    "session_in_place",
    "oip_http",
    "oip_grpc",
    "kernels",
    "process",
]
ALONE: Final = ("kernels", "process")
"""Decode steps on a GPU without a service: bench/driver/in_process.py."""


@dataclass(frozen=True, slots=True)
class Target:
    """A way and its address: a port of HTTP or gRPC, or the engine's socket.

    `path` replaces the operation's path, for an echo.
    """

    kind: Kind
    port: int = 0
    socket: str = ""
    path: str = ""


class RawWay:
    """Bytes that are prepared once, over plain sockets."""

    def __init__(self, target: Target, load: Decode) -> None:
        requests = load.requests()
        self.num_requests = len(requests)
        self._target = target
        self._operation = requests[0].operation
        self._answer_bytes = max(request.answer_bytes for request in requests)
        if target.kind == "oip_http":
            self._requests = [oip.http_request(request) for request in requests]
        elif target.kind == "http":
            path = target.path or f"/v1/{self._operation}"
            self._requests = [http_request(path, request.image()) for request in requests]
        else:
            self._requests = [request.image() for request in requests]

    @contextmanager
    def connected(self) -> Iterator[Call]:
        target, requests, size = self._target, self._requests, self._answer_bytes
        if target.kind == "road":
            with closing(
                FrameConnection(target.socket, self._operation, requests, size)
            ) as session:
                yield session.call
        else:
            with closing(HttpConnection(target.port, requests, size)) as connection:
                yield connection.call


class PackageWay:
    """Decodes by `attnd.Client` or `attnd.Session` of the version that this process imports."""

    def __init__(self, target: Target, load: Decode) -> None:
        self._target = target
        self._requests = load.requests()
        self.num_requests = len(self._requests)

    @contextmanager
    def connected(self) -> Iterator[Call]:
        attnd, target = importlib.import_module("attnd"), self._target
        if target.kind == "client":
            client: Any = attnd.Client(f"http://127.0.0.1:{target.port}")
        else:
            client = attnd.Session(target.socket)
        empty = client.empty if target.kind == "session_in_place" else None
        calls = [decode_arguments(request, empty) for request in self._requests]
        decode, num, clock = client.decode, len(calls), time.perf_counter

        def call(turn: int) -> Sample:
            layer, names, tensors = calls[turn % num]
            started = clock()
            answer = decode(layer, names, **tensors)
            seconds = clock() - started
            return Sample(seconds, backend_of(answer.meta.timings))

        with client:
            yield call


def decode_arguments(request: Request, empty: Any) -> tuple[int, list[str], dict[str, Any]]:
    """Layer, names and tensors of a decode; the tensors are in the arena with `empty`."""
    tensors = dict(request.tensors)
    if empty is not None:
        for name, tensor in request.tensors.items():
            tensors[name] = empty(name, tensor.shape, tensor.dtype)
            tensors[name][...] = tensor
    return request.fields["layer"], request.fields["sequences"], tensors


def backend_of(timings: Any) -> float:
    """Seconds of the backend's stages; older clients spell them with hyphens."""
    stages = {name.replace("-", "_"): seconds for name, seconds in timings.items()}
    return float(sum(stages.get(name, 0.0) for name in BACKEND_STAGES))


def make_way(target: Target, load: Decode) -> Way:
    """The way of a target's kind."""
    if target.kind in ("http", "road", "oip_http"):
        return RawWay(target, load)
    if target.kind == "oip_grpc":
        return oip.GrpcWay(target.port, load)
    if target.kind in ALONE:  # which imports CuPy
        made: Way = importlib.import_module("bench.driver.in_process").Alone(target.kind, load)
        return made
    return PackageWay(target, load)
