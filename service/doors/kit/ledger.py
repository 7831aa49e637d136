"""What is told of answered requests, a little later: their log lines, metrics and spans.

A client that sends its next request at once would wait for both to be written, so they are kept
for a few milliseconds and told together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from service.doors.kit.request import Request
from service.doors.kit.tracing import Tracing
from service.metrics import Metrics
from service.tenants import NOBODY, OPEN

ACCESS: Final = logging.getLogger("attnd.access")
DELAY_S: Final = 0.01
"""How long an answered request may stay untold."""
ELSEWHERE_S: Final = 0.015
"""After so long the other processes have told, too, what they answered before."""
QUIET: Final = frozenset({"live", "ready", "metrics"})
"""Asked every few seconds by machines: logged at debug."""


class Ledger:
    """Belongs to one event loop; `settle` tells all at once (before a scrape, at the end)."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._answered: list[Request] = []

    def add(self, request: Request) -> None:
        """The request was answered just now."""
        if not self._answered:
            asyncio.get_running_loop().call_later(DELAY_S, self.settle)
        self._answered.append(request)

    def settle(self) -> None:
        """Tell all that was answered."""
        answered, self._answered = self._answered, []
        for request in answered:
            self._metrics.observe(request.op, request.code, request.seconds)
            if self._tracing is not None:
                self._tracing.tell(request)
        log(answered)


def log(answered: Sequence[Request]) -> None:
    """The access lines of requests, in one record: a record costs as much as several lines."""
    usual: list[Request] = []
    quiet: list[Request] = []
    for request in answered:
        (quiet if request.op in QUIET and request.status == 200 else usual).append(request)
    for level, requests in ((logging.INFO, usual), (logging.DEBUG, quiet)):
        if requests and ACCESS.isEnabledFor(level):
            ACCESS.log(level, "request", extra={"each": [fields_of(one) for one in requests]})


def fields_of(request: Request) -> dict[str, object]:
    """What the access line of one request tells."""
    told: dict[str, object] = {
        "id": request.request_id.decode("ascii"),
        "op": request.op,
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "code": request.code,
        "duration_ms": round(request.seconds * 1e3, 3),
        "peer": request.peer,
    }
    if request.tenant not in (OPEN, NOBODY):
        told["namespace"] = request.tenant.namespace
    return told
