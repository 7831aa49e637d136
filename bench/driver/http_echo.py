"""A bare ASGI application: reads the whole body of `POST /{n}` and answers n random bytes.

What it takes is what uvicorn and the socket take; what the service takes beyond it is its own.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any

Message = MutableMapping[str, Any]


@cache
def payload(size: int) -> bytes:
    """`size` random bytes, made once."""
    return os.urandom(size)


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """`GET /health/ready` is answered too, so that it is awaited like the service."""
    ready = scope["path"] == "/health/ready"
    body = payload(0 if ready else int(scope["path"][1:]))
    while (await receive()).get("more_body", False):
        pass
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
