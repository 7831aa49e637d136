"""A scripted service for client tests: a transport that either client sends by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
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


class Awaited:
    """An `AsyncClient` whose calls are run in a loop of its own, one after the other."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner | None = None) -> None:
        self.client, self.runner = client, runner or asyncio.Runner()

    def with_options(self, **options: Any) -> Awaited:
        return Awaited(self.client.with_options(**options), self.runner)

    def __getattr__(self, name: str) -> Any:
        async def awaited(made: Any) -> Any:
            return await made

        def call(*args: Any, **kwargs: Any) -> Any:
            made = getattr(self.client, name)(*args, **kwargs)
            if isinstance(made, AsyncIterator):
                return iter(lambda: self.runner.run(awaited(anext(made))), None)
            return self.runner.run(awaited(made))

        return call

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def client_of(kind: Kind, *args: Any, script: Script | None = None, **options: Any) -> Any:
    """A client of that kind; its methods block. Its transport plays a script where it has one."""
    if kind == "sync":
        return Client(*args, transport=script and Blocking(script), **options)
    return Awaited(AsyncClient(*args, transport=script and Awaiting(script), **options))


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
    with client_of(kind, script=script, retries=retries) as client:
        return getattr(client.with_options(deadline=deadline), name)(*args, **kwargs)


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


def attended(
    rows: int = 1, value: float = 1.0, dtype: Any = np.float16, lengths: Any = (), **headers: str
) -> Scripted:
    """An answer that attention may read, and with `lengths` an append too."""
    fields = {"lse_base": "e", "levels": 1, "cascade": False}
    arrays = {
        "o": np.full((rows, 4, 8), value, dtype),
        "lse": np.full((rows, 4), value, np.float32),
    }
    return tensor_answer(fields | ({"lengths": lengths} if lengths else {}), arrays, **headers)
