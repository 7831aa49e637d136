"""Authenticates a connection's requests. Endpoints that need no key declare it themselves
(`needs_no_key`)."""

from __future__ import annotations

from hmac import compare_digest

from service.doors.http.protocol.exchange import Exchange
from service.doors.kit.authentication import Authenticator
from service.errors import Unauthorized
from service.keys import Keys
from service.tenants import ANONYMOUS


class ConnectionKey:
    """Caches the last key of a connection: most requests of a connection send the same one."""

    __slots__ = ("authenticator", "authorization", "keys", "tenant")

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
                exchange.tenant, exchange.refusal = ANONYMOUS, error
                return
            self.keys, self.authorization = keys, authorization
        exchange.tenant = self.tenant


def is_still_valid(authenticator: Authenticator | None, exchange: Exchange) -> bool:
    """Whether the key of a long response is still valid for the same tenant. Raises
    Unauthorized."""
    if authenticator is None:
        return True
    return authenticator.tenant_of(exchange.headers.authorization) is exchange.tenant
