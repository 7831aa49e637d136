"""A scripted service for client tests, spoken to by either client through httpx.MockTransport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import httpx
import numpy as np
import safetensors.numpy
from attnd import AsyncClient, Client, Retries
from numpy.typing import NDArray
from wire_messages import Message, read_safetensors

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


class Script:
    """Plays one step per request, the last one for ever: a response, or an exception to raise."""

    def __init__(self, *steps: httpx.Response | Exception) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)

    def fields(self, i: int = -1) -> dict[str, Any]:
        """The JSON fields of a request, whatever its media type."""
        fields: dict[str, Any] = self.message(i).fields
        return fields

    def message(self, i: int = -1) -> Message:
        request = self.requests[i]
        if "json" in request.headers["content-type"]:
            return Message(json.loads(request.content), {})
        return read_safetensors(request.content)


def ask(
    kind: Kind,
    script: Callable[[httpx.Request], httpx.Response],
    name: str,
    *args: Any,
    deadline: float | None = None,
    retries: Retries = QUICK,
    **kwargs: Any,
) -> Any:
    """Call one method of a client of that kind against the script."""
    if kind == "sync":
        with Client(transport=httpx.MockTransport(script), retries=retries) as client:
            return getattr(client.with_options(deadline=deadline), name)(*args, **kwargs)

    async def run() -> Any:
        async with AsyncClient(transport=httpx.MockTransport(script), retries=retries) as client:
            return await getattr(client.with_options(deadline=deadline), name)(*args, **kwargs)

    return asyncio.run(run())


def answer(fields: Any, status: int = 200, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=fields, headers=named)


def tensor_answer(
    fields: Any, arrays: Mapping[str, NDArray[Any]] = {}, **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = safetensors.numpy.save(dict(arrays), {"response": json.dumps(fields)})
    named["content-type"] = "application/vnd.safetensors"
    return httpx.Response(200, content=body, headers=named)


def problem(
    status: int, code: str, headers: Mapping[str, str] = {}, **numbers: Any
) -> httpx.Response:
    document = {
        "type": f"urn:attnd:error:{code}",
        "title": "A title",
        "status": status,
        "detail": "what happened",
        "code": code,
        **numbers,
    }
    content_type = {"content-type": "application/problem+json"}
    return httpx.Response(status, content=json.dumps(document), headers={**content_type, **headers})


def attended(rows: int = 1) -> httpx.Response:
    fields = {"lse_base": "e", "levels": 1, "cascade": False}
    o = np.ones((rows, 4, 8), np.float16)
    return tensor_answer(fields, {"o": o, "lse": np.zeros((rows, 4), np.float32)})
