"""Which engines there are, a session with each, and what each of them has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from config.server import ServerSettings
from service.cluster.engine import Engine
from service.cluster.listed import Listed, read_members
from service.cluster.names import BETWEEN, tags_of
from service.cluster.polling import Member, ask, poll, read_events
from service.cluster.prefixes import Prefixes
from service.cluster.ranks import Home, Ranks
from service.doors.arena import DoorArena
from service.doors.link import Link
from service.doors.problems import ProblemText
from service.errors import AttndError, NotReady
from service.metrics import STATES, Metrics
from service.operations.info import InfoAnswer
from service.road.frames import FrameError
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
LOOK_S: Final = 0.1
"""How often the file of members is looked at."""
POLL_S: Final = 0.25
"""How often an engine is asked what it has."""
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 1.0
"""Before an engine is called again."""
ALIKE: Final = ("num_layers", "page_size", "num_kv_heads", "head_dim", "dtype")
"""What must be the same of all engines."""
LEFT: Final = "it was taken out of the cluster"
BROKEN: Final = (OSError, AttndError, FrameError, ProblemText, TimeoutError)
"""What ends a session, or keeps it from beginning."""


class Members:
    """The engines of one router. `by_tag` has those that can be called."""

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
        """How often engines have come or gone."""
        self.first_info: InfoAnswer | None = None
        self.ranks: dict[str, Ranks] = {}
        """Engines that sequences are dealt out over, by their tags."""
        self.prefixes: dict[str, Prefixes] = {}
        """By namespace, of those that have looked for a prefix."""
        self.tenant = tenant_of("cluster", SCOPES) if has_keys else OPEN
        """Whose the router's own questions are."""
        self.on_torn: Callable[[Tenant, list[str]], None] = lambda tenant, ids: None
        """Called for sequences that an engine may have taken a part of along."""
        self.door = self.secret = ""
        self.watching: asyncio.Task[None] | None = None
        self.met = asyncio.Event()
        self.away: dict[str, float] = {}
        """Engines of other hosts that cannot be reached: when they count as lost, by the tag."""

    @property
    def engines(self) -> list[Engine]:
        return list(self.by_tag.values())

    def home(self, tag: str) -> Home | None:
        """An engine, or all those that a sequence is dealt out over; None when one is not there."""
        if BETWEEN not in tag:
            return self.by_tag.get(tag)
        found = self.ranks.get(tag)
        if found is None:
            tags = tags_of(tag)
            engines = [self.by_tag[one] for one in tags if one in self.by_tag]
            if len(engines) < len(tags):
                return None
            found = self.ranks[tag] = Ranks(engines, self.acting_for)
        return found

    @property
    def info(self) -> InfoAnswer:
        """Of any engine. Raises NotReady before one was met."""
        if self.first_info is None:
            raise NotReady(self.state[1])
        return self.first_info

    def acting_for(self, tenant: Tenant) -> Tenant:
        """Whose the questions are that the router asks by itself for the sake of a caller: his
        namespace's, whatever he may do there."""
        return tenant_of(tenant.namespace, SCOPES) if self.has_keys else tenant

    @property
    def state(self) -> tuple[str, str]:
        if any(engine.is_ready for engine in self.by_tag.values()):
            return "ready", "ready"
        why = "; ".join(f"{member.name}: {member.why}" for member in self.by_name.values())
        return "starting", f"no engine can be called: {why or 'there is none yet'}"

    def idlest(self, but: Collection[str] = ()) -> Engine:
        """Of those that can be called, the one with the fewest calls. Raises NotReady."""
        among = [one for one in self.by_tag.values() if one.is_ready and one.tag not in but]
        if not among:
            raise NotReady(self.state[1])
        return min(among, key=lambda one: (one.num_waiting, one.queue_s))

    # who there is

    async def watch(self, path: str, door: str, secret: str) -> None:
        """Meet those that the file names, from now on; returns when one can be called."""
        self.door, self.secret = door, secret
        self.watching = asyncio.get_running_loop().create_task(self.look(Path(path)))
        await self.met.wait()

    async def look(self, path: Path) -> None:
        """Read the file of members whenever it has been replaced."""
        seen: tuple[int, int] | None = None
        while True:
            with suppress(FileNotFoundError):
                found = path.stat()
                if seen != (found.st_mtime_ns, found.st_ino):
                    seen = found.st_mtime_ns, found.st_ino
                    self.take(read_members(path))
            await asyncio.sleep(LOOK_S)

    def take(self, given: Collection[Listed]) -> None:
        """These are all the members there are now."""
        names = {one.name: one for one in given}
        for name, member in list(self.by_name.items()):
            if name not in names or names[name].address != member.address:
                self.remove(name)
        for name, one in names.items():
            if name not in self.by_name:
                self.add(name, one.address, one.lost_after_s)
            member = self.by_name[name]
            member.is_leaving = one.is_leaving
            if member.engine is not None:
                member.engine.is_leaving = one.is_leaving

    def add(self, name: str, address: str, lost_after_s: float) -> None:
        """Meet an engine, and again whenever the session with it ends."""
        member = self.by_name[name] = Member(name, address, lost_after_s)
        member.keeping = asyncio.get_running_loop().create_task(self.keep(member))

    def remove(self, name: str) -> None:
        """Let an engine go; what waits for it ends as if it had died."""
        member = self.by_name.pop(name)
        if member.keeping is not None:
            member.keeping.cancel()
        self.lose(member, LEFT)

    def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        self.changes += 1
        self.ranks.clear()  # the engines keep what they have
        for name in list(self.by_name):
            self.remove(name)

    # sessions

    async def keep(self, member: Member) -> None:
        """One session after another."""
        wait = FIRST_WAIT_S
        while True:
            try:
                engine = await self.meet(member)
                wait = FIRST_WAIT_S
                while member.engine is engine:
                    await poll(self, member, engine)
                    await asyncio.sleep(POLL_S)
            except BROKEN as error:
                self.lose(member, str(error) or type(error).__name__)
            except Exception:
                LOG.exception("the session with %s failed: this is a bug", member.name)
                self.lose(member, "a bug, see the log")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def meet(self, member: Member) -> Engine:
        """A session with an engine that fits the others. Raises what is BROKEN."""
        link = Link(self.limits, self.has_keys, arena=self.arena)
        try:
            await link.connect(member.address, self.door, self.secret)
            engine = Engine(member.name, link, self.arena)
            told = await ask(engine, "info", self.tenant)
            engine.learn(InfoAnswer.model_validate(told.fields))
            self.check_alike(engine.info)
            await poll(self, member, engine)
        except BaseException:
            link.close()
            raise
        if link.caller is not None:
            link.caller.on_lost = lambda why: self.lose(member, why)
        engine.is_leaving = member.is_leaving
        if self.metrics is not None and not self.metrics.has_process(member.name):
            engine.is_elsewhere = True
        if member.tag != engine.tag:  # started anew: what it had is gone
            self.away.pop(member.tag, None)
        self.away.pop(engine.tag, None)
        member.tag = engine.tag
        self.changes += 1
        member.engine = self.by_tag[engine.tag] = engine
        member.positions.clear()
        self.met.set()
        LOG.info("%s is engine %s", member.name, engine.tag)
        return engine

    def check_alike(self, info: InfoAnswer) -> None:
        """Raises NotReady for an engine whose pool is of another geometry."""
        first = self.first_info = self.first_info or info
        for name in ALIKE:
            if (got := getattr(info, name)) != (want := getattr(first, name)):
                raise NotReady(f"its pool.{name} is {got}, that of the others {want}")

    def lose(self, member: Member, why: str) -> None:
        """The session is over, and with an engine of this host its sequences."""
        engine, member.engine = member.engine, None
        if why not in (member.why, LEFT):
            LOG.warning("%s is lost: %s", member.name, why)
        member.why = why
        if engine is None:
            return
        if self.by_tag.get(engine.tag) is engine:
            self.changes += 1
            del self.by_tag[engine.tag]
        may_return = member.lost_after_s > 0 and why != LEFT
        if may_return:
            self.away[engine.tag] = time.monotonic() + member.lost_after_s
        for tag, ranks in list(self.ranks.items()):
            if engine in ranks.engines:
                del self.ranks[tag]
                if not may_return:
                    for tenant, ids in ranks.abandon().items():
                        self.on_torn(tenant, ids)
        for namespace, known in self.prefixes.items():
            known.forget(engine.tag, namespace)
        if self.metrics is not None:
            self.metrics.engine(member.name, dict.fromkeys(STATES, 0), 0, 0.0, engine.num_calls)
            self.metrics.lost(engine.tag)
        if engine.link.caller is not None:
            engine.link.caller.on_lost = None
        engine.link.close()

    def check_reachable(self, tags: Collection[str]) -> None:
        """Raises NotReady where an engine may still come back with what it had."""
        for tag in tags:
            if (left := self.away.get(tag, 0.0) - time.monotonic()) > 0:
                told = f"engine {tag} cannot be reached; it counts as lost in {left:.1f} s"
                raise NotReady(f"{told}: retry later")

    # what they have

    async def follow(self, namespace: str) -> None:
        """Read a namespace's events, now and from now on."""
        self.prefixes_of(namespace)
        for member in list(self.by_name.values()):
            if member.engine is not None:
                await read_events(self, member, member.engine, namespace)

    def prefixes_of(self, namespace: str) -> Prefixes:
        """What is known of a namespace's cached pages; it is followed from the first time on."""
        return self.prefixes.setdefault(namespace, Prefixes())
