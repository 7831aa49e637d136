"""The HTTP door above its socket, and the client with its retries, in the cluster's world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from attnd import AsyncClient, NewSequence
from attnd.calls import attention, control
from attnd.calls.call import Call, Reply
from attnd.errors import AttndError, ReplyLost, ServiceError

from service.cluster.routing.router import Router
from service.doors.http.door import Door
from service.doors.http.protocol.admission import HostRule
from service.doors.http.protocol.connection import Connection
from service.keys import make_authenticator
from service.metrics import Metrics
from tests.world.network import Network, SimSocket

CALLS: Final[dict[str, Callable[[Any, Any], Call[Any]]]] = {
    "append": lambda fields, arrays: attention.append(
        fields.get("layers", fields.get("layer")),
        fields["sequences"],
        **arrays,
        append_indptr=fields["append_indptr"],
        offsets=fields.get("offsets"),
    ),
    "decode": lambda fields, arrays: attention.decode(**fields, **arrays),
    "delete_sequence": lambda fields, _: control.delete_sequence(fields["id"]),
    "delete_sequences": lambda fields, _: control.delete_sequences(**fields),
    "truncate": lambda fields, _: control.truncate(fields["id"], fields["length"]),
}
"""How the client makes its calls; others are made of fields and tensors as they are."""
UNSAFE: Final = ("create_sequences", "import_sequence", "release_lease", "commit")
"""Those of the others that are not sent again after a lost reply."""


def raw(reply: Reply) -> tuple[dict[str, Any], Any]:
    return reply.fields, reply.tensors


def call_of(name: str, fields: Any, arrays: Any) -> Call[Any]:
    if name == "create_sequences" and all("prefix" not in one for one in fields["sequences"]):
        made = control.create_sequences([NewSequence(**one) for one in fields["sequences"]])
    elif name in CALLS:
        made = CALLS[name](fields, arrays)
    else:
        made = Call(name, raw, name not in UNSAFE, fields, arrays, answer_bytes=2**14)
    return replace(made, parse=raw)


async def call_with(client: AsyncClient, name: str, fields: Any, arrays: Any) -> Any:
    """Code, fields, tensors of a call with its retries; `lost` where none came, or where the client
    knows only that it was done."""
    try:
        found = await client.send(call_of(name, fields, arrays))
    except AttndError as error:
        if isinstance(error, ServiceError) and not isinstance(error.__cause__, ReplyLost):
            return error.code, error.problem, {}
        return "lost", {"detail": str(error)}, {}
    return ("ok", *found) if isinstance(found, tuple) else ("lost", {}, {})


class SimPoll:
    """`select.poll` for one socket of the world."""

    def __init__(self, network: Network) -> None:
        self.network, self.fd = network, -1

    def register(self, fd: int, _: int) -> None:
        self.fd = fd

    def poll(self, _: int) -> bool:
        end = self.network.by_fd.get(self.fd)
        return end is None or end.ready_at(1) <= self.network.clock.now


class HttpLoop(asyncio.SelectorEventLoop):
    """Connects clients to the doors of a world."""

    dial_http: Callable[[str], SimSocket]

    async def create_connection(self, make: Any, host: Any = None, *_: Any, **__: Any) -> Any:
        sock: Any = self.dial_http(host)
        return await self.attach(sock, make())

    async def attach(self, sock: Any, protocol: Any) -> Any:
        waiter = self.create_future()
        make: Any = self._make_socket_transport  # type: ignore[attr-defined]
        transport = make(sock, protocol, waiter)
        with suppress(OSError):
            await waiter
        return transport, protocol


def http_door(settings: Any, keys: Callable[[str], bytes]) -> Door:
    """A door whose upstream is a router."""
    authenticator = make_authenticator(settings.auth, keys)
    rule = HostRule(settings)
    return Door(settings.server, Metrics(), authenticator, None, Router, rule)


def serve(door: Door, loop: HttpLoop, sock: SimSocket) -> None:
    """Serves the door's end of a connection."""
    loop.create_task(loop.attach(sock, Connection(door)))


def client_of(host: str, key: str) -> AsyncClient:
    return AsyncClient(f"http://{host}:80", api_key=key or None, timeout=30.0)
