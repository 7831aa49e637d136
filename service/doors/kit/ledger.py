"""Records answered requests some milliseconds later: their log lines, metrics and spans.

A client that sends its next request at once would otherwise wait for all of these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from service.doors.kit.tracing import Tracing
from service.metrics import Metrics
from service.tenants import ANONYMOUS, OPEN, Tenant

ACCESS: Final = logging.getLogger("attnd.access")
DELAY_S: Final = 0.01
"""Delay between a response and its records."""
OTHERS_S: Final = 0.015
"""After this delay the other processes have recorded their earlier requests, too."""
QUIET: Final = frozenset({"live", "ready", "metrics"})
"""Called by machines every few seconds: logged at debug."""
CLIENT_CLOSED: Final = 499
"""The status logged for a client that closed its connection before the response."""


class Request(Protocol):
    """An answered request of any protocol. `status` is HTTP's, `started` by the performance
    counter; `traceparent` is empty for a caller without a trace."""

    request_id: bytes
    op: str
    method: str
    path: str
    status: int
    code: str
    started: float
    seconds: float
    stages: Sequence[float]
    peer: str
    tenant: Tenant
    traceparent: bytes


class Ledger:
    """The records of one event loop; `settle` writes them at once (for `/metrics`, at the end)."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._answered: list[Request] = []

    def add(self, request: Request) -> None:
        if not self._answered:
            asyncio.get_running_loop().call_later(DELAY_S, self.settle)
        self._answered.append(request)

    def settle(self) -> None:
        answered, self._answered = self._answered, []
        for request in answered:
            self._metrics.observe(request.op, request.code, request.seconds)
            if self._tracing is not None:
                self._tracing.record(request)
        log(answered)


def log(answered: Sequence[Request]) -> None:
    """Write access lines, in one record: a record costs as much as several lines."""
    usual: list[Request] = []
    quiet: list[Request] = []
    for request in answered:
        (quiet if request.op in QUIET and request.status == 200 else usual).append(request)
    for level, requests in ((logging.INFO, usual), (logging.DEBUG, quiet)):
        if requests and ACCESS.isEnabledFor(level):
            ACCESS.log(level, "request", extra={"each": [fields_of(one) for one in requests]})


def fields_of(request: Request) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": request.request_id.decode("ascii"),
        "op": request.op,
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "code": request.code,
        "duration_ms": round(request.seconds * 1e3, 3),
        "peer": request.peer,
    }
    if request.tenant not in (OPEN, ANONYMOUS):
        fields["namespace"] = request.tenant.namespace
    return fields
