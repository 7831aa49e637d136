"""The HTTP door as an ASGI application: its lifespan opens the door, and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from service.doors.http.dispatch import Dispatcher
from service.doors.http.door import Door
from service.doors.http.exchange import Receive, Scope, Send
from service.doors.kit.hosts import HostRule
from service.doors.kit.ledger import make_tracing
from service.doors.kit.process import DRAINING, Setup, connect
from service.keys import make_authenticator


class Application:
    """One door; `failed` says why it could not serve."""

    def __init__(self, setup: Setup, on_failed: Callable[[], object] = lambda: None) -> None:
        """`on_failed` is called when the engine cannot be reached.

        Raises KeysError, TracingError.
        """
        self.setup = setup
        self.on_failed = on_failed
        self.authenticator = make_authenticator(setup.settings.auth, setup.read_file)
        self.tracing = make_tracing(setup.settings.log.otlp_endpoint, setup.name)
        self.failed = ""
        self.door: Door
        self.dispatcher: Dispatcher
        self.connecting: asyncio.Task[None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.dispatcher.serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await receive()
            self.open()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.door.drain(DRAINING)
            await self.close()
            await send({"type": "lifespan.shutdown.complete"})

    def open(self) -> None:
        """Make the door, and connect it to the engine; on its event loop."""
        settings = self.setup.settings
        self.door = Door(
            settings.server,
            self.setup.metrics,
            self.authenticator,
            self.tracing,
            self.setup.make_upstream,
            HostRule(settings),
            settings.pool,
        )
        self.dispatcher = Dispatcher(self.door)
        self.connecting = asyncio.get_running_loop().create_task(self.connect())

    async def connect(self) -> None:
        failed = await connect(self.setup, self.door.link)
        if failed is not None:
            self.failed = failed
            self.on_failed()

    async def close(self) -> None:
        self.connecting.cancel()
        with suppress(asyncio.CancelledError):
            await self.connecting
        self.door.close()
        if self.tracing is not None:
            await self.tracing.close()
