"""A bare HTTP echo, whose time is that of sockets, processes and loops alone.

`app` is an ASGI application: it reads the whole body of `POST /{n}` and answers n random bytes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any

Message = MutableMapping[str, Any]


@cache
def payload(size: int) -> bytes:
    return os.urandom(size)


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Answers `GET /health/ready` too, so that `running` can wait for it."""
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
