"""The router of the cluster's world, the HTTP door above its socket, and its client."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from attnd import AsyncClient, NewSequence
from attnd.calls import attention, control
from attnd.calls.call import Call
from attnd.errors import AttndError as ClientError
from attnd.errors import ReplyLost, ServiceError

from service.cluster.membership.roster import RosterEntry
from service.cluster.routing.router import Router
from service.doors.http.connection import Connection
from service.doors.http.dispatch import Dispatcher
from service.doors.http.door import Door
from service.doors.kit.asgi import AsgiServer
from service.doors.kit.hosts import HostRule
from service.doors.kit.problems import ProblemText, document_of
from service.errors import AttndError
from service.keys import make_authenticator
from service.metrics import Metrics
from service.operations.table import BY_NAME
from service.tenants import Tenant
from tests.images import write_image
from tests.world.network import READ, Network, SimSocket
from tests.world.world import parse

if TYPE_CHECKING:
    from tests.world.cluster import ClusterWorld

RAW: Final = attrgetter("fields", "tensors")  # of a reply
SECRET: Final = "a secret of the cluster's world"
UNSAFE: Final = ("create_sequences", "import_sequence", "release_lease", "commit")
"""Calls made of fields and tensors as they are that are not sent again after a lost reply."""
MAKERS: Final[dict[str, Any]] = {
    "append": attention.append,
    "decode": attention.decode,
    "truncate": control.truncate,
    "delete_sequence": control.delete_sequence,
    "delete_sequences": control.delete_sequences,
}
PARAMETERS: Final = {"id": "sequence", "layers": "layer"}  # names of fields in these functions
DOOR: Final[contextvars.ContextVar[DoorProcess]] = contextvars.ContextVar("DOOR")


class DoorProcess:
    """The router, in HTTP worlds below a real door, and the connections that it makes."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world, self.name = world, name
        self.is_dead = False
        self.sockets: list[SimSocket] = []
        self.calls: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(self._begin)

    def _begin(self) -> None:
        DOOR.set(self)
        world, server, self.http = self.world, self.world.settings.server, None
        if world.has_http:
            authenticator = make_authenticator(world.settings.auth, lambda _: world.keys)
            rule = HostRule(world.settings)
            self.http = Door(server, Metrics(), authenticator, None, Router, rule)
            self.server = AsgiServer(Application(self.http), server, None, Connection)
        self.router: Any = self.http.link if self.http else Router(server, world.has_keys)
        sessions = self.router.sessions
        sessions.door, sessions.secret = self.name, SECRET
        sessions.update([RosterEntry(one, one) for one in world.names])

    def kill(self) -> None:
        """kill -9: nothing that it does afterwards reaches an engine."""
        self.is_dead = True
        for sock in self.sockets:
            sock.kill()
        for task in list(self.calls):
            task.cancel()
        if self.http is not None:
            self.http.sweeping.cancel()
        self.context.run(self.router.close)

    def start(self, *call: Any) -> asyncio.Task[Any]:
        """A call that ends with this door."""
        task = self.world.loop.create_task(self._call(*call), context=self.context)
        self.calls[task] = None
        task.add_done_callback(self.calls.pop)
        return task

    async def _call(self, name: str, fields: Any, arrays: Any, tenant: Tenant) -> Any:
        """Code ("ok" for none), fields or problem, tensors."""
        router, operation = self.router, BY_NAME[name]
        try:
            slot, length = router.arena.lay([write_image(fields, arrays)])
            try:
                answered, answer = await router.call(operation, slot, length, 2**17, 0, b"", tenant)
            finally:
                router.arena.give_back(slot)
        except (AttndError, ProblemText) as error:
            document = document_of(error, b"")
            return document["code"], document, {}
        found = parse(answered.status, bytes(answered.image))
        router.arena.give_back(answer)
        return found

    def dial(self) -> SimSocket:
        """A client's connection to its HTTP door."""
        if self.is_dead:
            raise ConnectionRefusedError(111, "this door is dead")
        here, there = self.world.network.pair()
        self.sockets.append(there)
        config, state, loop = self.server.config, self.server.server_state, self.world.loop
        connection = self.context.run(Connection, config, state, {}, loop)
        loop.create_task(attach(loop, there, connection), context=self.context)
        return here


class Application:
    """What a server calls for each request."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.dispatcher = Dispatcher(door)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.dispatcher.serve(scope, receive, send)


async def attach(loop: Any, sock: SimSocket, protocol: Any) -> Any:
    """A protocol of asyncio at one end of a connection."""
    waiter = loop.create_future()
    transport = loop._make_socket_transport(sock, protocol, waiter)
    with suppress(OSError):
        await waiter
    return transport, protocol


class SimPoll:
    """`select.poll` for one socket of the world."""

    def __init__(self, network: Network) -> None:
        self.network, self.fd = network, -1

    def register(self, fd: int, _: int) -> None:
        self.fd = fd

    def poll(self, _: int) -> bool:
        end = self.network.by_fd.get(self.fd)
        return end is None or end.ready_at(READ) <= self.network.clock.now


async def call_with(client: AsyncClient, name: str, fields: Any, arrays: Any) -> Any:
    """Code, fields, tensors; `lost` where none came, or the client knows only that it was done."""
    try:
        found = await client.send(replace(call_of(name, fields, arrays), parse=RAW))
    except ClientError as error:
        if isinstance(error, ServiceError) and not isinstance(error.__cause__, ReplyLost):
            return error.code, error.problem, {}
        return "lost", {"detail": str(error)}, {}
    return ("ok", *found) if isinstance(found, tuple) else ("lost", {}, {})


def call_of(name: str, fields: Any, arrays: Any) -> Call[Any]:
    """A call as the client makes it."""
    if name == "create_sequences" and all("prefix" not in one for one in fields["sequences"]):
        return control.create_sequences([NewSequence(**one) for one in fields["sequences"]])
    if name in MAKERS:
        given = {PARAMETERS.get(key, key): value for key, value in fields.items()}
        return MAKERS[name](**given, **arrays)
    return Call(name, RAW, name not in UNSAFE, fields, arrays, answer_bytes=2**14)
