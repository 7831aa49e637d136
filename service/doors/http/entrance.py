"""Which requests of a connection are let in, and as whose."""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

from service.doors.gate import Gate
from service.doors.http.exchange import Exchange
from service.errors import Unauthorized
from service.keys import Keys
from service.tenants import OPEN, Tenant

HEALTH: Final = ("/health/", "/v2/health/")
METRICS: Final = "/metrics"
DOCS: Final = ("/docs", "/openapi.json")
LIVE: Final = "/live"
LIVE_STREAM: Final = "/live/stream"


class Entrance:
    """One connection's, behind the door's gate. The key shown last is remembered, since a
    connection's requests show the same one, and comparing it with all keys takes a while."""

    __slots__ = ("gate", "keys", "shown", "tenant")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.keys: Keys | None = None
        self.shown = b""
        self.tenant = OPEN

    def let_in(self, exchange: Exchange) -> None:
        """Say whose request it is, or why it is refused."""
        if is_open(self.gate, exchange.path):
            return
        try:
            exchange.tenant = self.tenant_of(exchange.said.authorization)
        except Unauthorized as error:
            exchange.refusal = error

    def tenant_of(self, shown: bytes) -> Tenant:
        """Raises Unauthorized."""
        keys = self.gate.keys
        if self.keys is not keys or not compare_digest(self.shown, shown):
            self.tenant = self.gate.tenant_of(shown)
            self.keys, self.shown = keys, shown
        return self.tenant


def is_open(gate: Gate, path: str) -> bool:
    """Whether a path is answered to everybody."""
    if path.startswith(HEALTH):
        return True
    if path == METRICS:
        return gate.auth.open_metrics
    if path == LIVE_STREAM:
        return gate.auth.open_live
    if path == LIVE or path.startswith(f"{LIVE}/"):  # the page itself, into which a key is typed
        return True
    return gate.auth.open_docs and (path in DOCS or path.startswith("/docs/"))


def is_welcome(gate: Gate | None, exchange: Exchange) -> bool:
    """Whether a key that was shown some time ago still says who it is. Raises Unauthorized."""
    if gate is None or is_open(gate, exchange.path):
        return True
    return gate.tenant_of(exchange.said.authorization) is exchange.tenant
