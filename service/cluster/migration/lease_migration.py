"""Pins and leases of an engine that is emptied: what they hold is copied to another engine, and
held there from then on.

The pages are exported as a sequence that begins with them, made for this, and committed under
their names where they come. A pin or a lease is there at the other engine before this one lets go.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership.engine import Engine
from service.cluster.migration.families import ANCHOR_TTL_S, Family, Progress, drop_anchors
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
from service.doors.kit.problems import ProblemText
from service.operations.prefix import HOLDS, PIN, RELEASE_LEASE, RENEW_LEASE, UNPIN
from service.operations.sequences import CREATE_SEQUENCES
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

AT_ONCE: Final = 4
"""Pages that are copied with all before them at the same time."""
LEAST_LEASE_S: Final = 0.001
GONE: Final = frozenset({"unknown_page", "unknown_lease"})
"""What an engine says of a hold that was taken away meanwhile."""
Page = tuple[str, str]
"""Key and salt."""


async def move_holds(router: Router, source: Engine, tenant: Tenant, progress: Progress) -> None:
    """Move a tenant's pins and leases; those that cannot be are counted by why they stay."""
    free = asyncio.Semaphore(AT_ONCE)

    async def move_one(page: Page, count: int) -> None:
        async with free:
            try:
                await move_page(router, source, tenant, page, progress)
            except NoRoom as error:
                progress.stayed[f"pin or lease: {error}"] += count
            except ProblemText as refused:
                progress.stayed[f"pin or lease: {refused.problem['code']}"] += count
            except REFUSED as error:
                progress.stayed[f"pin or lease: {type(error).__name__}: {error}"] += count

    by_page: dict[Page, int] = {}
    for hold in await holds_of(source, tenant):
        page = hold["page_key"], hold["cache_salt"]
        by_page[page] = by_page.get(page, 0) + 1
    for told in await each([move_one(page, count) for page, count in by_page.items()]):
        if isinstance(told, BaseException):
            raise told


async def holds_of(source: Engine, tenant: Tenant) -> list[dict[str, Any]]:
    holds: list[dict[str, Any]] = (await ask(source, HOLDS, tenant, {})).fields["holds"]
    return holds


async def move_page(
    router: Router, source: Engine, tenant: Tenant, page: Page, progress: Progress
) -> None:
    """Copy a page and all before it, and have the other engine hold them. Raises NoRoom, and what
    engines refuse: then all that this engine holds it holds still."""
    key, salt = page
    anchor = f"moving.{secrets.token_hex(8)}"
    family = Family(tenant, [anchor], all_anchors=[anchor], tags=[source.tag])
    held = {"page_key": key, "cache_salt": salt}
    try:
        new = {"id": anchor, "held": held, "ttl_s": ANCHOR_TTL_S}
        try:
            await ask(source, CREATE_SEQUENCES, tenant, {"sequences": [new]})
        except ProblemText as refused:
            if refused.problem["code"] in GONE:
                return
            raise
        begun = await begin_copy(router, source, family, anchor)
        await copy(source, begun)
        await end_copy(begun)
        await commit_copy(begun)
        progress.num_bytes += begun.num_bytes
        there = [one for one in await holds_of(source, tenant) if held.items() <= one.items()]
        for hold in there:
            await hold_there(source, begun.target, tenant, held, hold)
            progress.holds += 1
    finally:
        await asyncio.shield(drop_anchors(family, router.members.engines))


async def hold_there(
    source: Engine, target: Engine, tenant: Tenant, held: dict[str, Any], hold: dict[str, Any]
) -> None:
    """One pin or lease changes its engine. Where its owner has ended it meanwhile, it is ended."""
    if hold["lease"] is None:
        await ask(target, PIN, tenant, held | {"hard": True})
        ending: Sequence[Any] = UNPIN, tenant, held
    else:
        left_s = max(hold["left_s"], LEAST_LEASE_S)
        await ask(target, RENEW_LEASE, tenant, held | {"id": hold["lease"], "lease_s": left_s})
        ending = RELEASE_LEASE, tenant, {"id": hold["lease"]}
    try:
        await ask(source, *ending)
    except ProblemText as refused:
        if refused.problem["code"] not in GONE:
            raise
        with suppress(ProblemText):
            await ask(target, *ending)
