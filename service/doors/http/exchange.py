"""One request and its response: the headers that matter, its clock, and how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

from attnd.wire.frames import NO_STAGES

from service.doors.http.bodies import Body
from service.doors.kit.headers import (
    JSON,
    SAFETENSORS,
    deadline_us_of,
    request_id_of,
    traceparent_of,
)
from service.errors import AttndError, UnsupportedMediaType, without_frames
from service.road.caller_end.slots import Slot
from service.tenants import OPEN

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
CONNECTION: Final = "attnd.connection"
"""The key of a scope's `Connection`, which reports that the client has left; other servers' scopes
have none."""
EXCHANGE: Final = "attnd.exchange"
"""The key of a scope's `Exchange`, once there is one."""


class ClientConnection(Protocol):
    """A connection, to a door: `exchange` is the request whose client it watches."""

    exchange: Exchange | None
    transport: asyncio.Transport

    @property
    def address(self) -> str: ...
    @property
    def idle_until(self) -> float: ...


class Exchange:
    """The facts in a request's head, and how the request ended."""

    def __init__(self, scope: Scope) -> None:
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.op = "unknown"
        self.status = 0
        self.code = "ok"
        self.stages: Sequence[float] = NO_STAGES
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.connection: ClientConnection | None = scope.pop(CONNECTION, None)
        self.client: tuple[str, int] | None = scope["client"]
        self.receive: Receive
        self.send: Send
        self.task: asyncio.Task[Any] | None = None
        self.watching: asyncio.Task[None] | None = None
        self.caller = ""
        """Whose share of the arena the body takes."""
        self.body: Body | None = None
        """A large body, or one in several parts, until it is whole."""
        self.failure: AttndError | None = None
        """Why the body will not arrive whole."""
        self.slot: Slot | None = None
        """Holds the request's image."""
        self.is_answered = self.is_disconnected = self.is_whole = False
        """`is_whole`: the body was received to its end."""
        self.tenant = OPEN
        self.refusal: AttndError | None = None
        """Why the request has no tenant: only endpoints without a key respond."""
        self.deadline_us = 0
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.content_length: int | None = None
        self.media_type = self.accepted = ""
        """`Content-Type` in lower case without parameters; the first of JSON and safetensors in
        `Accept`, empty for none: the media type of the request."""
        self.content_encoding = self.authorization = self.last_event_id = self.traceparent = b""
        """The content encoding is empty for `identity`, too."""
        self.request_id = b""
        self.read_headers(scope["headers"])
        self.request_id = request_id_of(self.request_id)

    def read_headers(self, raw: Sequence[tuple[bytes, bytes]]) -> None:
        """Of a header that is repeated the last one counts."""
        for name, value in raw:
            match name:
                case b"host":
                    self.host = value
                case b"content-length":
                    self.content_length = int(value)
                case b"content-type":
                    self.media_type = value.split(b";", 1)[0].strip().lower().decode("latin-1")
                case b"accept":
                    if value != b"*/*":
                        self.accepted = first_accepted(value)
                case b"authorization":
                    self.authorization = value
                case b"x-request-id":
                    self.request_id = value
                case b"x-attnd-deadline-ms":
                    self.deadline = value
                case b"traceparent":
                    self.traceparent = traceparent_of(value)
                case b"origin":
                    self.origin = value
                case b"content-encoding":
                    self.content_encoding = b"" if value.lower() == b"identity" else value
                case b"last-event-id":
                    self.last_event_id = value

    deadline: bytes | None = None
    """The header `X-Attnd-Deadline-Ms`."""

    @property
    def peer(self) -> str:
        """The client's address and port, for the log."""
        return "unix" if self.client is None else f"{self.client[0]}:{self.client[1]}"

    @property
    def address(self) -> str:
        """The client's address."""
        return "unix" if self.client is None else self.client[0]

    def read_deadline(self) -> None:
        """Set `deadline_us` from the header. Raises InvalidRequest."""
        if self.deadline is not None:
            self.deadline_us = deadline_us_of(self.deadline)

    def check_media_type(self, known: Sequence[str]) -> None:
        """Raises UnsupportedMediaType for a body of another media type, or an encoded one."""
        if self.media_type not in known:
            text = (
                f"Content-Type is {self.media_type[:100] or 'missing'}: send {' or '.join(known)}"
            )
            raise UnsupportedMediaType(text, supported=list(known))
        if self.content_encoding:
            encoding = self.content_encoding.decode("latin-1")[:100]
            raise UnsupportedMediaType(f"Content-Encoding is {encoding}: send the body unencoded")

    def refuse(self, error: AttndError) -> None:
        """Set the refusal."""
        self.refusal = without_frames(error)

    def fail(self, error: AttndError) -> None:
        """The body came too late, or the door drains: `read_body` raises this."""
        self.failure = error
        if self.task is not None:
            self.task.cancel()

    def hang_up(self) -> None:
        """The client has left: cancel its request."""
        self.is_disconnected = True
        if self.task is not None:
            self.task.cancel()

    def watch(self) -> None:
        """From now on the request ends when its client leaves. Its body has been read."""
        if self.connection is None and self.watching is None:
            self.watching = asyncio.get_running_loop().create_task(self.wait_for_disconnect())

    async def wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.hang_up()


def first_accepted(accept: bytes) -> str:
    """The first media type of `Accept` that operations answer in; empty for none."""
    for part in accept.lower().split(b","):
        name = part.split(b";", 1)[0].strip().decode("latin-1")
        if name in (JSON, SAFETENSORS):
            return name
    return ""
