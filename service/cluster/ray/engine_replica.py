"""An engine as a replica of Ray Serve: starts the engine's process on its node, reports its address
and load, and drains it before it stops."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from config.server import ServerSettings
from config.settings import Settings
from service.addresses import engine_path, engine_paths, listen_tcp
from service.cluster.membership.engine import Engine, EngineReply
from service.cluster.membership.processes import EngineProcess
from service.cluster.placement.cost import Load
from service.cluster.ray.router_replica import REPORT_S, Place
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.errors import NotReady
from service.operations.schema.spec import Operation
from service.operations.status import DRAIN_ENGINE, ENGINE_NAME, ENGINES
from service.road.engine_end.listening import CannotListen, Listening, listen
from service.supervisor import YOUNG_S, Deaths
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
MAX_DEATHS: Final = 3
"""Deaths of a young process in a row after which Serve restarts the replica."""


def first_free(server: ServerSettings) -> Listening:
    """The first of this host's engine sockets that is free: `8080-0.sock`, then `8080-1.sock` and
    so on. Raises CannotListen where all are taken."""
    private = server.socket is None and server.uds is None
    paths = engine_paths(engine_path(server, server.port), MAX_ON_A_HOST)
    for path in paths[:-1]:
        with suppress(CannotListen):
            return listen(path, private=private, mode=int(server.socket_mode, 8))
    return listen(paths[-1], private=private, mode=int(server.socket_mode, 8))


def fresh_folder(socket: Path) -> Path:
    """The engine's own folder, beside its socket, without the files of a killed actor."""
    folder = socket.with_suffix(".engine")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


class EngineReplica:
    """The actor that supervises one engine's process."""

    def __init__(self, settings: Settings, secret: str) -> None:
        self.settings = settings
        self.context = serve.get_replica_context()
        self.name = self.context.replica_tag
        self.secret = secret
        listening = first_free(settings.server)
        self.path = str(listening.path)
        self.folder = fresh_folder(listening.path)
        self.lifeline, self.held = os.pipe()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        entry = listen_tcp(host, 0, False)
        self.address = f"tcp:{host}:{entry[0].getsockname()[1]}"
        # by its socket: the host's next engine with this one finds the records
        own = settings.with_own_disk_path(listening.path.stem)
        self.process = EngineProcess("engine-0", own, listening, entry, self.lifeline, secret)
        LOG.info("%s: sessions on this host connect to %s", self.name, self.path)
        self.arena = DoorArena(settings.server)
        self.tenant = tenant_of("cluster", SCOPES) if settings.auth.keys_file else OPEN
        self.engine: Engine | None = None
        self.connecting = asyncio.Lock()
        self.has_replied = self.is_leaving = self.is_over = False
        self.reported_s = time.monotonic()
        self.deaths = Deaths()
        self.meeting = asyncio.get_running_loop().create_task(self.meet())
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def meet(self) -> None:
        """Waits for the engine's first reply. It is reported only then: while a listed engine does
        not reply, the router answers 503 for ids that it finds nowhere."""
        while await self.num_left() is None:
            await asyncio.sleep(REPORT_S)
        self.has_replied = True

    async def watch(self) -> None:
        """Restarts the process when it ends, and reports it to the router."""
        started = time.monotonic()
        while True:
            if self.process.running.poll() is not None:
                self.engine = None
                await asyncio.sleep(self.deaths.add(time.monotonic() - started))
                self.process.restart()
                started = time.monotonic()
            if self.has_replied:
                await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Reports the engine to the router, and learns whether the whole cluster stops."""
        here = ray.get_runtime_context()
        actor = here.get_actor_name() or "", here.namespace
        node, leaves = here.get_node_id(), self.is_leaving
        place = Place(self.name, actor, node, self.path, self.address, leaves)
        with suppress(*NO_ROUTER):
            async with asyncio.timeout(REPLY_S):
                handle = serve.get_deployment_handle(ROUTER, APP)
                self.is_over = await handle.report.remote(place)
                self.reported_s = time.monotonic()

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError where Serve should restart the replica."""
        if (count := self.deaths.young) >= MAX_DEATHS:
            raise RuntimeError(f"the engine died {count} times within {YOUNG_S:g} s of its start")
        if self.watching.done():
            raise RuntimeError("the engine is not supervised any more")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: the load for the autoscaling policy."""
        if (view := await self.ask()) is None:
            return {}
        (pages,) = view.fields["engines"]
        held = pages["referenced"] + pages["pinned"]
        load = Load(pages["free"], pages["cached"], held, queue_s=view.stages[0])
        return {name: float(getattr(load, name)) for name in ("free", "cached", "held", "queue_s")}

    async def ask(
        self, operation: Operation = ENGINES, fields: Mapping[str, Any] = NO_FIELDS
    ) -> EngineReply | None:
        """The engine's reply, by default its view of itself; None while it does not reply."""
        try:
            async with asyncio.timeout(REPLY_S), self.connecting:
                if self.engine is None or not self.engine.is_ready:
                    link = Link(self.settings.server, self.tenant is not OPEN, arena=self.arena)
                    await link.connect(self.path, "replica", self.secret)
                    self.engine = Engine(self.name, link, self.arena)
                return await self.engine.question(operation, self.tenant, dict(fields))
        except (NotReady, OSError, TimeoutError):
            return None

    async def __del__(self) -> None:
        """Called by Serve when it scales down: serves the sequences that are left, for at most
        `cluster.drain_s`, while a router calls it; then ends the process."""
        self.is_leaving = True
        await self.report()
        ends = time.monotonic() + self.settings.cluster.drain_s
        while time.monotonic() < ends and not self.is_over:
            await self.ask(DRAIN_ENGINE, {"name": ENGINE_NAME})
            if await self.num_left() == 0 or time.monotonic() > self.reported_s + NO_ROUTER_S:
                break
            await asyncio.sleep(REPORT_S)
        self.watching.cancel()
        self.meeting.cancel()
        with suppress(*NO_ROUTER):
            async with asyncio.timeout(REPLY_S):
                await serve.get_deployment_handle(ROUTER, APP).leave.remote(self.name)
                await asyncio.sleep(2 * REPORT_S)  # until the router has read it
        self.process.close()
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def num_left(self) -> int | None:
        """The number of sequences, imports, leases and pinned pages left; None while the engine
        does not reply."""
        if (view := await self.ask()) is None:
            return None
        (engine,) = view.fields["engines"]
        return sum(int(engine[name]) for name in ("sequences", "imports", "leases", "pinned"))
