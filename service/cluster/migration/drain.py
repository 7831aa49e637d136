"""Drains an engine: moves its sequences, pins and leases to engines that have room.

Calls go on meanwhile. A sequence is first copied as an anchor, a fork that never changes. Then its
calls are held up while the few tokens since are copied, and its ownership is transferred: the old
engine gives it up before the new one may answer for it, so there are never two of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from service.cluster.membership import polling
from service.cluster.membership.engine import Engine
from service.cluster.membership.members import Members
from service.cluster.migration import ownership
from service.cluster.migration.lease_migration import move_holds
from service.cluster.migration.transfer import (
    ANCHOR_TTL_S,
    ENGINE_ERRORS,
    Family,
    NoRoom,
    Progress,
    ask,
    begin_transfer,
    families_of,
    reason,
)
from service.cluster.routing.locator import Locator
from service.cluster.routing.replies import results_in_turn, whole
from service.cluster.routing.tags import ANCHOR, new_anchor
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.operations.sequences import CREATE_SEQUENCES, GET_SEQUENCE, LIST_SEQUENCES, MAX_LISTED
from service.operations.status import DRAIN_ENGINE, ENGINE_NAME, LIST_NAMESPACES
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
MAX_PARALLEL: Final = 4
"""Families that are moved at once, each with two parts of 4 MiB in memory."""
MAX_TRIES: Final = 4
MAX_ANCHORS: Final = 3
SHORT_TAIL: Final = 4
"""Parts that may be copied while calls are held up."""
HANDED_S: Final = 3600.0
"""For how long other doors may settle a transfer whose door died."""
SWEEP_PAUSE_S: Final = 0.5
LOG_EVERY_S: Final = 10.0


class Drains:
    """The engines that one router drains."""

    def __init__(self, members: Members, locator: Locator) -> None:
        self.members = members
        self.locator = locator
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Drains an engine until it is empty."""
        if name not in self.tasks or self.tasks[name].done():
            self.tasks[name] = asyncio.get_running_loop().create_task(self.run(name))

    async def run(self, name: str) -> None:
        await Drain(self.members, self.locator, name).run()

    def stop(self, name: str) -> None:
        if (task := self.tasks.pop(name, None)) is not None:
            task.cancel()

    def close(self) -> None:
        for name in list(self.tasks):
            self.stop(name)


