"""The addresses of the service: HTTP's, and the engine's own socket."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from config.server import ServerSettings
from service.road.engine_end.listening import (
    CannotListen,
    Listening,
    default_path,
    listen,
    make_directory,
)

BACKLOG: Final = 2048
"""Connections that may wait for a door to accept them; the system may allow fewer."""

NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""A name may have an IPv6 address on a host without IPv6: its other address is used."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Everything the service listens on, bound; doors and engine inherit the sockets."""

    http: tuple[socket.socket, ...]
    url: str
    """HTTP's address for people: the port is the one that was bound."""
    engines: tuple[Listening, ...]
    """The engine's own socket; in a cluster one of each."""
    roster: Path
    """Where the file with a cluster's engines goes."""
    uds: Listening | None
    """HTTP's, when it is a Unix socket."""

    def close(self) -> None:
        """Close the supervisor's sockets, so that no client waits for a door that has ended; remove
        the files of the service's Unix sockets."""
        for engine in self.engines:
            engine.close()
        if self.uds is not None:
            self.uds.close()
        for one in self.http:
            one.close()


def bind_addresses(
    server: ServerSettings,
    *,
    is_private: bool = False,
    num_engines: int = 1,
) -> Addresses:
    """Bind HTTP's sockets and the engines'. With `is_private`, HTTP is on this machine's loopback
    only.

    Raises `CannotListen`, one line.
    """
    with ExitStack() as undo:
        if server.uds is None:
            uds, http = None, listen_tcp(server.host, server.port, is_private)
            for one in http:
                undo.callback(one.close)
            port = http[0].getsockname()[1]
            scheme = "http" if server.tls_cert is None else "https"
            url = f"{scheme}://{server.url_host}:{port}"
        else:
            mode = int(server.uds_mode, 8)
            uds = listen(Path(server.uds), private=False, mode=mode, setting="server.uds")
            undo.callback(uds.close)
            http, port, url = (uds.sock,), 0, f"unix:{server.uds}"
        path = engine_path(server, port)
        private = server.socket is None and server.uds is None
        if not num_engines:
            make_directory(path.parent, private)
        engines = []
        for own in engine_paths(path, num_engines):
            engines.append(listen(own, private=private, mode=int(server.socket_mode, 8)))
            undo.callback(engines[-1].close)
        undo.pop_all()
    return Addresses(http, url, tuple(engines), path.with_suffix(".roster"), uds)


def engine_paths(path: Path, count: int) -> list[Path]:
    """One engine listens at the path itself, several beside it: `8080-0.sock`, `8080-1.sock`."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(count)]


def engine_path(server: ServerSettings, port: int) -> Path:
    """The engine's socket: the setting, else beside HTTP's Unix socket, else by HTTP's port."""
    if server.socket is not None:
        return Path(server.socket)
    return default_path(port) if server.uds is None else Path(f"{server.uds}.road")


def listen_tcp(
    host: str, port: int, is_private: bool, setting: str = "server.port"
) -> tuple[socket.socket, ...]:
    """A listening socket for every address of `host`, all on one port; 0: a free one."""
    sockets: list[socket.socket] = []
    skipped: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if is_private:
            check_loopback(host, [str(entry[4][0]) for entry in found])
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                bound = (address[0], chosen, *address[2:])
                sockets.append(socket.create_server(bound, family=family, backlog=BACKLOG))
                sockets[-1].setblocking(False)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                skipped = error
        if not sockets and skipped is not None:
            raise skipped
    except OSError as error:
        for one in sockets:
            one.close()
        place = f"server.host {host}, {setting} {port}"
        raise CannotListen(f"{place}: {describe(error)}") from error
    return tuple(sockets)


def check_loopback(host: str, addresses: Sequence[str]) -> None:
    """A service without keys listens on the loopback interface only. Raises `CannotListen`."""
    for address in addresses:
        if not ip_address(address.partition("%")[0]).is_loopback:
            raise CannotListen(
                f"server.host {host}: {address} can be reached from other machines, and the "
                "service has no keys: set auth.keys_file, or auth.open: true to allow that"
            )


def describe(error: OSError) -> str:
    """The system's error in lower case, and the remedy."""
    number = error.errno or 0
    known = number in errno.errorcode  # `create_server` adds the address to the system's text
    text = (os.strerror(number) if known else error.strerror or str(error)).lower()
    if error.errno == errno.EADDRINUSE:
        return f"{text}: stop what listens there, or set another port"
    if error.errno == errno.EACCES:
        return f"{text}: set a port above 1023"
    return f"{text}: set an address of this machine"
