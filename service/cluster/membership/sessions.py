"""The roster of a cluster's engines, and a session with each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from attnd.wire.frames import FrameError

from service.cluster.membership.engine import ASK_S, EngineSession
from service.cluster.membership.member import FIRST_SESSION_S, Member
from service.cluster.membership.members import Members
from service.cluster.membership.polling import ask, poll, poll_to_the_end
from service.cluster.membership.roster import RosterEntry, read_roster
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady
from service.operations.schema.fields import InfoAnswer

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
SESSION_ERRORS: Final = (OSError, AttndError, FrameError, ProblemText, TimeoutError)
"""What ends a session, or keeps it from beginning."""


class Sessions:
    """The sessions of one router, with the engines that the roster lists."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.door = self.secret = ""
        self.watching: asyncio.Task[None] | None = None

    async def watch(self, path: str, door: str, secret: str) -> None:
        """Follows the roster from now on; returns when one engine can be called."""
        self.door, self.secret = door, secret
        self.watching = asyncio.get_running_loop().create_task(self.follow_roster(Path(path)))
        await self.members.met.wait()

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
        for name, member in list(self.members.by_name.items()):
            if name not in by_name or by_name[name].address != member.address:
                self.members.remove(name)
        for name, one in by_name.items():
            if name not in self.members.by_name:
                self.add(name, one.address)
            member = self.members.by_name[name]
            member.is_leaving = one.is_leaving
            if member.engine is not None:
                member.engine.is_leaving = one.is_leaving

    def add(self, name: str, address: str) -> None:
        """Keeps a session with an engine from now on. A router that is ready stays so."""
        waits_s = FIRST_SESSION_S if self.members.state[0] != "ready" else 0.0
        member = self.members.by_name[name] = Member(name, address, time.monotonic() + waits_s)
        member.session = asyncio.get_running_loop().create_task(self.keep_session(member))

    async def keep_session(self, member: Member) -> None:
        """One session after another."""
        wait = FIRST_WAIT_S
        while True:
            try:
                engine = await self.connect(member)
                wait = FIRST_WAIT_S
                while member.engine is engine:
                    if not member.is_known:
                        await self.members.ids.read(engine)
                        member.is_known = True
                    await poll_to_the_end(self.members, member, engine)
                    await asyncio.sleep(POLL_S)
            except SESSION_ERRORS as error:
                self.members.disconnect(member, str(error) or type(error).__name__)
            except Exception:
                LOG.exception("the session with %s failed: this is a bug", member.name)
                self.members.disconnect(member, "a bug, see the log")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def connect(self, member: Member) -> EngineSession:
        """A session with an engine whose pool is like the others'. Raises SESSION_ERRORS."""
        link = Link(self.members.limits, self.members.has_keys, arena=self.members.arena)
        engine = EngineSession(member.name, link, self.members.arena)
        try:
            await link.connect(member.address, self.door, self.secret)
            async with asyncio.timeout(ASK_S):
                info = await ask(engine, "info", self.members.tenant)
                engine.learn(InfoAnswer.model_validate(info.fields))
                self.check_alike(member, engine)
                await poll(self.members, member, engine)
        except BaseException:
            link.close()
            for namespace, known in self.members.prefixes.items():  # what a poll may have read
                known.forget(engine.tag, namespace)
            raise
        if link.caller is not None:
            link.caller.on_lost = lambda why: self.members.disconnect(member, why)
        engine.is_leaving = member.is_leaving
        if self.members.metrics is not None and not self.members.metrics.has_process(member.name):
            engine.has_own_counts = True
        if member.tag != engine.tag:  # it has restarted, without its sequences
            self.members.mark_dead(member)
            member.is_known = False
        member.stop_watching()
        member.tag, member.is_dead = engine.tag, False
        self.members.changes += 1
        member.engine = self.members.by_tag[engine.tag] = engine
        member.positions.clear()
        self.members.met.set()
        LOG.info("%s is engine %s", member.name, engine.tag)
        return engine

    def check_alike(self, member: Member, engine: EngineSession) -> None:
        """Raises NotReady for an engine whose pool has other settings than those of the others that
        are there or may come back."""
        members = self.members
        others = (one for one in members.by_name.values() if one is not member and one.tag)
        if members.first_info is None or all(one.is_dead and one.engine is None for one in others):
            members.first_info = engine.info
        first = members.first_info
        for name in ALIKE:
            if (got := getattr(engine.info, name)) != (want := getattr(first, name)):
                if member.tag != engine.tag:  # the one before it cannot come back
                    self.members.mark_dead(member)
                raise NotReady(f"pool.{name} = {got}, expected {want} as in the other engines")

    def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        self.members.close()
