"""An engine as a replica of Ray Serve: starts the engine's process on its node, reports its address
and load, and drains it before it stops."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import ray
from ray import serve
from ray.exceptions import RayError

from config.server import ServerSettings
from config.settings import Settings
from service.addresses import engine_path, engine_paths, listen_tcp
from service.cluster.membership.engine import Engine, EngineReply
from service.cluster.membership.members_file import write_members
from service.cluster.membership.processes import EngineProcess
from service.cluster.migration.drain import num_left
from service.cluster.placement.cost import Load
from service.cluster.ray.directory import REPORT_S, Place, directory
from service.cluster.routing.router import Router
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.errors import NotReady
from service.operations.table import BY_NAME
from service.road.engine_end.listening import CannotListen, Listening, listen
from service.supervisor import YOUNG_S, Deaths
from service.tenants import OPEN, SCOPES, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
REPLY_S: Final = 5.0
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
        self.directory = directory()
        self.engine: Engine | None = None
        self.connecting = asyncio.Lock()
        self.has_replied = self.is_leaving = False
        self.deaths = Deaths()
        self.meeting = asyncio.get_running_loop().create_task(self.meet())
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def meet(self) -> None:
        """Waits for the engine's first reply. It is reported only then: while a listed engine does
        not reply, doors answer 503 for ids that they find nowhere."""
        while await self.num_left() is None:
            await asyncio.sleep(REPORT_S)
        self.has_replied = True

    async def watch(self) -> None:
        """Restarts the process when it ends, and reports it to the directory."""
        started = time.monotonic()
        while True:
            if self.process.running.poll() is not None:
                self.engine = None
                await asyncio.sleep(self.deaths.add(time.monotonic() - started))
                self.process.restart()
                started = time.monotonic()
            if self.has_replied:
                with suppress(RayError):
                    await self.directory.report.remote(self.place)
            await asyncio.sleep(REPORT_S)

    @property
    def place(self) -> Place:
        node = ray.get_runtime_context().get_node_id()
        return Place(self.name, node, self.path, self.address, self.is_leaving)

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

    async def ask(self) -> EngineReply | None:
        """The engine's view of itself; None while it does not reply."""
        try:
            async with asyncio.timeout(REPLY_S), self.connecting:
                if self.engine is None or not self.engine.is_ready:
                    link = Link(self.settings.server, self.tenant is not OPEN, arena=self.arena)
                    await link.connect(self.path, "replica", self.secret)
                    self.engine = Engine(self.name, link, self.arena)
                return await self.engine.question(BY_NAME["engines"], self.tenant, {})
        except (NotReady, OSError, TimeoutError):
            return None

    async def __del__(self) -> None:
        """Called by Serve when it scales down: drains the engine, for at most `cluster.drain_s`,
        then ends the process."""
        self.is_leaving = True
        draining = asyncio.create_task(self.drain())
        ends = time.monotonic() + self.settings.cluster.drain_s
        while time.monotonic() < ends and not await self.all_ends():
            if await self.num_left() == 0:
                break
            await asyncio.sleep(REPORT_S)
        draining.cancel()
        with suppress(asyncio.CancelledError):
            await draining
        self.watching.cancel()
        self.meeting.cancel()
        with suppress(RayError):
            await self.directory.leave.remote(self.name)
        await asyncio.sleep(2 * REPORT_S)  # until all ingresses have read it
        self.process.close()
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def all_ends(self) -> bool:
        """Whether the whole cluster stops, so that there is nowhere to move sequences."""
        try:
            ended: bool = await self.directory.has_ended.remote()
        except RayError:
            return False
        return ended

    async def drain(self) -> None:
        """Moves everything to the other engines, with a router of its own."""
        members = self.folder / "cluster.json"
        router = Router(self.settings.server, self.tenant is not OPEN)
        try:
            places = await self.directory.read.remote()
            node = ray.get_runtime_context().get_node_id()
            lost_after_s = self.settings.cluster.lost_after_s
            write_members(members, [one.entry(node, lost_after_s) for one in places])
            await router.connect(str(members), "replica", self.secret)
            await router.drains.run(self.name)
        except Exception:
            LOG.exception(
                "%s could not be drained: waiting until its sequences are deleted", self.name
            )
        finally:
            router.close()

    async def num_left(self) -> int | None:
        """The number of sequences, imports, leases and pinned pages left; None while the engine
        does not reply."""
        view = await self.ask()
        return None if view is None else sum(map(num_left, view.fields["engines"]))
