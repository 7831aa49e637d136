"""An ASGI application's server and request bodies: uvicorn without signals, whole bodies with a
limit and a deadline, and clients that hang up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from config.server import ServerSettings
from service.doors.kit.process import descriptors
from service.doors.kit.tls import Tls
from service.errors import BodyTooLarge, RequestTimeout

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
UNREAD_BYTES: Final = 64 * 2**10
"""Of a response, that the transport takes before the client reads."""


class AsgiServer(uvicorn.Server):
    """uvicorn on sockets that listen already; its process handles the signals."""

    def __init__(
        self,
        application: Any,
        limits: ServerSettings,
        tls: Tls | None,
        protocol: type[HttpToolsProtocol] | None = None,
    ) -> None:
        """`protocol` limits its connections itself, and the application its drain."""
        most, spare = descriptors()
        config = uvicorn.Config(
            application,
            http=protocol or "httptools",
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=None if protocol else min(limits.max_connections, most - spare),
            timeout_keep_alive=max(1, round(limits.idle_timeout_s)),
            timeout_graceful_shutdown=max(1, round(limits.drain_timeout_s)),
        )
        super().__init__(config)
        config.load()
        config.ssl = None if tls is None else tls.context

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():
            if one.family != socket.AF_UNIX:  # connections inherit it: head and body are two writes
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def read_whole(scope: Any, receive: Receive, limit: int, seconds: float) -> bytes:
    """The body of a request. Raises BodyTooLarge, RequestTimeout, and CancelledError where the
    client has left."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    size, pieces, has_more = int(declared) if declared.isdigit() else 0, list[bytes](), True
    try:
        async with asyncio.timeout(seconds):
            if size <= limit:
                size = 0
            while has_more and size <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                pieces.append(message.get("body", b""))
                size, has_more = size + len(pieces[-1]), message.get("more_body", False)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
    if size > limit:
        text = f"the body is {size} bytes or more, the limit is {limit}"
        raise BodyTooLarge(text, size=size, limit=limit)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def send_whole(send: Any, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A response; returns when all but some kilobytes are sent."""
    lines = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    lines.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    is_long = len(body) > UNREAD_BYTES
    await send({"type": "http.response.body", "body": body, "more_body": is_long})
    if is_long:
        await send({"type": "http.response.body"})  # waits for the client to read


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of the work, whose task is cancelled when the request's client hangs up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if task is not None:
            task.cancel()

    watching = loop.create_task(watch())
    try:
        return await work
    finally:
        watching.cancel()
