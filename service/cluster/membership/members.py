"""The engines of a cluster, with and without a session: which can be called, and which are dead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final, Protocol

from config.server import ServerSettings
from service.cluster.membership.engine import EngineSession
from service.cluster.membership.member import Member
from service.cluster.placement.prefixes import Prefixes
from service.doors.kit.arena import DoorArena
from service.errors import NotReady
from service.families import STATES
from service.metrics import Metrics
from service.operations.schema.fields import InfoAnswer
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.greeting import PeerProcess
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
EXIT_S: Final = 0.5
"""A killed process closes its sockets before it counts as having exited."""
REMOVED: Final = "removed from the cluster"


class IdsByEngine(Protocol):
    """The map from ids to engines, as far as it depends on them: `routing/ids.py`."""

    def bury(self, tag: str) -> None: ...
    def has_too_many(self, tag: str, num_sequences: int) -> bool: ...
    async def read(self, engine: EngineSession) -> None: ...


class Members:
    """The engines of one router. `by_tag` has those with a session."""

    ids: IdsByEngine
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
        self.by_tag: dict[str, EngineSession] = {}
        self.changes = 0
        """Counts the engines that come, leave, die or fall silent."""
        self.first_info: InfoAnswer | None = None
        self.prefixes: dict[str, Prefixes] = {}
        """By namespace, for namespaces that have used prefixes."""
        self.tenant = tenant_of("cluster", SCOPES) if has_keys else OPEN
        """The tenant of the router's own questions."""
        self.draining = ""
        """Why the router accepts no more requests; empty while it does."""
        self.met = asyncio.Event()
        self.death = asyncio.Event()
        """Set, and replaced, whenever an engine is known to be dead."""

    @property
    def engines(self) -> list[EngineSession]:
        return list(self.by_tag.values())

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

    def least_busy(self, but: Collection[str] = ()) -> EngineSession:
        """The ready engine with the fewest calls, except these tags. Raises NotReady."""
        among = [one for one in self.by_tag.values() if one.is_ready and one.tag not in but]
        if not among:
            raise NotReady(self.why_none or "no other engine can be called")
        return min(among, key=lambda one: (one.num_waiting, one.queue_s))

    def remove(self, name: str) -> None:
        """Ends the session with an engine, which then counts as dead."""
        member = self.by_name.pop(name)
        if member.session is not None:
            member.session.cancel()
        self.disconnect(member, REMOVED)
        self.mark_dead(member)

    def close(self) -> None:
        self.changes += 1
        for name in list(self.by_name):
            self.remove(name)

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

    def prefixes_of(self, namespace: str) -> Prefixes:
        """The cached pages of a namespace, which is followed from the first call on."""
        return self.prefixes.setdefault(namespace, Prefixes())
