"""The rule for the headers `Host` and `Origin` of requests.

Without keys, everybody who can reach the service may call it. A browser on this machine can reach
it on behalf of any site: by a name of that site that resolves to 127.0.0.1 (DNS rebinding), or by a
form. Such requests have a foreign name in `Host` or `Origin`.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

from config.sections import Settings
from service.errors import AttndError, Forbidden, MalformedRequest

HOST: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[a-z0-9._~-]+)(:[0-9]{1,5})?")
LOOPBACK: Final = "localhost"
ANY: Final = "*"
MAX_CACHED: Final = 64


class HostRule:
    """The names of one service.

    `server.allowed_hosts` lists them, if it is set. Otherwise a service that is private to this
    machine has its loopback names and `server.host`, and any other service has every name.
    """

    def __init__(self, settings: Settings) -> None:
        server, auth = settings.server, settings.auth
        self.own = server.host.lower()
        self.allowed = frozenset(one.lower().strip("[]") for one in server.allowed_hosts)
        is_open = not auth.is_private and not self.allowed
        self.any_host = is_open or server.uds is not None or ANY in self.allowed
        self.any_origin = auth.keys_file is not None or ANY in self.allowed
        self.accepted: set[bytes | None] = {None}
        """Values of `Host` that need no check; HTTP/1.0 needs none."""

    def refusal(self, given: bytes | None, origin: bytes | None) -> AttndError | None:
        """The error for a request whose header `Host` or `Origin` has a foreign name."""
        if given is not None and given not in self.accepted:
            host = given.decode("latin-1").lower()
            match = HOST.fullmatch(host)
            if match is None:
                return MalformedRequest(f"Host is {host[:100]!r}: send a host name and a port")
            if not self.any_host and not self.has(match[1]):
                return foreign("Host", host)
            if len(self.accepted) < MAX_CACHED:
                self.accepted.add(given)
        if origin is not None and not self.any_origin:
            return self.refusal_of_origin(origin, given or b"")
        return None

    def refusal_of_origin(self, origin: bytes, host: bytes) -> AttndError | None:
        """The service's own pages may call it, and pages of allowed hosts."""
        text = origin.decode("latin-1").lower()
        _, _, netloc = text.partition("://")
        match = HOST.fullmatch(netloc)
        if match is not None:
            name = match[1].strip("[]")
            if netloc == host.decode("latin-1").lower() or name in self.allowed:
                return None
        return foreign("Origin", text)

    def has(self, host: str) -> bool:
        """Whether this is a name of the service."""
        name = host.strip("[]").rstrip(".")
        return name == self.own or name in self.allowed or is_loopback(name)


def is_loopback(name: str) -> bool:
    if name == LOOPBACK or name.endswith(f".{LOOPBACK}"):
        return True
    try:
        return ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def foreign(header: str, value: str) -> AttndError:
    remedy = "to allow it, add its name to server.allowed_hosts"
    return Forbidden(f"{header} is {value[:100]!r}: {remedy}", scope="")
