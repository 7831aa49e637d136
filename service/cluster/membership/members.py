"""Which engines there are, a session with each, and what each of them has."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnd.wire.frames import FrameError

from config.server import ServerSettings
from service.cluster.membership.engine import Engine
from service.cluster.membership.members_file import Listed, read_members
from service.cluster.membership.polling import (
    ASK_DEADLINE_S,
    Member,
    ask,
    look_at,
    poll,
    read_events,
)
from service.cluster.placement.prefixes import Prefixes
from service.cluster.routing.tags import BETWEEN, tags_of
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady
from service.metrics import STATES, Metrics
from service.operations.schema.info import InfoAnswer
from service.road.caller_end.caller import RoadCaller
from service.road.caller_end.peer_process import PeerProcess
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Home, Ranks

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
FATE_S: Final = 0.5
"""A process that was killed closes its sockets before it counts as having exited."""
MOST_RANKS: Final = 1024
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
        self.ranks: OrderedDict[str, Ranks] = OrderedDict()
        """Engines that sequences are dealt out over, by their tags, the latest used last."""
        self.prefixes: dict[str, Prefixes] = {}
        """By namespace, of those that have looked for a prefix."""
        self.tenant = tenant_of("cluster", SCOPES) if has_keys else OPEN
        """Whose the router's own questions are."""
        self.on_torn: Callable[[Tenant, list[str]], None] = lambda tenant, ids: None
        """Called for sequences that an engine may have taken a part of along."""
        self.door = self.secret = ""
        self.watching: asyncio.Task[None] | None = None
        self.met = asyncio.Event()
        self.told_fate = asyncio.Event()
        """Set, and another one made, whenever an engine is known to be dead."""

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
            if len(engines) < len(tags) or len(set(tags)) < len(tags):
                return None
            from service.cluster.sharded.ranks import Ranks  # with the first sharded sequence

            found = self.ranks[tag] = Ranks(engines, self.acting_for)
            if len(self.ranks) > MOST_RANKS:
                self.forget_ranks()
        self.ranks.move_to_end(tag)
        return found

    def forget_ranks(self) -> None:
        """Anyone may name engines in an id, in any order: keep those that have sequences, and of
        the others the latest used."""
        unused = [tag for tag, ranks in self.ranks.items() if not ranks.books]
        for tag in (unused or list(self.ranks))[: len(self.ranks) - MOST_RANKS]:
            del self.ranks[tag]

    @property
    def info(self) -> InfoAnswer:
        """Of any engine. Raises NotReady before one was met."""
        if self.first_info is None:
            raise NotReady(self.why_none or "no engine was met yet")
        return self.first_info

    def acting_for(self, tenant: Tenant) -> Tenant:
        """Whose the questions are that the router asks by itself for the sake of a caller: his
        namespace's, whatever he may do there."""
        return tenant_of(tenant.namespace, SCOPES) if self.has_keys else tenant

    @property
    def state(self) -> tuple[str, str]:
        """`ready` once all members were met, or have been waited for."""
        if (why := self.why_none) is not None:
            return "starting", why
        now = time.monotonic()
        if unmet := [one for one in self.by_name.values() if one.is_awaited(now)]:
            why = "; ".join(f"{member.name}: {member.why}" for member in unmet)
            return "starting", f"not all engines were met yet: {why}"
        return "ready", "ready"

    @property
    def why_none(self) -> str | None:
        """Why no engine can be called; None where one can."""
        if any(engine.is_ready for engine in self.by_tag.values()):
            return None
        why = "; ".join(f"{member.name}: {member.why}" for member in self.by_name.values())
        return f"no engine can be called: {why or 'there is none yet'}"

    def idlest(self, but: Collection[str] = ()) -> Engine:
        """Of those that can be called, the one with the fewest calls. Raises NotReady."""
        among = [one for one in self.by_tag.values() if one.is_ready and one.tag not in but]
        if not among:
            raise NotReady(self.why_none or "no other engine can be called")
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
        member.wait_for(time.monotonic())
        member.keeping = asyncio.get_running_loop().create_task(self.keep(member))

    def remove(self, name: str) -> None:
        """Let an engine go; what waits for it ends as if it had died."""
        member = self.by_name.pop(name)
        if member.keeping is not None:
            member.keeping.cancel()
        self.lose(member, LEFT)
        self.bury(member)

    def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        self.changes += 1
        self.ranks.clear()  # the engines keep what they have
        for member in self.by_name.values():
            member.torn.clear()
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
                    await look_at(self, member, engine)
                    await asyncio.sleep(POLL_S)
            except BROKEN as error:
                self.lose(member, str(error) or type(error).__name__)
                member.is_out_of_reach(time.monotonic())
            except Exception:
                LOG.exception("the session with %s failed: this is a bug", member.name)
                self.lose(member, "a bug, see the log")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def meet(self, member: Member) -> Engine:
        """A session with an engine that fits the others. Raises what is BROKEN."""
        link = Link(self.limits, self.has_keys, arena=self.arena)
        link.on_reached = member.is_reached
        try:
            await link.connect(member.address, self.door, self.secret)
            engine = Engine(member.name, link, self.arena)
            async with asyncio.timeout(ASK_DEADLINE_S):
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
            self.bury(member)
        member.stop_watching()
        member.torn.clear()
        member.tag, member.is_dead, member.is_met = engine.tag, False, True
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
        """The session is over. Whether the engine is, its process says."""
        engine, member.engine = member.engine, None
        if why not in (member.why, LEFT):
            LOG.warning("%s is lost: %s", member.name, why)
        member.why = why
        if engine is None:
            return
        if self.by_tag.get(engine.tag) is engine:
            self.changes += 1
            del self.by_tag[engine.tag]
        member.wait_for(time.monotonic())
        for tag, ranks in list(self.ranks.items()):
            if engine in ranks.engines:
                del self.ranks[tag]
                for tenant, ids in ranks.abandon().items():
                    member.torn.setdefault(tenant, []).extend(ids)
        for namespace, known in self.prefixes.items():
            known.forget(engine.tag, namespace)
        if self.metrics is not None:
            self.metrics.engine(member.name, dict.fromkeys(STATES, 0), 0, 0.0, engine.num_calls)
            self.metrics.lost(engine.tag)
        if engine.link.caller is not None:
            engine.link.caller.on_lost = None
            self.watch_exit(member, engine.link.caller)
        engine.link.close()

    def watch_exit(self, member: Member, caller: RoadCaller) -> None:
        """Learn when the engine's process exits, if it has not yet."""
        if caller.peer.fd < 0:
            return
        member.peer, caller.peer = caller.peer, PeerProcess()
        if member.peer.has_exited:
            self.bury(member)
        else:
            asyncio.get_running_loop().add_reader(member.peer.fd, self.bury, member)

    def bury(self, member: Member) -> None:
        """The engine of a member's last session is known to be dead: what it had is lost."""
        member.stop_watching()
        if member.is_dead:
            return
        member.is_dead = True
        self.changes += 1
        self.told_fate.set()
        self.told_fate = asyncio.Event()
        torn, member.torn = member.torn, {}
        for tenant, ids in torn.items():
            self.on_torn(tenant, ids)

    def absent(self, tag: str | None = None) -> list[Member]:
        """Members without a session that may be the engine of a tag, or may have any sequence."""
        every = self.by_name.values()
        return [one for one in every if one.may_be(one.tag if tag is None else tag)]

    def is_gone(self, tag: str) -> bool:
        """Whether the engine of a tag is dead, as far as there is proof: all members are known, and
        are others."""
        return tag not in self.by_tag and not self.absent(tag)

    def check_reachable(self, tags: Collection[str] | None = None) -> None:
        """Raises NotReady where one of these engines, or any, may still come back with what it
        had."""
        now = time.monotonic()
        wanted = [None] if tags is None else [tag for tag in tags if tag not in self.by_tag]
        for member in (one for tag in wanted for one in self.absent(tag)):
            if now < member.counts_until:
                left = member.counts_until - now
                until = "" if math.isinf(left) else f"; it counts as lost in {left:.1f} s"
                told = f"{member.name} cannot be called, and may have the sequences: {member.why}"
                raise NotReady(f"{told}{until}: retry later")

    def check_all_answer(self) -> None:
        """Raises NotReady where an engine does not answer that may have any sequence."""
        self.check_reachable()
        if silent := [one.name for one in self.by_tag.values() if one.is_silent]:
            told = f"{', '.join(silent)} does not answer, and may have the sequences"
            raise NotReady(f"{told}: retry later")

    async def fate_of(self, tags: Collection[str]) -> None:
        """Wait a moment where a session has ended, and its engine's process may be about to."""
        ends = time.monotonic() + FATE_S
        while any(one.peer is not None for tag in tags for one in self.absent(tag)):
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    await self.told_fate.wait()
            except TimeoutError:
                return

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
