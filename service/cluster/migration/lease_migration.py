"""Moves the pins and leases of a draining engine.

The pinned or leased pages are exported as a sequence made for this, an anchor, and committed under
their names at the target. A pin or lease exists at the target before the source releases it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from service.cluster.membership.engine import Engine
from service.cluster.membership.members import Members
from service.cluster.migration.transfer import (
    ANCHOR_TTL_S,
    ENGINE_ERRORS,
    Family,
    NoRoom,
    Progress,
    ask,
    begin_transfer,
    reason,
)
from service.cluster.routing.replies import results_in_turn, whole
from service.cluster.routing.tags import new_anchor
from service.doors.kit.problems import ProblemText
from service.operations.prefix import HOLDS, PIN, RELEASE_LEASE, RENEW_LEASE, UNPIN
from service.operations.sequences import CREATE_SEQUENCES
from service.tenants import Tenant

MAX_PARALLEL: Final = 4
"""Pages that are copied, with all before them, at the same time."""
MIN_LEASE_S: Final = 0.001
ENDED: Final = frozenset({"unknown_page", "unknown_lease"})
"""An engine's codes for a pin or lease that was ended meanwhile."""
Page = tuple[str, str]
"""Key and salt."""


async def move_holds(members: Members, source: Engine, tenant: Tenant, progress: Progress) -> None:
    """Moves a tenant's pins and leases; counts the rest by the reason to stay."""

    async def move(page: Page, count: int) -> None:
        try:
            await move_page(members, source, tenant, page, progress)
        except (NoRoom, *ENGINE_ERRORS) as error:
            progress.stayed[f"pin or lease: {reason(error)}"] += count

    by_page = Counter(
        (hold["page_key"], hold["cache_salt"]) for hold in await holds_of(source, tenant)
    )
    whole(await results_in_turn(MAX_PARALLEL, move, by_page.items()))


async def holds_of(source: Engine, tenant: Tenant) -> list[dict[str, Any]]:
    holds: list[dict[str, Any]] = (await ask(source, HOLDS, tenant, {})).fields["holds"]
    return holds


async def move_page(
    members: Members, source: Engine, tenant: Tenant, page: Page, progress: Progress
) -> None:
    """Copies a page and all before it, then moves their pins and leases. Raises NoRoom, and what
    engines raise: then the source keeps the rest."""
    key, salt = page
    anchor = new_anchor()
    family = Family(tenant, [anchor], all_anchors=[anchor])
    held = {"page_key": key, "cache_salt": salt}
    try:
        new = {"id": anchor, "held": held, "ttl_s": ANCHOR_TTL_S}
        try:
            await ask(source, CREATE_SEQUENCES, tenant, {"sequences": [new]})
        except ProblemText as error:
            if error.problem["code"] in ENDED:
                return
            raise
        transfer = await begin_transfer(members, source, family, anchor)
        await transfer.run()
        await transfer.finish()
        await transfer.commit()
        progress.num_bytes += transfer.num_bytes
        for hold in await holds_of(source, tenant):
            if held.items() <= hold.items():
                await move_hold(source, transfer.target, tenant, held, hold)
                progress.holds += 1
    finally:
        await asyncio.shield(family.delete_anchors(members))


async def move_hold(
    source: Engine, target: Engine, tenant: Tenant, held: dict[str, Any], hold: dict[str, Any]
) -> None:
    """Moves one pin or lease. Where its owner has ended it meanwhile, it is ended."""
    if hold["lease"] is None:
        await ask(target, PIN, tenant, held | {"hard": True})
        ending: Sequence[Any] = UNPIN, tenant, held
    else:
        left_s = max(hold["left_s"], MIN_LEASE_S)
        await ask(target, RENEW_LEASE, tenant, held | {"id": hold["lease"], "lease_s": left_s})
        ending = RELEASE_LEASE, tenant, {"id": hold["lease"]}
    try:
        await ask(source, *ending)
    except ProblemText as error:
        if error.problem["code"] not in ENDED:
            raise
        with suppress(ProblemText):
            await ask(target, *ending)
