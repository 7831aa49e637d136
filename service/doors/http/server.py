"""The HTTP door's server: uvicorn, on sockets that listen already, ended by a drain."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from service.doors.http.application import Application
from service.doors.http.connection import Connection
from service.doors.http.door import Door
from service.doors.kit.asgi import AsgiServer
from service.doors.kit.process import DRAINING, ENGINE_LATER_S, Setup
from service.doors.kit.tls import make_tls

LOOK_S: Final = 0.02
"""Between two looks at whether the accepted requests have their responses."""
LAST_BYTES_S: Final = 0.2
"""Time for the last responses when the drain has taken all of its own."""


class HttpServer(AsgiServer):
    """Serves until it is drained. `failed` says why it could not serve."""

    def __init__(self, setup: Setup) -> None:
        """Raises KeysError, TlsError, TracingError."""
        limits = setup.settings.server
        self.setup = setup
        self.tls = make_tls(limits, setup.read_file)
        self.application = Application(setup, self.stop)
        super().__init__(self.application, limits, self.tls, Connection)
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def failed(self) -> str:
        return self.application.failed

    @property
    def door(self) -> Door:
        return self.application.door

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run([*self.setup.sockets])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.application.open()
        await super().startup(sockets)
        self.setup.on_loop(self.loop, self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if tasks := self.server_state.tasks:  # the drain has taken all of its time
            await asyncio.wait(tasks, timeout=LAST_BYTES_S)
        await self.application.close()

    def drain(self) -> None:
        """Accept no more requests, respond to the accepted ones, then end; in the loop's thread."""
        if self.loop is not None and not self.door.draining:
            for one in self.servers:
                one.close()
            self.door.drain(DRAINING)
            self.draining = self.loop.create_task(self.finish(self.loop))

    async def finish(self, loop: asyncio.AbstractEventLoop) -> None:
        ends = loop.time() + self.setup.settings.server.drain_timeout_s
        while self.door.active and loop.time() < ends + ENGINE_LATER_S:
            await asyncio.sleep(LOOK_S)
        left: Any = max(ends - loop.time(), LAST_BYTES_S)  # a float will do
        self.config.timeout_graceful_shutdown = left
        self.stop()

    def stop(self) -> None:
        self.should_exit = True

    def read_again(self) -> None:
        """Read keys and certificate again; in the loop's thread."""
        if self.application.authenticator is not None:
            self.application.authenticator.read_again()
        if self.tls is not None:
            self.tls.read_again()
