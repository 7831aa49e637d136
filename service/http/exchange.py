"""One request and its answer: the headers that matter, its clock, its log line and its metrics."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from random import getrandbits
from time import perf_counter
from typing import Any, Final

from service.engine.operations import Timings
from service.errors import InvalidRequest, MalformedBody
from service.metrics import Metrics

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

ACCESS: Final = logging.getLogger("attnd.access")
REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
DEADLINE_HEADER: Final = "X-Attnd-Deadline-Ms"
MIN_DEADLINE_MS: Final = 1.0
MAX_DEADLINE_MS: Final = 3_600_000.0
CLIENT_GONE: Final = 499
"""Logged for a client that hung up; nobody is there to read it."""
QUIET: Final = frozenset({"live", "ready", "metrics"})
"""Asked every few seconds by machines: logged at debug."""
NO_TIMINGS: Final = Timings()


class ClientGone(Exception):
    """The client hung up before its answer was there."""


class Exchange:
    """What is known of a request from its head, and what is told about it at the end."""

    __slots__ = (
        "accept",
        "content_encoding",
        "content_type",
        "deadline",
        "declared",
        "method",
        "op",
        "path",
        "query",
        "request_id",
        "seconds",
        "started",
        "timings",
    )

    def __init__(self, scope: Scope, op: str) -> None:
        self.started = perf_counter()
        self.seconds = 0.0
        self.op = op
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.timings: Timings | None = None
        self.content_type = self.accept = self.content_encoding = b""
        self.declared: bytes | None = None
        self.deadline: bytes | None = None
        request_id = b""
        for name, value in scope["headers"]:
            match name:
                case b"content-type":
                    self.content_type = value
                case b"content-length":
                    self.declared = value
                case b"accept":
                    self.accept = value
                case b"x-request-id":
                    request_id = value
                case b"content-encoding":
                    self.content_encoding = value
                case b"x-attnd-deadline-ms":
                    self.deadline = value
        valid = REQUEST_ID.fullmatch(request_id)
        self.request_id = request_id if valid else b"%032x" % getrandbits(128)

    @property
    def content_length(self) -> int | None:
        """The declared length of the body in bytes; None when it is not declared."""
        if self.declared is None:
            return None
        if not self.declared.isdigit():
            raise MalformedBody("Content-Length is not a number")
        return int(self.declared)

    @property
    def deadline_s(self) -> float | None:
        """Seconds the operation may wait, when the client says so."""
        if self.deadline is None:
            return None
        try:
            milliseconds = float(self.deadline)
        except ValueError:
            milliseconds = math.nan
        if not MIN_DEADLINE_MS <= milliseconds <= MAX_DEADLINE_MS:
            rule = f"must be milliseconds, {MIN_DEADLINE_MS:.0f} to {MAX_DEADLINE_MS:.0f}"
            raise InvalidRequest(DEADLINE_HEADER, self.deadline.decode("latin-1"), rule)
        return milliseconds / 1e3

    def headers(self) -> Headers:
        """What every response carries."""
        return [(b"x-request-id", self.request_id), (b"server-timing", self.server_timing())]

    def server_timing(self) -> bytes:
        """Milliseconds per stage; 0 for a stage that the request never reached."""
        spent = self.timings or NO_TIMINGS
        return (
            b"queue;dur=%.3f, plan;dur=%.3f, copy-in;dur=%.3f, kernel;dur=%.3f, "
            b"copy-out;dur=%.3f, encode;dur=%.3f"
        ) % (
            spent.queue * 1e3,
            spent.plan * 1e3,
            spent.copy_in * 1e3,
            spent.kernel * 1e3,
            spent.copy_out * 1e3,
            spent.encode * 1e3,
        )

    def end(self) -> None:
        """The answer is out: stop the clock."""
        self.seconds = perf_counter() - self.started

    def tell(self, status: int, code: str, metrics: Metrics) -> None:
        """Count the request and write its access line; `code` is "ok" or an error's."""
        metrics.observe(self.op, code, self.seconds, self.timings)
        level = logging.DEBUG if self.op in QUIET and status == 200 else logging.INFO
        if not ACCESS.isEnabledFor(level):
            return
        told = {
            "id": self.request_id.decode("ascii"),
            "op": self.op,
            "method": self.method,
            "path": self.path,
            "status": status,
            "code": code,
            "duration_ms": round(self.seconds * 1e3, 3),
        }
        ACCESS.log(level, "request", extra={"fields": told})
