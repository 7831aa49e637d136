"""A sequence leaves its engine, or stays after all: what the engine is told, and what it is where
that is not known."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership.engine import Engine, Told
from service.cluster.migration.transfer import ASK_S, ask
from service.cluster.routing.replies import each
from service.cluster.routing.tags import tags_of
from service.doors.kit.problems import ProblemText
from service.errors import NotReady
from service.operations.internal import HAND_OVER
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import CANCEL_IMPORT
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.migration.families import Family
    from service.cluster.routing.router import Router

LOG: Final = logging.getLogger("attnd.cluster")


async def hand(source: Engine, tenant: Tenant, sequence: str, state: str, **given: Any) -> None:
    fields: dict[str, Any] = {"id": sequence, "state": state, "for_s": ASK_S}
    await ask(source, HAND_OVER, tenant, fields | given)


async def give_up(
    router: Router, source: Engine, family: Family, sequence: str, is_handed: bool
) -> None:
    """The sequence stays where it is, unless the other engine has it. Where nobody knows, it is
    gone here when its time is over: never are there two of it."""
    tenant, target, state = family.tenant, family.target, "back"
    if target is not None:
        (cancelled,) = await each([ask(target, CANCEL_IMPORT, tenant, {"id": sequence})])
        is_known = isinstance(cancelled, Told)
        if isinstance(cancelled, ProblemText):
            (there,) = await each([ask(target, GET_SEQUENCE, tenant, {"id": sequence})])
            is_known = isinstance(there, Told | ProblemText)
            state = "gone" if is_handed and isinstance(there, Told) else "back"
        if is_handed and not is_known and not await is_dead(router, target):
            LOG.warning("%s may be at %s, which does not answer", sequence, target.name)
            return
    await each([hand(source, tenant, sequence, state)])


async def is_dead(router: Router, engine: Engine) -> bool:
    """Whether an engine that did not answer is known to be dead."""
    if engine.tag not in router.members.by_tag:
        await router.members.fate_of([engine.tag])
    return router.members.is_gone(engine.tag)


async def tags_there(router: Router, source: Engine, family: Family, sequence: str) -> list[str]:
    """The engines that have a sequence, by rank. Raises LostSequence, NotReady while another of its
    parts is on its way."""
    if family.shard is None:
        return [source.tag]
    tag = await router.homes.tag_at(sequence, source, family.tenant)
    tags = [] if tag is None else tags_of(tag)
    if len(tags) < family.shard["ranks"]:
        raise NotReady("another part of it is on its way")
    return tags


async def part_there(source: Engine, family: Family, sequence: str) -> dict[str, Any]:
    """Which part is there, in which epoch; nothing of a whole sequence."""
    if family.shard is None:
        return {}
    view = (await ask(source, GET_SEQUENCE, family.tenant, {"id": sequence})).fields
    return {"shard": family.shard, "epoch": view["shard"]["epoch"]}
