"""The ZeroMQ door's sockets: what is new is published, what was missed is replayed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import zmq
import zmq.asyncio
from attnd.wire.frames import FrameError

from config.settings import Settings
from service.doors.kit.engine_calls import events_after
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import MakeUpstream
from service.doors.zmq.batches import END, payload, sequence
from service.errors import AttndError, NotReady
from service.operations.events import FROM_NOW
from service.tenants import OPEN, tenant_of

LOG: Final = logging.getLogger("attnd.zmq")
POLL_S: Final = 0.05
LAST_WORDS_MS: Final = 200
"""How long what was published last may take to go out."""
SEQUENCE_BYTES: Final = 8
MOST_BYTES: Final = 1024
"""Of what a subscriber sends; one that sends more is cut off."""


class Publisher:
    """Publishes one namespace's events until told to drain. `failed` says why it could not."""

    def __init__(
        self,
        settings: Settings,
        engine_socket: str,
        name: str,
        secret: str,
        make_upstream: MakeUpstream = Link,
    ) -> None:
        """`secret` is what tells the engine that this is a door."""
        self.settings = settings
        self.engine_socket = engine_socket
        self.name = name
        self.secret = secret
        self.make_upstream = make_upstream
        has_keys = settings.auth.keys_file is not None
        self.tenant = tenant_of(settings.cache.zmq_namespace, ["read"]) if has_keys else OPEN
        self.has_keys = has_keys
        self.topic = settings.cache.zmq_topic.encode()
        self.layout = settings.cache.zmq_layout
        self.failed = ""
        self.loop: asyncio.AbstractEventLoop | None = None

    async def serve(
        self, on_loop: Callable[[asyncio.AbstractEventLoop], object] | None = None
    ) -> None:
        """From the start to the end."""
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        if on_loop is not None:
            on_loop(self.loop)
        self.link = self.make_upstream(self.settings.server, self.has_keys, None)
        context = zmq.asyncio.Context()
        cache = self.settings.cache
        tasks: list[asyncio.Task[Any]] = []
        try:
            out = self.bound(context, zmq.PUB, cache.zmq_endpoint)
            asked = self.bound(context, zmq.ROUTER, cache.zmq_replay_endpoint)
            await self.link.connect(self.engine_socket, self.name, self.secret)
            tasks.append(self.loop.create_task(self.publish(out)))
            tasks.append(self.loop.create_task(self.replay(asked)))
            tasks.append(self.loop.create_task(self.ended.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (ConnectionError, FileNotFoundError) as error:
            # the engine could not start, and has said why: whoever started both ends the service
            LOG.debug("the engine at %s has gone: %s", self.engine_socket, error)
        except (OSError, zmq.ZMQError, NotReady, FrameError) as error:
            self.failed = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.link.close()
            context.destroy(linger=LAST_WORDS_MS)

    def bound(self, context: Any, kind: int, endpoint: str | None) -> Any:
        """A socket at the endpoint. Raises zmq.ZMQError with the endpoint's name."""
        sock = context.socket(kind)
        # a whole replay may wait for a client; beyond that messages are dropped
        sock.sndhwm = self.settings.cache.events_history + 1
        sock.maxmsgsize = MOST_BYTES
        if endpoint is None:
            return sock
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"{endpoint}: {error}") from None
        what = "events" if kind == zmq.PUB else "events that subscribers missed"
        LOG.info("%s over ZeroMQ at %s", what, endpoint)
        return sock

    def drain(self) -> None:
        """End; in the loop's thread."""
        self.ended.set()

    async def publish(self, out: Any) -> None:
        """Send what is new, until the engine takes no more calls."""
        last = FROM_NOW
        with suppress(NotReady):
            while True:
                page = await self.page(last)
                for event in page["events"]:
                    body = payload(event, time.time(), self.layout)
                    await out.send_multipart([self.topic, sequence(event["id"]), body])
                last = page["next"]
                if not page["events"]:
                    await asyncio.sleep(POLL_S)
        await self.ended.wait()

    async def page(self, last: int) -> dict[str, Any]:
        """Events from the engine; what cannot be asked now is asked again. Raises NotReady."""
        while True:
            self.link.ready()
            try:
                return await events_after(self.link, self.tenant, last)
            except NotReady:
                raise
            except (AttndError, ProblemText) as error:
                LOG.debug("the engine does not tell its events: %s", error)
            await asyncio.sleep(POLL_S)

    async def replay(self, asked: Any) -> None:
        """Answer who asks for the events from a sequence on, one after the other."""
        if self.settings.cache.zmq_replay_endpoint is None:
            await self.ended.wait()
        while True:
            who, *rest = await asked.recv_multipart()
            if len(rest) == 2 and rest[0] == b"" and len(rest[1]) == SEQUENCE_BYTES:
                with suppress(NotReady, zmq.ZMQError):
                    await self.tell(asked, who, int.from_bytes(rest[1], "big"))

    async def tell(self, asked: Any, who: bytes, first: int) -> None:
        """Send all that is kept from a sequence on, and the end."""
        last = min(max(0, first - 1), 2**53 - 1)
        while True:
            page = await self.page(last)
            for event in page["events"]:
                if event["id"] >= first:
                    body = payload(event, time.time(), self.layout)
                    await asked.send_multipart([who, b"", sequence(event["id"]), body])
            last = page["next"]
            if not page["events"]:
                break
        await asked.send_multipart([who, b"", END, b""])
