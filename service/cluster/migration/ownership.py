"""Transfers the ownership of a sequence, and settles it where a transfer has failed.

States at the source: `leaving` (calls are held up), `handed` (the target may answer for it), then
`gone` (deleted), or `back` (as before).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from service.cluster.membership.engine import Engine, EngineReply
from service.cluster.membership.members import Members
from service.cluster.migration.families import Family
from service.cluster.migration.transfer import ASK_S, ask
from service.cluster.routing.locator import Locator
from service.cluster.routing.replies import results_of
from service.cluster.routing.tags import tags_of
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.operations.internal import HAND_OVER
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import CANCEL_IMPORT
from service.tenants import Tenant

LOG: Final = logging.getLogger("attnd.cluster")


async def set_state(
    source: Engine, tenant: Tenant, sequence: str, state: str, **given: Any
) -> None:
    """Sets the state of a sequence at its old engine."""
    fields: dict[str, Any] = {"id": sequence, "state": state, "for_s": ASK_S}
    await ask(source, HAND_OVER, tenant, fields | given)


async def roll_back(
    members: Members, source: Engine, family: Family, sequence: str, is_handed: bool
) -> None:
    """After a failed transfer: the sequence stays at the source, unless the target has it. Where
    that is unknown the source's mark expires, so that there are never two of it."""
    tenant, target, state = family.tenant, family.target, "back"
    if target is not None:
        (cancelled,) = await results_of([ask(target, CANCEL_IMPORT, tenant, {"id": sequence})])
        is_known = isinstance(cancelled, EngineReply)
        if isinstance(cancelled, ProblemText):
            (there,) = await results_of([ask(target, GET_SEQUENCE, tenant, {"id": sequence})])
            is_known = isinstance(there, EngineReply | ProblemText)
            state = "gone" if is_handed and isinstance(there, EngineReply) else "back"
        if is_handed and not is_known and not await is_dead(members, target):
            LOG.warning("%s may be at %s, which does not respond", sequence, target.name)
            return
    await results_of([set_state(source, tenant, sequence, state)])


async def is_dead(members: Members, engine: Engine) -> bool:
    """Whether there is proof that an engine that did not respond is dead."""
    if engine.tag not in members.by_tag:
        await members.wait_for_fate([engine.tag])
    return members.is_dead(engine.tag)


async def tags_there(locator: Locator, source: Engine, family: Family, sequence: str) -> list[str]:
    """The engines that have a sequence, by rank. Raises LostSequence; NotReady while another of its
    shards is moving."""
    if family.shard is None:
        return [source.tag]
    tag = await locator.tag_of(sequence, source, family.tenant)
    tags = [] if tag is None else tags_of(tag)
    if len(tags) < family.shard["ranks"]:
        raise NotReady("another shard of it is moving")
    return tags


async def shard_there(source: Engine, family: Family, sequence: str) -> dict[str, Any]:
    """The shard at the source and its epoch; empty for a whole sequence."""
    if family.shard is None:
        return {}
    view = (await ask(source, GET_SEQUENCE, family.tenant, {"id": sequence})).fields
    return {"shard": family.shard, "epoch": view["shard"]["epoch"]}
