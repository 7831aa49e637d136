"""The ZeroMQ door's sockets: one publishes new events, one replays missed ones."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Literal, Protocol

import msgspec
import zmq
import zmq.asyncio

from config.sections import Settings
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.doors.kit.process import Setup, connect
from service.doors.kit.upstream import events_after
from service.errors import AttndError, NotReady
from service.tenants import OPEN, Tenant, tenant_of

Layout = Literal["map", "array"]
"""An event's layout: named fields, or fields by position after the type's name."""
POOL: Final = "GPU"
"""vLLM's name of the memory that attention reads, and so of events without a medium."""
GROUP: Final = 0
"""vLLM's number of a KV cache group. A pool without layer groups is one."""
KIND: Final = "full_attention"
"""vLLM's name of such a group's cache."""
WINDOW: Final = "kv_cache_spec_sliding_window"
"""vLLM's name of the window of a group that has one."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


def payload(event: dict[str, Any], layout: Layout) -> bytes:
    """One event as a batch: [timestamp, [events], rank]. An event without a counterpart in
    vLLM is an empty batch, so that no sequence number is missing."""
    fields = fields_of(event)
    events = [] if fields is None else [fields if layout == "map" else list(fields.values())]
    return msgspec.msgpack.encode([event.get("time", time.time()), events, 0])


def fields_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event by the names of vLLM's fields, in the order of vLLM's arrays."""
    match event["type"]:
        case "stored":
            parent = event["parent_key"]
            # the key before a prompt's first page, without a salt
            root = blake2b(f"{event['namespace']}\0".encode(), digest_size=16).hexdigest()
            return {
                "type": "BlockStored",
                "block_hashes": hashes(event),
                "parent_block_hash": None if parent == root else bytes.fromhex(parent),
                "token_ids": event.get("token_ids", []),
                "block_size": event["page_size"],
                "lora_id": None,
                "medium": event.get("medium", POOL),
                "lora_name": None,
                "extra_keys": extra_keys(event),
                "group_idx": event.get("group_idx", GROUP),
                "kv_cache_spec_kind": event.get("kv_cache_spec_kind", KIND),
                **{name: event[name] for name in (WINDOW,) if name in event},
            }
        case "removed":
            return {
                "type": "BlockRemoved",
                "block_hashes": hashes(event),
                "medium": event.get("medium", POOL),
                "group_idx": event.get("group_idx", GROUP),
            }
        case "cleared":
            return {"type": "AllBlocksCleared"}
        case _:
            return None


def hashes(event: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(key) for key in event["page_keys"]]


def extra_keys(event: dict[str, Any]) -> list[list[list[Any]] | None] | None:
    """For each page its further keys with their tokens in it, as vLLM has the hashes of images."""
    if (every := event.get("extra_keys")) is None:
        return None
    return [page and [[one["key"], one["first_token"]] for one in page] for page in every]


def sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")


LOG: Final = logging.getLogger("attnd.zmq")
POLL_S: Final = 0.05
JOIN_S: Final = 1.0
"""Least time between two repetitions of all events for new subscribers."""
QUIET_S: Final = 1.0
"""Time after the last event until an empty batch repeats its number, so that a gap shows."""
LEAST_WAITING: Final = 16_384
"""Messages that may wait for a subscriber, at least."""
LINGER_MS: Final = 200
"""Time for the last events to be sent."""
SEQUENCE_BYTES: Final = 8
MAX_SUBSCRIPTIONS: Final = 10_000
"""Of all subscribers together; each has one."""
CHANGES: Final = {b"\x01": 1, b"\x00": -1}
"""How a message to a publisher changes the number of subscriptions, by its first byte."""
BIND_S: Final = 0.01
MAX_BYTES: Final = 1024
"""Longest message of a subscriber; one that sends more is disconnected."""


class EventSource(Protocol):
    """Where the events come from."""

    async def connect(self, path: str, name: str, secret: str) -> None: ...

    async def after(self, tenant: Tenant, last: int) -> dict[str, Any]:
        """The reply of `events` after a number. Raises NotReady where there will be no more, else
        AttndError, ProblemText, OSError, ValueError."""

    def close(self) -> None: ...


class EngineEvents:
    """The one engine of a service."""

    def __init__(self, settings: Settings, has_keys: bool) -> None:
        self.link = Link(settings.server, has_keys)
        self.connect, self.close = self.link.connect, self.link.close

    async def after(self, tenant: Tenant, last: int) -> dict[str, Any]:
        self.link.ready()
        return await events_after(self.link, tenant, last)