@dataclass(slots=True)
class Drain:
    """The drain of the engine `name`."""

    members: Members
    locator: Locator
    name: str
    progress: Progress = field(default_factory=Progress)

    @property
    def source(self) -> Engine:
        """Raises NotReady."""
        member = self.members.by_name.get(self.name)
        if member is None or member.engine is None:
            raise NotReady(f"{self.name} cannot be called")
        return member.engine

    async def run(self) -> None:
        """Marks the engine as draining, and moves its sequences, pins and leases until it is empty,
        or accepts new sequences again. Waits for imports, which become sequences."""
        progress, logged_at, has_begun = self.progress, time.monotonic(), False
        while self.name in self.members.by_name:
            left: int | None = -1
            try:
                if not has_begun:
                    await ask(self.source, DRAIN_ENGINE, self.members.tenant, {"name": ENGINE_NAME})
                    LOG.info("draining %s", self.name)
                    has_begun = True
                left = await self.sweep()
            except ENGINE_ERRORS as error:
                progress.stayed = Counter({reason(error): 1})
            if not left:
                end = "is empty" if left == 0 else "accepts new sequences again"
                LOG.info("%s %s: %s", self.name, end, progress)
                return
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                LOG.info("draining %s: %s", self.name, progress)
            await asyncio.sleep(SWEEP_PAUSE_S)

    async def sweep(self) -> int | None:
        """Tries to move everything once. Returns how much is left; None where the engine is no
        longer draining."""
        source, progress = self.source, self.progress
        before, progress.stayed = progress.moved, Counter()
        families: list[Family] = []
        tenants = await self.tenants(source)
        for tenant in tenants:
            views = [one for one in await views_of(source, tenant) if not is_anchor(one)]
            families += families_of(tenant, views)
        whole(await results_in_turn(MAX_PARALLEL, self.move_family, zip(families)))
        for tenant in tenants:  # many of the pages have moved with sequences
            await move_holds(self.members, source, tenant, progress)
        view = await polling.ask(source, "engines", self.members.tenant)
        (engine,) = view.fields["engines"]
        if engine["imports"]:
            progress.stayed["an unfinished import"] = engine["imports"]
        if self.members.metrics is not None:
            moved = progress.moved - before
            self.members.metrics.moved(self.name, moved, progress.stayed.total())
        return num_left(engine) if engine["draining"] else None

    async def tenants(self, source: Engine) -> list[Tenant]:
        """All that may have sequences there."""
        if not self.members.has_keys:
            return [OPEN]
        listed = await ask(source, LIST_NAMESPACES, self.members.tenant, {})
        return [tenant_of(name, SCOPES) for name in listed.fields["namespaces"]]

    async def move_family(self, family: Family) -> None:
        """Moves one sequence after another: each shares pages with those before."""
        keeping = asyncio.create_task(family.keep_anchors(self.members))
        try:
            for sequence in family.ids:
                if why := await self.try_move(family, sequence):
                    self.progress.stayed[why] += 1
        finally:
            keeping.cancel()
            if family.all_anchors:
                await asyncio.shield(family.delete_anchors(self.members))

    async def try_move(self, family: Family, sequence: str) -> str:
        """Moves one sequence; returns why it stays, or nothing. Raises NotReady where its engine is
        lost."""
        why = ""
        for _ in range(MAX_TRIES):
            source = self.source
            try:
                self.progress.num_bytes += await self.move(source, family, sequence)
            except NoRoom as error:
                return reason(error)
            except ENGINE_ERRORS as error:
                why = reason(error)
                if why == "unknown_sequence":
                    return ""  # deleted meanwhile
                handed = error.problem.get("handed", ()) if isinstance(error, ProblemText) else ()
                if sequence in handed:  # by a door that may have died
                    with suppress(*ENGINE_ERRORS):
                        await ownership.settle(self.members, sequence, family.tenant)
            else:
                self.progress.moved += 1
                return ""
            if family.target not in self.members.engines:  # the anchors there are lost with it
                family.target = None
                family.anchors.clear()
        return why

    async def move(self, source: Engine, family: Family, sequence: str) -> int:
        """Moves a sequence; returns the bytes copied. Raises NoRoom, and what engines raise: then
        the sequence is where it was."""
        tenant = family.tenant
        num_bytes = await self.copy_anchors(source, family, sequence)
        await ownership.set_state(source, tenant, sequence, "leaving")
        is_handed = False
        try:
            transfer = await begin_transfer(self.members, source, family, sequence)
            await transfer.run()
            handed = {"generation": transfer.header["generation"], "for_s": HANDED_S}
            is_handed = True  # also where the reply is lost
            await ownership.set_state(source, tenant, sequence, "handed", **handed)
            await transfer.finish()
        except BaseException:
            rolling_back = ownership.roll_back(self.members, source, family, sequence, is_handed)
            await asyncio.shield(rolling_back)
            raise
        await ownership.set_state(source, tenant, sequence, "gone")
        self.locator.tags.learn((tenant.namespace, sequence), transfer.target.tag)
        return num_bytes + transfer.num_bytes

    async def copy_anchors(self, source: Engine, family: Family, sequence: str) -> int:
        """Copies the full pages of a sequence as an anchor, while its calls go on; again while much
        has come meanwhile. Returns the bytes copied."""
        tenant, num_bytes = family.tenant, 0
        for _ in range(MAX_ANCHORS):
            view = (await ask(source, GET_SEQUENCE, tenant, {"id": sequence})).fields
            size = source.info.page_size
            length = int(view["length"]) // size * size
            if not length:
                break
            anchor = new_anchor()
            new = {"id": anchor, "parent": sequence, "length": length, "ttl_s": ANCHOR_TTL_S}
            family.all_anchors.append(anchor)
            await ask(source, CREATE_SEQUENCES, tenant, {"sequences": [new]})
            transfer = await begin_transfer(self.members, source, family, anchor)
            await transfer.run()
            await transfer.finish()
            family.anchors.append(anchor)
            await transfer.commit()
            num_bytes += transfer.num_bytes
            if transfer.header["num_parts"] - transfer.next_part <= SHORT_TAIL:
                break
        return num_bytes


def num_left(engine: Mapping[str, Any]) -> int:
    """Sequences, imports, leases and pinned pages left in an engine; 0: it may be stopped."""
    return sum(int(engine[name]) for name in ("sequences", "imports", "leases", "pinned"))


def is_anchor(view: Mapping[str, Any]) -> bool:
    """Whether a view is of an anchor: one that was left behind expires where nothing uses it."""
    return view["ttl_s"] == ANCHOR_TTL_S and ANCHOR.fullmatch(view["id"]) is not None


async def views_of(source: Engine, tenant: Tenant) -> list[dict[str, Any]]:
    """The views of all sequences of a tenant."""
    views: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    while True:
        page = (await ask(source, LIST_SEQUENCES, tenant, {"limit": MAX_LISTED} | after)).fields
        views += page["sequences"]
        if page["next"] is None:
            return views
        after = {"after": page["next"]}
