"""An ASGI application's server and request bodies: uvicorn without signals, whole bodies with a
limit and a deadline, and clients that hang up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from config.server import ServerSettings
from service.doors.kit.process import descriptors
from service.doors.kit.tls import Tls
from service.errors import BodyTooLarge, RequestTimeout

T = TypeVar("T")


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


async def read_whole(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a request. Raises BodyTooLarge, RequestTimeout, and CancelledError where the
    client has left."""
    declared = request.headers.get("content-length", "")
    size, chunks = int(declared) if declared.isdigit() else 0, []
    try:
        async with asyncio.timeout(seconds):
            if size <= limit:
                size = 0
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        break
                    chunks.append(chunk)
    except ClientDisconnect:
        raise asyncio.CancelledError from None
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
    if size > limit:
        text = f"the body is {size} bytes or more, the limit is {limit}"
        raise BodyTooLarge(text, size=size, limit=limit)
    return b"".join(chunks)


async def send_whole(send: Any, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A response; returns when all but some kilobytes are sent."""
    lines = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    lines.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body"})  # waits for the client to read


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the request's client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        task.cancel()
        gone.cancel()
