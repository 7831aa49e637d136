"""A scripted service for client tests: a transport that either client sends by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
from attnd import AsyncClient, Client, Retries
from attnd.http.messages import Request, Response
from attnd.wire import images
from numpy.typing import NDArray

Kind = Literal["sync", "async"]
KINDS: tuple[Kind, ...] = ("sync", "async")
QUICK = Retries(attempts=3, first_wait_s=0.001, max_wait_s=0.01)
SEQUENCE = {
    "id": "a",
    "length": 5,
    "lengths": [5, 6],
    "pages": 2,
    "last_page_len": 1,
    "parent": None,
}


@dataclass(frozen=True, slots=True)
class Message:
    """A request's fields and arrays."""

    fields: dict[str, Any]
    tensors: dict[str, NDArray[Any]]


def read_safetensors(body: bytes) -> Message:
    """A request as the safetensors library reads it; the arrays must be aligned."""
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    assert start % 8 == 0
    arrays = {}
    for name, view in safetensors.deserialize(body):
        dtype = images.DTYPES[view["dtype"]]
        begin, _ = header[name]["data_offsets"]
        assert begin % dtype.itemsize == 0, f"{name} is not aligned"
        arrays[name] = np.frombuffer(view["data"], dtype).reshape(view["shape"])
    return Message(json.loads(header["__metadata__"]["request"]), arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Scripted:
    """An answer to play."""

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Script:
    """Plays one step per request, the last one for ever: an answer, or an exception to raise."""

    def __init__(self, *steps: Scripted | Exception) -> None:
        self.steps = list(steps)
        self.requests: list[Request] = []

    def play(self, request: Request) -> Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise type(step)(*step.args)
        content = np.frombuffer(bytearray(step.content), np.uint8)
        return Response(step.status, dict(step.headers), content)

    def content(self, i: int = -1) -> bytes:
        """The body of a request."""
        return b"".join(self.requests[i].body)

    def fields(self, i: int = -1) -> dict[str, Any]:
        """The JSON fields of a request, whatever its media type."""
        fields: dict[str, Any] = self.message(i).fields
        return fields

    def message(self, i: int = -1) -> Message:
        if "json" in self.requests[i].headers["content-type"]:
            return Message(json.loads(self.content(i)), {})
        return read_safetensors(self.content(i))


@dataclass(frozen=True, slots=True)
class Blocking:
    """A script as the transport of `Client`."""

    script: Script

    def send(self, request: Request) -> Response:
        return self.script.play(request)

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A script as the transport of `AsyncClient`."""

    script: Script

    async def send(self, request: Request) -> Response:
        return self.script.play(request)

    async def aclose(self) -> None:
        """There is nothing to close."""


def ask(
    kind: Kind,
    script: Script,
    name: str,
    *args: Any,
    deadline: float | None = None,
    retries: Retries = QUICK,
    **kwargs: Any,
) -> Any:
    """Call one method of a client of that kind against the script."""
    if kind == "sync":
        with Client(transport=Blocking(script), retries=retries) as client:
            return getattr(client.with_options(deadline=deadline), name)(*args, **kwargs)

    async def run() -> Any:
        async with AsyncClient(transport=Awaiting(script), retries=retries) as client:
            return await getattr(client.with_options(deadline=deadline), name)(*args, **kwargs)

    return asyncio.run(run())


def answer(fields: Any, status: int = 200, **headers: str) -> Scripted:
    reply = {"content-type": "application/json", **named(headers)}
    return Scripted(status, json.dumps(fields).encode(), reply)


def tensor_answer(fields: Any, arrays: Mapping[str, NDArray[Any]] = {}, **headers: str) -> Scripted:
    body = safetensors.numpy.save(dict(arrays), {"response": json.dumps(fields)})
    return Scripted(200, body, {**named(headers), "content-type": "application/vnd.safetensors"})


def named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def problem(status: int, code: str, headers: Mapping[str, str] = {}, **numbers: Any) -> Scripted:
    document = {
        "type": f"urn:attnd:error:{code}",
        "title": "A title",
        "status": status,
        "detail": "what happened",
        "code": code,
        **numbers,
    }
    content_type = {"content-type": "application/problem+json"}
    return Scripted(status, json.dumps(document).encode(), {**content_type, **headers})


def attended(rows: int = 1) -> Scripted:
    fields = {"lse_base": "e", "levels": 1, "cascade": False}
    o = np.ones((rows, 4, 8), np.float16)
    return tensor_answer(fields, {"o": o, "lse": np.zeros((rows, 4), np.float32)})