class ZmqServer:
    """Publishes one namespace's events until drained. `failed` says why it could not."""

    def __init__(
        self, setup: Setup, make_source: Callable[[Settings, bool], EventSource] = EngineEvents
    ) -> None:
        """`make_source` gets the settings, and whether the service has keys."""
        settings = setup.settings
        self.setup = setup
        self.make_source = make_source
        self.cache = settings.cache
        self.has_keys = settings.auth.keys_file is not None
        self.tenant = tenant_of(self.cache.zmq_namespace, ["read"]) if self.has_keys else OPEN
        self.failed = ""
        self.is_joined = False
        """Whether there are subscribers who may have missed events."""
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.setup.on_loop(loop, self)
        self.source = self.make_source(self.setup.settings, self.has_keys)
        context = zmq.asyncio.Context()
        tasks: list[asyncio.Task[Any]] = []
        try:
            self.out = self.bound(context, zmq.XPUB, self.cache.zmq_endpoint)
            replies = self.bound(context, zmq.ROUTER, self.cache.zmq_replay_endpoint)
            failed = await connect(self.setup, self.source)
            if failed is None:
                work = (
                    self.publish(),
                    self.limit_subscriptions(context),
                    self.replay(replies),
                    self.ended.wait(),
                )
                tasks += [loop.create_task(one) for one in work]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            self.failed = failed or ""
        except zmq.ZMQError as error:
            self.failed = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.source.close()
            context.destroy(linger=LINGER_MS)

    def bound(self, context: Any, kind: int, endpoint: str | None) -> Any:
        """A socket at the endpoint. Raises zmq.ZMQError with the endpoint's name."""
        sock = context.socket(kind)
        # all that is kept may wait for a subscriber; beyond that messages are dropped
        sock.sndhwm = max(self.cache.events_history, LEAST_WAITING) + 1
        sock.maxmsgsize = MAX_BYTES
        if kind == zmq.XPUB:
            sock.setsockopt(zmq.XPUB_VERBOSER, 1)  # reports every subscription and its end
        if endpoint is None:
            return sock
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            sock.close(linger=0)
            raise zmq.ZMQError(error.errno, f"{endpoint}: {error}") from None
        purpose = "events" if kind == zmq.XPUB else "replays of events"
        LOG.info("%s over ZeroMQ at %s", purpose, endpoint)
        return sock

    def drain(self) -> None:
        """End; in the loop's thread."""
        self.ended.set()

    def read_again(self) -> None:
        """Nothing: the door's namespace is a setting, not a key's."""

    async def limit_subscriptions(self, context: Any) -> None:
        """Disconnect all subscribers when they have too many subscriptions, which take memory:
        ZeroMQ does not say whose they are. Subscribers connect again."""
        while True:
            count = 0
            while count <= MAX_SUBSCRIPTIONS:
                change = CHANGES.get((await self.out.recv())[:1], 0)
                count += change
                self.is_joined |= change > 0
            LOG.warning(
                "more than %d subscriptions at %s: all subscribers are disconnected",
                MAX_SUBSCRIPTIONS,
                self.cache.zmq_endpoint,
            )
            self.out.close(linger=0)
            while self.out.closed:
                await asyncio.sleep(BIND_S)
                with suppress(zmq.ZMQError):  # the system still closes the socket before
                    self.out = self.bound(context, zmq.XPUB, self.cache.zmq_endpoint)

    async def publish(self) -> None:
        """Send events, until the engine accepts no more calls: from the start on, and for new
        subscribers, all that are kept."""
        last, begun, sent = 0, -math.inf, math.inf
        with suppress(NotReady):
            while True:
                now = time.monotonic()
                if self.is_joined and now - begun > JOIN_S:
                    self.is_joined, last, begun = False, 0, now
                page = await self.page(last)
                if page["events"] or page["too_old"]:
                    sent = now
                elif now - sent > QUIET_S:  # a subscriber may have missed the last ones
                    page["events"], sent = [{"type": "quiet", "id": last}], math.inf
                for frames in self.messages(page):
                    while self.out.closed:
                        await asyncio.sleep(BIND_S)
                    await self.out.send_multipart(frames)
                last = page["next"]
                if not page["events"]:
                    await asyncio.sleep(POLL_S)
        await self.ended.wait()

    def messages(self, page: dict[str, Any]) -> Iterator[list[bytes]]:
        """Topic, number and batch of each event; the first one is `AllBlocksCleared` where those
        before are not known."""
        events, topic = page["events"], self.cache.zmq_topic.encode()
        if page["too_old"]:
            events = [{"type": "cleared", "id": page["next"] - len(events)}, *events]
        for event in events:
            yield [topic, sequence(event["id"]), payload(event, self.cache.zmq_layout)]

    async def page(self, last: int) -> dict[str, Any]:
        """Events from the engine after a number, or with 0 as if others were dropped before;
        retries after an error. Raises NotReady."""
        while True:
            try:
                page = await self.source.after(self.tenant, last)
                return page | {"too_old": page["too_old"] or not last}
            except NotReady:
                raise
            except (AttndError, ProblemText, OSError, ValueError) as error:
                LOG.debug("there are no events: %s", error)
            await asyncio.sleep(POLL_S)

    async def replay(self, replies: Any) -> None:
        """Serve subscribers' requests for the events from a sequence number on, one by one."""
        if self.cache.zmq_replay_endpoint is None:
            await self.ended.wait()
        while True:
            subscriber, *rest = await replies.recv_multipart()
            if len(rest) == 2 and rest[0] == b"" and len(rest[1]) == SEQUENCE_BYTES:
                with suppress(NotReady, zmq.ZMQError):
                    await self.send_from(replies, subscriber, int.from_bytes(rest[1], "big"))

    async def send_from(self, replies: Any, subscriber: bytes, first: int) -> None:
        """Send a subscriber every event from a sequence number on, and the end mark: from 0, or a
        number that is not kept, all that are kept."""
        last = min(max(0, first - 1), 2**53 - 1)
        while True:
            page = await self.page(last)
            for frames in self.messages(page):
                await replies.send_multipart([subscriber, b"", *frames])
            last = page["next"]
            if not page["events"]:
                break
        await replies.send_multipart([subscriber, b"", b"", END, b""])
