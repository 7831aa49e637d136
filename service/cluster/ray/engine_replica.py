"""An engine as a replica of Ray Serve: starts the engine's process on its node, reports its address
and load, and drains it before it stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from config.server import ServerSettings
from config.settings import Settings
from service.addresses import engine_path, engine_paths, listen_tcp
from service.cluster.membership.engine import EngineSession
from service.cluster.membership.processes import ENGINE, Processes
from service.cluster.placement.cost import EngineLoad
from service.cluster.ray.router_replica import REPORT_S, Place
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.doors.kit.upstream import EngineReply
from service.errors import NotReady
from service.logs import set_up_logs
from service.operations.schema.spec import Operation
from service.operations.status import DRAIN_ENGINE, ENGINE_NAME, ENGINES
from service.processes.handover import Child
from service.road.engine_end.listening import CannotListen, Listening, listen
from service.supervisor import GRACE_S
from service.tenants import OPEN, SCOPES, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
APP: Final = "attnd"
ROUTER: Final = "router"
"""Names in Serve."""
NO_ROUTER: Final = (RayError, RayServeException, TimeoutError)
"""The router's replica has ended, and may be restarted."""
REPLY_S: Final = 5.0
NO_ROUTER_S: Final = 30.0
"""An engine that is leaving, and has not reached a router for so long, ends."""
NO_FIELDS: Final[Mapping[str, Any]] = MappingProxyType({})
MAX_ON_A_HOST: Final = 64


def first_free(server: ServerSettings) -> Listening:
    """The first of this host's engine sockets that is free: `8080-0.sock`, then `8080-1.sock` and
    so on. Raises CannotListen where all are taken."""
    private = server.socket is None and server.uds is None
    paths = engine_paths(engine_path(server, server.port), MAX_ON_A_HOST)
    for path in paths[:-1]:
        with suppress(CannotListen):
            return listen(path, private=private, mode=int(server.socket_mode, 8))
    return listen(paths[-1], private=private, mode=int(server.socket_mode, 8))


class EngineReplica:
    """The actor that supervises one engine's process."""

    def __init__(self, settings: Settings, secret: str) -> None:
        set_up_logs(settings.log, "replica")
        self.settings = settings
        self.name = serve.get_replica_context().replica_tag
        self.secret = secret
        self.listening = first_free(settings.server)
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        entry = listen_tcp(host, 0, False)
        self.address = f"tcp:{host}:{entry[0].getsockname()[1]}"
        path = self.listening.path
        # by its socket: the host's next engine with this one finds the records
        own = settings.with_own_disk_path(path.stem)
        child = Child("engine-0", ENGINE, (self.listening.sock, *entry))
        self.processes = Processes(own, [child], str(path), "", secret)
        LOG.info("%s: sessions at %s", self.name, path)
        self.arena = DoorArena(settings.server)
        self.tenant = tenant_of("cluster", SCOPES) if settings.auth.keys_file else OPEN
        self.engine: EngineSession | None = None
        self.connecting = asyncio.Lock()
        self.has_replied = self.is_leaving = self.is_over = False
        self.reported_s = time.monotonic()
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def watch(self) -> None:
        """Restarts the process when it ends, and reports the engine to the router from its first
        reply on: while a listed engine does not reply, the router answers 503 for ids that it finds
        nowhere."""
        while True:
            self.processes.check()
            self.has_replied = self.has_replied or await self.num_left() is not None
            if self.has_replied:
                await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Reports the engine to the router, and learns whether the whole cluster stops."""
        here = ray.get_runtime_context()
        actor = here.get_actor_name() or "", here.namespace
        node, leaves = here.get_node_id(), self.is_leaving
        place = Place(self.name, actor, node, str(self.listening.path), self.address, leaves)
        with suppress(*NO_ROUTER):
            async with asyncio.timeout(REPLY_S):
                handle = serve.get_deployment_handle(ROUTER, APP)
                self.is_over = await handle.report.remote(place)
                self.reported_s = time.monotonic()

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError where Serve should restart the replica."""
        if self.watching.done():
            raise RuntimeError("the engine is not supervised any more")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: the load for the autoscaling policy."""
        if (view := await self.ask()) is None:
            return {}
        (pages,) = view.fields["engines"]
        held = pages["referenced"] + pages["pinned"]
        load = EngineLoad(pages["free"], pages["cached"], held, queue_s=view.stages[0])
        return {name: float(getattr(load, name)) for name in ("free", "cached", "held", "queue_s")}

    async def ask(
        self, operation: Operation = ENGINES, fields: Mapping[str, Any] = NO_FIELDS
    ) -> EngineReply | None:
        """The engine's reply, by default its view of itself; None while it does not reply."""
        try:
            async with asyncio.timeout(REPLY_S), self.connecting:
                if self.engine is None or not self.engine.is_ready:
                    link = Link(self.settings.server, self.tenant is not OPEN, arena=self.arena)
                    await link.connect(str(self.listening.path), "replica", self.secret)
                    self.engine = EngineSession(self.name, link, self.arena)
                return await self.engine.question(operation, self.tenant, dict(fields))
        except (NotReady, OSError, TimeoutError):
            return None

    async def __del__(self) -> None:
        """Called by Serve when it scales down: serves the sequences that are left, for at most
        `cluster.drain_s`, while a router calls it; then ends the process, which first writes what
        only memory has to the disk."""
        self.is_leaving = True
        await self.report()
        ends = time.monotonic() + self.settings.cluster.drain_s
        while time.monotonic() < ends and not self.is_over:
            await self.ask(DRAIN_ENGINE, {"name": ENGINE_NAME})
            if await self.num_left() == 0 or time.monotonic() > self.reported_s + NO_ROUTER_S:
                break
            await asyncio.sleep(REPORT_S)
        self.watching.cancel()
        with suppress(*NO_ROUTER):
            async with asyncio.timeout(REPLY_S):
                await serve.get_deployment_handle(ROUTER, APP).leave.remote(self.name)
                await asyncio.sleep(2 * REPORT_S)  # until the router has read it
        await asyncio.to_thread(self.processes.end, self.settings.server.drain_timeout_s + GRACE_S)
        self.listening.unlink()
        self.arena.close()

    async def num_left(self) -> int | None:
        """The number of sequences, imports, leases and pinned pages left; None while the engine
        does not reply."""
        if (view := await self.ask()) is None:
            return None
        (engine,) = view.fields["engines"]
        return sum(int(engine[name]) for name in ("sequences", "imports", "leases", "pinned"))
