"""A service on a real socket in a thread of the test's process, and plain ways to talk to it.

`TEST_BACKEND=cuda` runs every test of this directory on a GPU, with an fp16 pool.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import safetensors.numpy

from config.settings import load_settings
from kernels import make_backend
from kernels.backend import NUMPY_DTYPES, Backend
from service.__main__ import Server, make_server
from service.engine.pool import geometry

KIND: Final = os.environ.get("TEST_BACKEND", "cpu")
POOL_DTYPE: Final = "fp32" if KIND == "cpu" else "fp16"
WIRE_DTYPE: Final = np.dtype(NUMPY_DTYPES[POOL_DTYPE])
WIRE_NAME: Final = {"fp32": "F32", "fp16": "F16"}[POOL_DTYPE]
O_TOLERANCE: Final = {"fp32": 1e-5, "fp16": 1e-3}[POOL_DTYPE]
LSE_TOLERANCE: Final = 1e-3
LAYERS, KV_HEADS, QO_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 2, 4, 64, 4, 64
SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
WAIT_S: Final = 20.0
SPELLED: Final = {"Infinity": np.inf, "-Infinity": -np.inf, "NaN": np.nan}
DTYPES: Final = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "F64": np.dtype(np.float64),
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ARGUMENTS: Final = (
    *("--backend.kind", KIND),
    *("--pool.num-layers", str(LAYERS)),
    *("--pool.num-kv-heads", str(KV_HEADS)),
    *("--pool.head-dim", str(HEAD_DIM)),
    *("--pool.page-size", str(PAGE_SIZE)),
    *("--pool.num-pages", str(PAGES)),
    *("--pool.dtype", POOL_DTYPE),
)


class GatedBackend:
    """A real backend whose attention waits at the gate while a test has it closed."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(self, requests: Any) -> Any:
        self.entered.set()
        if not self.gate.wait(WAIT_S):
            raise RuntimeError("nobody opened the gate")
        return self.inner.attend(requests)


@dataclass
class Service:
    """A running service."""

    server: Server
    thread: threading.Thread
    backend: GatedBackend
    url: str

    @property
    def engine(self) -> Any:
        return self.server.engine

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    def drain(self) -> None:
        assert self.server.loop is not None
        self.server.loop.call_soon_threadsafe(self.server.begin_drain)


@contextmanager
def serving(*arguments: str) -> Iterator[Service]:
    """A ready service with these settings on top of the tests' own; poisoned pool."""
    settings = load_settings([*ARGUMENTS, "--server.port", "0", *arguments])
    made: list[GatedBackend] = []

    def make() -> Any:
        pool = geometry(settings.pool, settings.pool.num_pages or PAGES)
        made.append(GatedBackend(make_backend(settings.backend.kind, pool, poison=True)))
        return made[0]

    server = make_server(settings, make)
    thread = threading.Thread(target=server.run, name="service")
    thread.start()
    try:
        wait_for(lambda: server.started and server.engine.state != "starting", "the start")
        assert server.engine.state == "ready", server.engine.reason
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Service(server, thread, made[0], f"http://127.0.0.1:{port}")
    finally:
        if made:
            made[0].gate.set()
        if server.loop is not None and thread.is_alive():
            server.loop.call_soon_threadsafe(server.begin_drain)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the service did not stop"


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.005)


# Bodies, written and read without the service's own code.


def write_body(media: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> bytes:
    if media == SAFETENSORS:
        dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        return bytes(safetensors.numpy.save(dense, {"request": json.dumps(fields)}))
    spelled = {name: spell(array) for name, array in tensors.items()}
    return json.dumps({**fields, "tensors": spelled}).encode()


def spell(array: Any) -> dict[str, Any]:
    flat = array.reshape(-1)
    data = flat.tolist()
    if array.dtype.kind not in "bui":
        names = {np.inf: "Infinity", -np.inf: "-Infinity"}
        data = [names.get(value, value) for value in flat.astype(np.float64).tolist()]
    return {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data": data}


def read_body(response: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of an answer in either media type."""
    if response.headers["content-type"] == SAFETENSORS:
        (length,) = struct.unpack("<Q", response.content[:8])
        header = json.loads(response.content[8 : 8 + length])
        return json.loads(header["__metadata__"]["response"]), dict(
            safetensors.numpy.load(response.content)
        )
    fields = response.json()
    return fields, {name: unspell(one) for name, one in fields.pop("tensors", {}).items()}


def unspell(one: dict[str, Any]) -> Any:
    data = [SPELLED[value] if isinstance(value, str) else value for value in one["data"]]
    return np.array(data, np.float64).astype(DTYPES[one["dtype"]]).reshape(one["shape"])


def post(
    client: httpx.Client,
    path: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    media: str = SAFETENSORS,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    body = write_body(media, fields, tensors or {})
    return client.post(path, content=body, headers={"content-type": media, **(headers or {})})


def ask(
    client: httpx.Client,
    path: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    media: str = SAFETENSORS,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of an answer that must be 200."""
    response = post(client, path, fields, tensors, media)
    assert response.status_code == 200, response.text
    return read_body(response)


def create(client: httpx.Client, *sequences: Mapping[str, Any] | str) -> list[dict[str, Any]]:
    new = [{"id": one} if isinstance(one, str) else dict(one) for one in sequences]
    response = client.post("/v1/sequences", json={"sequences": new})
    assert response.status_code == 201, response.text
    made: list[dict[str, Any]] = response.json()["sequences"]
    return made


def rows(rng: np.random.Generator, n: int, heads: int = KV_HEADS) -> Any:
    """Unit-normal `[n, heads, HEAD_DIM]` in the wire's dtype."""
    return rng.standard_normal((n, heads, HEAD_DIM)).astype(WIRE_DTYPE)


def append(client: httpx.Client, layer: int, name: str, k: Any, v: Any) -> dict[str, Any]:
    fields = {"layer": layer, "sequences": [name], "append_indptr": [0, len(k)]}
    return ask(client, "/v1/append", fields, {"k": k, "v": v})[0]


def check_problem(response: httpx.Response, status: int, code: str, **numbers: Any) -> Any:
    """The response is this error, as problem+json, with these numbers in it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == code, problem
    assert problem["status"] == status, problem
    assert problem["type"] and problem["title"] and problem["detail"], problem
    assert {name: problem.get(name) for name in numbers} == numbers, problem
    check_common_headers(response)
    return problem


def check_common_headers(response: httpx.Response) -> None:
    assert response.headers["x-request-id"]
    stages = [entry.split(";")[0].strip() for entry in response.headers["server-timing"].split(",")]
    assert stages == ["queue", "plan", "copy-in", "kernel", "copy-out", "encode"]
