"""An engine as a replica of Ray Serve: it starts the engine's process on its node, tells where that
is and what it has, and empties it before it goes."""

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
from service.addresses import engine_path, engine_paths
from service.cluster.membership.engine import Engine, Told
from service.cluster.membership.local_engines import LocalEngines
from service.cluster.membership.members_file import write_members
from service.cluster.migration.drain import drain, num_left
from service.cluster.placement.cost import Load
from service.cluster.ray.directory import REPORT_S, Place, directory
from service.cluster.routing.router import Router
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.errors import NotReady
from service.operations.table import BY_NAME
from service.road.engine_end.listening import CannotListen, Listening, listen
from service.tenants import OPEN, SCOPES, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
ASK_S: Final = 5.0
MOST_ON_A_HOST: Final = 64
YOUNG_S: Final = 10.0
MOST_DEATHS: Final = 3
"""So many times the process may die young in a row before Serve is to start the replica anew."""


def first_free(server: ServerSettings) -> Listening:
    """The first of this host's sockets for engines that no other has: `8080-0.sock`, then
    `8080-1.sock` and so on. Raises CannotListen where all are taken."""
    private = server.socket is None and server.uds is None
    paths = engine_paths(engine_path(server, server.port), MOST_ON_A_HOST)
    for path in paths[:-1]:
        with suppress(CannotListen):
            return listen(path, private=private, mode=int(server.socket_mode, 8))
    return listen(paths[-1], private=private, mode=int(server.socket_mode, 8))


def fresh_folder(socket: Path) -> Path:
    """The engine's own folder, beside its socket. What an actor that was killed left there goes."""
    folder = socket.with_suffix(".engine")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


class EngineReplica:
    """One engine's process, and the actor that looks after it."""

    def __init__(self, settings: Settings, secret: str) -> None:
        self.settings = settings
        self.context = serve.get_replica_context()
        self.name = self.context.replica_tag
        listening = first_free(settings.server)
        self.folder = fresh_folder(listening.path)
        self.lifeline, self.held = os.pipe()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.engines = LocalEngines(
            settings, self.folder, self.lifeline, secret, over_tcp=True, host=host
        )
        self.process = self.engines.add(listening)
        LOG.info("%s: sessions on this host connect to %s", self.name, listening.path)
        self.arena = DoorArena(settings.server)
        self.tenant = tenant_of("cluster", SCOPES) if settings.auth.keys_file else OPEN
        self.directory = directory()
        self.engine: Engine | None = None
        self.is_leaving = False
        self.deaths = 0
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def watch(self) -> None:
        """Keep the process alive, and tell the directory of it."""
        started = time.monotonic()
        while True:
            if self.engines.processes[self.process].poll() is not None:
                self.engine = None
                self.deaths = self.deaths + 1 if time.monotonic() - started < YOUNG_S else 1
                self.engines.start(self.process)
                started = time.monotonic()
            with suppress(RayError):
                await self.directory.report.remote(self.place)
            await asyncio.sleep(REPORT_S)

    @property
    def place(self) -> Place:
        path = str(self.engines.listening[self.process].path)
        node = ray.get_runtime_context().get_node_id()
        return Place(self.name, node, path, self.engines.address(self.process), self.is_leaving)

    def check_health(self) -> None:
        """Serve asks; raises RuntimeError where it should start the replica anew."""
        if self.deaths >= MOST_DEATHS:
            raise RuntimeError(f"the engine died {self.deaths} times within {YOUNG_S:g} s")
        if self.watching.done():
            raise RuntimeError("nobody looks after the engine any more")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy knows of this engine."""
        try:
            told = await self.ask()
        except (NotReady, OSError, TimeoutError):
            return {}
        (pages,) = told.fields["engines"]
        held = pages["referenced"] + pages["pinned"]
        load = Load(pages["free"], pages["cached"], held, queue_s=told.stages[0])
        return {name: float(getattr(load, name)) for name in ("free", "cached", "held", "queue_s")}

    async def ask(self) -> Told:
        """What the engine has. Raises NotReady, OSError, TimeoutError."""
        async with asyncio.timeout(ASK_S):
            if self.engine is None or not self.engine.is_ready:
                link = Link(self.settings.server, self.tenant is not OPEN, arena=self.arena)
                path = str(self.engines.listening[self.process].path)
                await link.connect(path, "replica", self.engines.secret)
                self.engine = Engine(self.name, link, self.arena)
            call = self.engine.own(BY_NAME["engines"], self.tenant, ASK_S)
            return await self.engine.ask(call, {})

    async def __del__(self) -> None:
        """Serve scales down: take nothing new, and have the sequences moved to the other engines;
        what cannot be moved is waited for, for as long as `cluster.drain_s` says. Then end the
        process."""
        self.is_leaving = True
        emptying = asyncio.create_task(self.move_away())
        ends = time.monotonic() + self.settings.cluster.drain_s
        while time.monotonic() < ends and not await self.all_ends():
            if await self.num_left() == 0:
                break
            await asyncio.sleep(REPORT_S)
        emptying.cancel()
        with suppress(asyncio.CancelledError):
            await emptying
        self.watching.cancel()
        with suppress(RayError):
            await self.directory.leave.remote(self.name)
        await asyncio.sleep(2 * REPORT_S)  # all ingresses know by then
        self.engines.close()
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def all_ends(self) -> bool:
        """Whether the whole cluster is stopped, so that sequences have nowhere to go."""
        try:
            ended: bool = await self.directory.has_ended.remote()
        except RayError:
            return False
        return ended

    async def move_away(self) -> None:
        """A router of its own calls this engine and the others, and empties this one."""
        members = self.folder / "cluster.json"
        router = Router(self.settings.server, self.tenant is not OPEN)
        try:
            heard = await self.directory.read.remote()
            node, patience = (
                ray.get_runtime_context().get_node_id(),
                self.settings.cluster.lost_after_s,
            )
            write_members(members, [one.listed(node, patience) for one in heard])
            await router.connect(str(members), "replica", self.engines.secret)
            await drain(router, self.name)
        except Exception:
            LOG.exception("%s could not be emptied: its sequences are waited for", self.name)
        finally:
            router.close()

    async def num_left(self) -> int | None:
        """Sequences, imports, leases and pinned pages that have not been moved.

        None while the engine does not say: it may have them all.
        """
        try:
            told = await self.ask()
        except (NotReady, OSError, TimeoutError):
            return None
        return sum(map(num_left, told.fields["engines"]))
