"""An engine is emptied: its sequences are exported, and imported by engines that have room; what
pins and leases hold, likewise.

Calls go on meanwhile. A sequence is copied first as a fork that nobody changes, an anchor; then
calls for it are held up while the few tokens that came since follow, and it changes its engine. It
is given up by the old engine before the new one may answer for it, so there are never two of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership import polling
from service.cluster.membership.engine import Engine
from service.cluster.migration.families import (
    ANCHOR_TTL_S,
    Family,
    Progress,
    drop_anchors,
    families_of,
    is_callers_own,
    keep_anchors,
)
from service.cluster.migration.lease_migration import move_holds
from service.cluster.migration.ownership import give_up, hand, part_there, tags_there
from service.cluster.migration.recovery import settle
from service.cluster.migration.transfer import (
    REFUSED,
    NoRoom,
    ask,
    begin_copy,
    commit_copy,
    copy,
    end_copy,
)
from service.cluster.routing.replies import each
from service.cluster.routing.tags import BETWEEN
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.operations.prefix import LIST_NAMESPACES
from service.operations.sequences import (
    CREATE_SEQUENCES,
    GET_SEQUENCE,
    LIST_SEQUENCES,
    MAX_LISTED,
)
from service.operations.status import DRAIN_ENGINE
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

LOG: Final = logging.getLogger("attnd.cluster")
AT_ONCE: Final = 4
"""Families that are moved at once; each has two parts of 4 MiB under way."""
TRIES: Final = 4
MOST_ANCHORS: Final = 3
SHORT_TAIL: Final = 4
"""Parts that may follow while calls are held up."""
HANDED_S: Final = 3600.0
"""For so long any door may decide where a sequence is whose door died as it was handed over."""
AGAIN_S: Final = 0.5
"""Between two looks at what an engine still has."""
TOLD_S: Final = 10.0
"""How often the log says how far it is."""


async def drain(router: Router, name: str) -> None:
    """Have an engine take nothing new, and move its sequences, pins and leases away until it has
    none left, or is to take new ones again. Imports are waited for: they become sequences."""
    progress, told_at, is_told = Progress(), time.monotonic(), False
    while name in router.members.by_name:
        left: int | None = -1
        try:
            if not is_told:
                source = engine_of(router, name)
                await ask(source, DRAIN_ENGINE, router.members.tenant, {"name": name})
                LOG.info("%s is being emptied", name)
                is_told = True
            left = await sweep(router, name, progress)
        except REFUSED as error:
            progress.stayed = Counter({f"{type(error).__name__}: {error}": 1})
        if not left:
            LOG.info("%s is %s: %s", name, "empty" if left == 0 else "kept", progress)
            return
        if time.monotonic() - told_at >= TOLD_S:
            told_at = time.monotonic()
            LOG.info("%s is being emptied: %s", name, progress)
        await asyncio.sleep(AGAIN_S)


async def sweep(router: Router, name: str, progress: Progress) -> int | None:
    """Try to move everything that is there; how much is left. None: it is not to be emptied any
    more."""
    source = engine_of(router, name)
    before, progress.stayed = progress.moved, Counter()
    families: list[Family] = []
    every = await tenants(router, source)
    for tenant in every:
        views = await views_of(source, tenant)
        families += families_of(tenant, [view for view in views if not is_callers_own(view)])
        if own := sum(map(is_callers_own, views)):
            progress.stayed["a part that no door has dealt out"] += own
    free = asyncio.Semaphore(AT_ONCE)

    async def move_one(family: Family) -> None:
        async with free:
            await move_family(router, name, family, progress)

    for told in await each([move_one(one) for one in families]):
        if isinstance(told, BaseException):
            raise told
    for tenant in every:  # after the sequences, with which many of the pages have gone
        await move_holds(router, source, tenant, progress)
    (engine,) = (await polling.ask(source, "engines", router.members.tenant)).fields["engines"]
    if engine["imports"]:
        progress.stayed["an import that is not finished"] = engine["imports"]
    if router.members.metrics is not None:
        router.members.metrics.moved(name, progress.moved - before, progress.stayed.total())
    return num_left(engine) if engine["draining"] else None


def num_left(engine: Mapping[str, Any]) -> int:
    """What is still to leave an engine, by what it tells of itself: 0 where it may be stopped."""
    return sum(int(engine[name]) for name in ("sequences", "imports", "leases", "pinned"))


def engine_of(router: Router, name: str) -> Engine:
    """Raises NotReady."""
    member = router.members.by_name.get(name)
    if member is None or member.engine is None:
        raise NotReady(f"{name} cannot be called")
    return member.engine


async def tenants(router: Router, source: Engine) -> list[Tenant]:
    """Whoever may have sequences there."""
    if not router.members.has_keys:
        return [OPEN]
    told = await ask(source, LIST_NAMESPACES, router.members.tenant, {})
    return [tenant_of(name, SCOPES) for name in told.fields["namespaces"]]


async def views_of(source: Engine, tenant: Tenant) -> list[dict[str, Any]]:
    """All that a tenant has there."""
    views: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    while True:
        page = (await ask(source, LIST_SEQUENCES, tenant, {"limit": MAX_LISTED} | after)).fields
        views += page["sequences"]
        if page["next"] is None:
            return views
        after = {"after": page["next"]}


async def move_family(router: Router, name: str, family: Family, progress: Progress) -> None:
    """One after another, so that each begins with what it shares with those before."""
    keeping = asyncio.create_task(keep_anchors(family, lambda: router.members.engines))
    try:
        for one in family.ids:
            if why := await moved(router, name, family, one, progress):
                progress.stayed[why] += 1
    finally:
        keeping.cancel()
        if family.all_anchors:
            await asyncio.shield(drop_anchors(family, router.members.engines))


async def moved(
    router: Router, name: str, family: Family, sequence: str, progress: Progress
) -> str:
    """Move one sequence; else why it stays. Raises NotReady where its engine is lost."""
    why = ""
    for _ in range(TRIES):
        source = engine_of(router, name)
        try:
            progress.num_bytes += await move(router, source, family, sequence)
        except NoRoom as error:
            return str(error)
        except ProblemText as refused:
            why = refused.problem["code"]
            if why == "unknown_sequence":
                return ""  # it was deleted meanwhile
            if sequence in refused.problem.get("handed", ()):  # by a door that may have died
                with suppress(*REFUSED):
                    await settle(router, sequence, family.tenant)
        except REFUSED as error:
            why = f"{type(error).__name__}: {error}"
        else:
            progress.moved += 1
            return ""
        if family.target not in router.members.engines:  # what was there is gone with it
            family.target = None
            family.anchors.clear()
    return why


async def move(router: Router, source: Engine, family: Family, sequence: str) -> int:
    """From one engine to another; how many bytes went. Raises NoRoom, and what engines refuse: then
    the sequence is where it was."""
    tenant = family.tenant
    family.tags = await tags_there(router, source, family, sequence)
    num_bytes = await anchored(router, source, family, sequence)
    await hand(source, tenant, sequence, "leaving", **await part_there(source, family, sequence))
    is_handed = False
    try:
        begun = await begin_copy(router, source, family, sequence)
        await copy(source, begun)
        handed = {"generation": begun.header["generation"], "for_s": HANDED_S}
        await hand(source, tenant, sequence, "handed", **handed)
        is_handed = True
        await end_copy(begun)
    except BaseException:
        await asyncio.shield(give_up(router, source, family, sequence, is_handed))
        raise
    await hand(source, tenant, sequence, "gone")
    tags = [begun.target.tag if tag == source.tag else tag for tag in family.tags]
    router.homes.names.learn((tenant.namespace, sequence), BETWEEN.join(tags))
    return num_bytes + begun.num_bytes


async def anchored(router: Router, source: Engine, family: Family, sequence: str) -> int:
    """Copy the full pages of a sequence as forks that nobody changes, while calls for it go on; and
    again what came meanwhile, where that is much. How many bytes went."""
    tenant, num_bytes = family.tenant, 0
    for _ in range(MOST_ANCHORS):
        view = (await ask(source, GET_SEQUENCE, tenant, {"id": sequence})).fields
        size = source.info.page_size
        length = int(view["length"]) // size * size
        if not length:
            break
        anchor = f"moving.{secrets.token_hex(8)}"
        new = {"id": anchor, "parent": sequence, "length": length, "ttl_s": ANCHOR_TTL_S}
        if family.shard is not None:  # in tokens of all ranks
            from service.core.shards.layout import ShardLayout

            new["length"] = ShardLayout(**family.shard).whole_for(length // size, size)
            new["epoch"] = view["shard"]["epoch"]
        family.all_anchors.append(anchor)
        await ask(source, CREATE_SEQUENCES, tenant, {"sequences": [new]})
        begun = await begin_copy(router, source, family, anchor)
        await copy(source, begun)
        await end_copy(begun)
        family.anchors.append(anchor)
        await commit_copy(begun)
        num_bytes += begun.num_bytes
        if begun.num_wanted <= SHORT_TAIL:
            break
    return num_bytes
