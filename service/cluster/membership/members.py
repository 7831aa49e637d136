"""The engines of a cluster, and a session with each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnd.wire.frames import FrameError

from config.server import ServerSettings
from service.cluster.membership.engine import ASK_S, Engine
from service.cluster.membership.member import FIRST_SESSION_S, Member
from service.cluster.membership.polling import ask, poll, poll_to_the_end, read_events
from service.cluster.membership.roster import RosterEntry, read_roster
from service.cluster.placement.prefixes import Prefixes
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady
from service.families import STATES
from service.metrics import Metrics
from service.operations.schema.fields import InfoAnswer
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.greeting import PeerProcess
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

if TYPE_CHECKING:
    from service.cluster.routing.ids import Ids

LOG: Final = logging.getLogger("attnd.cluster")
ROSTER_S: Final = 0.1
"""How often the roster is looked at."""
POLL_S: Final = 0.25
"""How often an engine is polled."""
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 1.0
"""Before another session is tried."""
ALIKE: Final = (
    "num_layers",
    "page_size",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "k_scale",
    "v_scale",
)
"""Settings of the pool that all engines must share."""
EXIT_S: Final = 0.5
"""A killed process closes its sockets before it counts as having exited."""
REMOVED: Final = "removed from the cluster"
SESSION_ERRORS: Final = (OSError, AttndError, FrameError, ProblemText, TimeoutError)
"""What ends a session, or keeps it from beginning."""


class Members:
    """The engines of one router. `by_tag` has those with a session."""

    ids: Ids
    """Set by the map itself."""

    def __init__(
        self,
        limits: ServerSettings,
        has_keys: bool,
        arena: DoorArena,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics
        self.limits = limits
        self.has_keys = has_keys
        self.arena = arena
        self.by_name: dict[str, Member] = {}
        self.by_tag: dict[str, Engine] = {}
        self.changes = 0
        """Counts the engines that come, leave, die or fall silent."""
        self.first_info: InfoAnswer | None = None
        self.prefixes: dict[str, Prefixes] = {}
        """By namespace, for namespaces that have used prefixes."""
        self.tenant = tenant_of("cluster", SCOPES) if has_keys else OPEN
        """The tenant of the router's own questions."""
        self.door = self.secret = ""
        self.draining = ""
        """Why the router accepts no more requests; empty while it does."""
        self.watching: asyncio.Task[None] | None = None
        self.met = asyncio.Event()
        self.death = asyncio.Event()
        """Set, and replaced, whenever an engine is known to be dead."""

    @property
    def engines(self) -> list[Engine]:
        return list(self.by_tag.values())

    @property
    def open_engines(self) -> dict[str, Engine]:
        """The engines that take new sequences, by tag."""
        return {tag: one for tag, one in self.by_tag.items() if one.takes_new}

    @property
    def info(self) -> InfoAnswer:
        """Of any engine. Raises NotReady before the first session."""
        if self.first_info is None:
            raise NotReady(self.why_none or "no engine has been reached yet")
        return self.first_info

    def acting_for(self, tenant: Tenant) -> Tenant:
        """The tenant of the router's own questions for a caller: the caller's namespace, all
        scopes."""
        return tenant_of(tenant.namespace, SCOPES) if self.has_keys else tenant

    @property
    def state(self) -> tuple[str, str]:
        """`ready` once the ids of all engines are known, or were waited for."""
        if (why := self.why_none) is not None:
            return "starting", why
        now = time.monotonic()
        if unmet := [one for one in self.by_name.values() if one.is_awaited(now)]:
            why = "; ".join(f"{member.name}: {member.why}" for member in unmet)
            return "starting", f"waiting for engines: {why}"
        return "ready", "ready"

    @property
    def why_none(self) -> str | None:
        """Why no engine can be called; None where one can."""
        if any(engine.is_ready for engine in self.by_tag.values()):
            return None
        why = "; ".join(f"{member.name}: {member.why}" for member in self.by_name.values())
        return f"no engine can be called: {why or 'the cluster has none yet'}"

    def least_busy(self, but: Collection[str] = ()) -> Engine:
        """The ready engine with the fewest calls, except these tags. Raises NotReady."""
        among = [one for one in self.by_tag.values() if one.is_ready and one.tag not in but]
        if not among:
            raise NotReady(self.why_none or "no other engine can be called")
        return min(among, key=lambda one: (one.num_waiting, one.queue_s))

    # the roster

    async def watch(self, path: str, door: str, secret: str) -> None:
        """Follows the roster from now on; returns when one engine can be called."""
        self.door, self.secret = door, secret
        self.watching = asyncio.get_running_loop().create_task(self.follow_roster(Path(path)))
        await self.met.wait()

    async def follow_roster(self, path: Path) -> None:
        """Reads the roster whenever it has been replaced."""
        seen: tuple[int, int] | None = None
        while True:
            with suppress(FileNotFoundError):
                found = path.stat()
                if seen != (found.st_mtime_ns, found.st_ino):
                    seen = found.st_mtime_ns, found.st_ino
                    self.update(read_roster(path))
            await asyncio.sleep(ROSTER_S)

    def update(self, entries: Collection[RosterEntry]) -> None:
        by_name = {one.name: one for one in entries}
        for name, member in list(self.by_name.items()):
            if name not in by_name or by_name[name].address != member.address:
                self.remove(name)
        for name, one in by_name.items():
            if name not in self.by_name:
                self.add(name, one.address)
            member = self.by_name[name]
            member.is_leaving = one.is_leaving
            if member.engine is not None:
                member.engine.is_leaving = one.is_leaving

    def add(self, name: str, address: str) -> None:
        """Keeps a session with an engine from now on. A router that is ready stays so."""
        waits_s = FIRST_SESSION_S if self.state[0] != "ready" else 0.0
        member = self.by_name[name] = Member(name, address, time.monotonic() + waits_s)
        member.session = asyncio.get_running_loop().create_task(self.keep_session(member))

    def remove(self, name: str) -> None:
        """Ends the session with an engine, which then counts as dead."""
        member = self.by_name.pop(name)
        if member.session is not None:
            member.session.cancel()
        self.disconnect(member, REMOVED)
        self.mark_dead(member)

    def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        self.changes += 1
        for name in list(self.by_name):
            self.remove(name)

    # sessions

    async def keep_session(self, member: Member) -> None:
        """One session after another."""
        wait = FIRST_WAIT_S
        while True:
            try:
                engine = await self.connect(member)
                wait = FIRST_WAIT_S
                while member.engine is engine:
                    if not member.is_known:
                        await self.ids.read(engine)
                        member.is_known = True
                    await poll_to_the_end(self, member, engine)
                    await asyncio.sleep(POLL_S)
            except SESSION_ERRORS as error:
                self.disconnect(member, str(error) or type(error).__name__)
            except Exception:
                LOG.exception("the session with %s failed: this is a bug", member.name)
                self.disconnect(member, "a bug, see the log")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def connect(self, member: Member) -> Engine:
        """A session with an engine whose pool is like the others'. Raises SESSION_ERRORS."""
        link = Link(self.limits, self.has_keys, arena=self.arena)
        try:
            await link.connect(member.address, self.door, self.secret)
            engine = Engine(member.name, link, self.arena)
            async with asyncio.timeout(ASK_S):
                info = await ask(engine, "info", self.tenant)
                engine.learn(InfoAnswer.model_validate(info.fields))
                self.check_alike(member, engine)
                await poll(self, member, engine)
        except BaseException:
            link.close()
            raise
        if link.caller is not None:
            link.caller.on_lost = lambda why: self.disconnect(member, why)
        engine.is_leaving = member.is_leaving
        if self.metrics is not None and not self.metrics.has_process(member.name):
            engine.has_own_counts = True
        if member.tag != engine.tag:  # it has restarted, without its sequences
            self.mark_dead(member)
            member.is_known = False
        member.stop_watching()
        member.tag, member.is_dead = engine.tag, False
        self.changes += 1
        member.engine = self.by_tag[engine.tag] = engine
        member.positions.clear()
        self.met.set()
        LOG.info("%s is engine %s", member.name, engine.tag)
        return engine

    def check_alike(self, member: Member, engine: Engine) -> None:
        """Raises NotReady for an engine whose pool has other settings than those of the others that
        are there or may come back."""
        others = (one for one in self.by_name.values() if one is not member and one.tag)
        if self.first_info is None or all(one.is_dead and one.engine is None for one in others):
            self.first_info = engine.info
        first = self.first_info
        for name in ALIKE:
            if (got := getattr(engine.info, name)) != (want := getattr(first, name)):
                if member.tag != engine.tag:  # the one before it cannot come back
                    self.mark_dead(member)
                raise NotReady(f"pool.{name} = {got}, expected {want} as in the other engines")

    def disconnect(self, member: Member, why: str) -> None:
        """Ends the session. The engine is dead only when its process has exited."""
        engine, member.engine = member.engine, None
        if why not in (member.why, REMOVED) and not self.draining:  # they end with the router
            LOG.warning("%s is lost: %s", member.name, why)
        member.why = why
        if engine is None:
            return
        if self.by_tag.get(engine.tag) is engine:
            self.changes += 1
            del self.by_tag[engine.tag]
        for namespace, known in self.prefixes.items():
            known.forget(engine.tag, namespace)
        if self.metrics is not None:
            self.metrics.engine(member.name, dict.fromkeys(STATES, 0), 0, 0.0, engine.num_calls)
            self.metrics.remote.lose(engine.tag)
        if engine.link.caller is not None:
            engine.link.caller.on_lost = None
            self.watch_exit(member, engine.link.caller)
        engine.link.close()

    def watch_exit(self, member: Member, caller: RoadCaller) -> None:
        """Marks the member dead when its process exits."""
        if caller.peer.fd < 0:
            return
        member.peer, caller.peer = caller.peer, PeerProcess()
        if member.peer.has_exited:
            self.mark_dead(member)
        else:
            asyncio.get_running_loop().add_reader(member.peer.fd, self.mark_dead, member)

    def mark_dead(self, member: Member) -> None:
        """The engine of the latest session is known to be dead: its sequences are lost."""
        member.stop_watching()
        if member.is_dead:
            return
        member.is_dead = True
        self.changes += 1
        self.ids.bury(member.tag)
        self.death.set()
        self.death = asyncio.Event()

    # engines without a session

    def absent(self, tag: str | None = None) -> list[Member]:
        """Members without a session that may be the engine of a tag; None: of any."""
        without = [one for one in self.by_name.values() if one.engine is None and not one.is_dead]
        return [one for one in without if tag is None or one.tag in ("", tag)]

    def is_dead(self, tag: str) -> bool:
        """Whether the engine of a tag is known to be dead: all members are others."""
        return tag not in self.by_tag and not self.absent(tag)

    def check_reachable(self, tags: Collection[str] | None = None) -> None:
        """Raises NotReady where one of these engines (None: any) may come back with its
        sequences."""
        wanted = [None] if tags is None else [tag for tag in tags if tag not in self.by_tag]
        for member in (one for tag in wanted for one in self.absent(tag)):
            why = f"{member.name} cannot be called, and may have the sequences: {member.why}"
            raise NotReady(f"{why}: retry later")

    def check_known(self) -> None:
        """Raises NotReady where the ids of an engine are not known yet, which may be any."""
        for member in self.by_name.values():
            if not (member.is_known or member.is_dead):
                why = f"the ids of the sequences of {member.name} are not known yet"
                raise NotReady(f"{why} ({member.why}): retry later")

    def check_all_respond(self) -> None:
        """Raises NotReady where an engine that may have any sequence does not respond."""
        self.check_reachable()
        if silent := [one.name for one in self.by_tag.values() if one.is_silent]:
            why = f"{', '.join(silent)} does not respond, and may have the sequences"
            raise NotReady(f"{why}: retry later")

    async def wait_for_fate(self, tags: Collection[str]) -> None:
        """Waits a moment for engines whose session has ended and whose process may be exiting."""
        ends = time.monotonic() + EXIT_S
        while any(one.peer is not None for tag in tags for one in self.absent(tag)):
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    await self.death.wait()
            except TimeoutError:
                return

    # cached prefixes

    async def follow(self, namespace: str) -> None:
        """Reads a namespace's events, now and with every poll."""
        self.prefixes_of(namespace)
        for member in list(self.by_name.values()):
            if member.engine is not None:
                await read_events(self, member, member.engine, namespace)

    def prefixes_of(self, namespace: str) -> Prefixes:
        """The cached pages of a namespace, which is followed from the first call on."""
        return self.prefixes.setdefault(namespace, Prefixes())
