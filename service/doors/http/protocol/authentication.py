"""Authentication of a connection's requests. Which endpoints need no key they declare themselves,
see `routes.py`."""

from __future__ import annotations

from hmac import compare_digest

from service.doors.http.protocol.exchange import Exchange
from service.doors.kit.authentication import Gate
from service.errors import Unauthorized
from service.keys import Keys
from service.tenants import NOBODY


class Entrance:
    """One connection's, behind the door's gate. It remembers the key shown last: most requests of a
    connection show the same one."""

    __slots__ = ("gate", "keys", "shown", "tenant")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.keys: Keys | None = None
        self.shown = b""
        self.tenant = NOBODY

    def authenticate(self, exchange: Exchange) -> None:
        """Set the request's tenant, or the reason why it has none."""
        shown = exchange.said.authorization
        try:
            keys = self.gate.keys
            if self.keys is not keys or not compare_digest(self.shown, shown):
                self.tenant = self.gate.tenant_of(shown)
                self.keys, self.shown = keys, shown
            exchange.tenant = self.tenant
        except Unauthorized as error:
            exchange.tenant, exchange.refusal = NOBODY, error


def still_holds(gate: Gate | None, exchange: Exchange) -> bool:
    """Whether the key of a request that was accepted some time ago is valid and the same tenant's.

    Raises Unauthorized.
    """
    return gate is None or gate.tenant_of(exchange.said.authorization) is exchange.tenant
