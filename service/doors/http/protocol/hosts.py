"""Which names a request may address the service by, and from which pages a browser may call it.

Without keys, being able to reach the service is what entitles a caller. A browser on this machine
can reach it for a page of any site: by a name of that site that resolves to 127.0.0.1 (DNS
rebinding), or by a form. Such requests show a foreign name in `Host` or `Origin`.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

from config.sections import Settings
from service.doors.http.protocol.heads import Said
from service.errors import AttndError, Forbidden, MalformedRequest

HOST: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[a-z0-9._~-]+)(:[0-9]{1,5})?")
LOOPBACK: Final = "localhost"
ANY: Final = "*"
MOST_REMEMBERED: Final = 64


class HostRule:
    """The names of one door.

    `server.allowed_hosts` lists them, where it is set. Otherwise a service that is private to this
    machine has its loopback names and `server.host`, and every other service has all names.
    """

    __slots__ = ("allowed", "any_host", "any_origin", "good", "own")

    def __init__(self, settings: Settings) -> None:
        server, auth = settings.server, settings.auth
        self.own = server.host.lower()
        self.allowed = frozenset(one.lower().strip("[]") for one in server.allowed_hosts)
        is_open = not auth.is_private and not self.allowed
        self.any_host = is_open or server.uds is not None or ANY in self.allowed
        self.any_origin = auth.keys_file is not None or ANY in self.allowed
        self.good: set[bytes] = set()
        """Hosts that were accepted."""

    def refusal(self, said: Said) -> AttndError | None:
        """Why a request is refused."""
        if said.host is not None and said.host not in self.good:
            host = said.host.decode("latin-1").lower()
            match = HOST.fullmatch(host)
            if match is None:
                return MalformedRequest(f"Host is {host[:100]!r}: send a host name and a port")
            if not self.any_host and not self.has(match[1]):
                return refused("Host", host)
            if len(self.good) < MOST_REMEMBERED:
                self.good.add(said.host)
        if said.origin is not None and not self.any_origin:
            return self.refusal_of_origin(said.origin, said.host or b"")
        return None

    def refusal_of_origin(self, origin: bytes, host: bytes) -> AttndError | None:
        """A page may call the service that it came from, and so may pages of allowed hosts."""
        text = origin.decode("latin-1").lower()
        _, _, netloc = text.partition("://")
        match = HOST.fullmatch(netloc)
        if match is not None:
            name = match[1].strip("[]")
            if netloc == host.decode("latin-1").lower() or name in self.allowed:
                return None
        return refused("Origin", text)

    def has(self, host: str) -> bool:
        """Whether the service has that name."""
        name = host.strip("[]").rstrip(".")
        return name == self.own or name in self.allowed or is_loopback(name)


def is_loopback(name: str) -> bool:
    if name == LOOPBACK or name.endswith(f".{LOOPBACK}"):
        return True
    try:
        return ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def refused(header: str, value: str) -> AttndError:
    remedy = "add its name to server.allowed_hosts if it is meant to call this service"
    return Forbidden(f"{header} is {value[:100]!r}: {remedy}", scope="")
