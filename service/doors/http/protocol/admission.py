"""Admission of a connection's requests by their keys.

Endpoints that need no key declare it themselves (`needs_no_key`).
"""

from __future__ import annotations

from hmac import compare_digest

from service.doors.http.protocol.exchange import Exchange
from service.errors import Overloaded, Unauthorized
from service.keys import Authenticator, Keys
from service.tenants import ANONYMOUS


class ConnectionKey:
    """Caches the last key of a connection: most requests of a connection send the same one."""

    def __init__(self, authenticator: Authenticator) -> None:
        self.authenticator = authenticator
        self.keys: Keys | None = None
        self.authorization = b""
        self.tenant = ANONYMOUS

    def authenticate(self, exchange: Exchange) -> None:
        """Set the request's tenant, or its refusal."""
        authorization = exchange.headers.authorization
        keys = self.authenticator.keys
        if self.keys is not keys or not compare_digest(self.authorization, authorization):
            try:
                self.tenant = self.authenticator.tenant_of(authorization)
            except Unauthorized as error:
                exchange.tenant = ANONYMOUS
                exchange.refuse(error)
                return
            self.keys, self.authorization = keys, authorization
        exchange.tenant = self.tenant


class BusyConnections:
    """Limits the connections on which one namespace has requests, so that others find room: an idle
    connection is closed for a new one, but not a busy one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_namespace: dict[str, int] = {}

    def enter(self, namespace: str) -> None:
        """A connection of the namespace becomes busy. Raises Overloaded."""
        count = self.by_namespace.get(namespace, 0)
        if count >= self.limit:
            text = (
                f"this namespace has requests on {count} connections, the limit is half of "
                "server.max_connections: wait for responses, or end streams"
            )
            raise Overloaded(text, retry_after_s=1.0)
        self.by_namespace[namespace] = count + 1

    def leave(self, namespace: str) -> None:
        """One of its connections is idle again, or closed."""
        count = self.by_namespace[namespace] - 1
        if count:
            self.by_namespace[namespace] = count
        else:
            del self.by_namespace[namespace]


def is_still_valid(authenticator: Authenticator | None, exchange: Exchange) -> bool:
    """Whether the key of a long response is still valid for the same tenant. Raises
    Unauthorized."""
    if authenticator is None:
        return True
    return authenticator.tenant_of(exchange.headers.authorization) is exchange.tenant
