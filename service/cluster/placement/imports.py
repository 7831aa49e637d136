"""Imports over several engines: begun where there is room and most of their prefix, and gone on
with there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.cluster.membership.engine import Call, Engine, Told
from service.cluster.placement.create import ELSEWHERE
from service.cluster.placement.placer import place_pages, prefix_of
from service.cluster.routing.locator import ASK_DEADLINE_S
from service.cluster.routing.replies import each
from service.errors import NotReady, SequenceExists
from service.operations.schema.page_names import PageNames
from service.operations.schema.spec import Prepared
from service.operations.transfer import GET_IMPORT
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

Answer = tuple[Answered, Slot]


async def ask_import(router: Router, call: Call, prepared: Prepared) -> Answer:
    """Begin an import on some engine, or ask the one that has it."""
    header = getattr(prepared.fields, "header", None)
    home = await home_of(router, call, prepared.fields.id)
    if home is not None:
        return await home.call(call)
    if header is None:
        return await router.members.idlest().call(call)  # which says that there is none
    if await router.homes.there([prepared.fields.id], call.tenant, router.members.engines):
        raise SequenceExists([prepared.fields.id])
    return await begin(router, call, prepared)


async def home_of(router: Router, call: Call, name: str) -> Engine | None:
    """The engine on which an import, or the sequence that it became, is remembered to be; or that
    has such an import when all are asked."""
    known = router.members.by_tag.get(router.homes.names.tag((call.tenant.namespace, name)) or "")
    if known is not None:
        return known
    engines = list(router.members.engines)
    told = await each(
        [one.ask(one.own(GET_IMPORT, call.tenant, ASK_DEADLINE_S), {"id": name}) for one in engines]
    )
    for engine, answer in zip(engines, told, strict=True):
        if isinstance(answer, Told):
            router.homes.made(call, [name], engine)
            return engine
    return None


async def begin(router: Router, call: Call, prepared: Prepared) -> Answer:
    """Where its prefix and room are; where that engine refuses for want of room, at another."""
    fields, passed_over = prepared.fields, set[str]()
    arrays = call.arrays(prepared.layout)
    names = PageNames(cache_salt=fields.header.cache_salt)
    prefix = prefix_of(names, arrays) if arrays and fields.share else None
    while True:
        needed = max(fields.header.num_pages, 1)
        engine = place_pages(router, call, prefix, needed, passed_over).engine
        passed_over.add(engine.tag)
        is_last = not {one.tag for one in router.members.engines if one.takes_new} - passed_over
        try:
            answered, slot = await engine.call(call)
        except NotReady:
            if is_last:
                raise
            continue
        if answered.status < 300:
            router.homes.made(call, [fields.id], engine)
        if is_last or answered.status not in ELSEWHERE:
            return answered, slot
        router.give_back(slot)
