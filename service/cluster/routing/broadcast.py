"""Calls that every engine has a part in, and those of leases, whose ids tell their engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from service.cluster.membership.engine import Call, Told
from service.cluster.routing.deletes import delete_many
from service.cluster.routing.joins import IF_THERE, JOINS, ask_all, shares
from service.cluster.routing.replies import each, longest, reply
from service.cluster.routing.snapshots import joined
from service.cluster.routing.tags import tag_in
from service.doors.kit.problems import ProblemText
from service.errors import InvalidRequest, UnknownLease
from service.operations.prefix import MAX_HOLDS
from service.operations.schema.spec import Prepared
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

Answer = tuple[Answered, Slot]


async def ask_everywhere(router: Router, call: Call, prepared: Prepared) -> Answer:
    """Ask all engines, and join what they say. `match` alone has token ids, and sends a tensor."""
    asked = prepared.fields.model_dump(exclude_unset=True, exclude={"token_ids"})
    match call.operation.name:
        case "delete_sequences":
            return await delete_many(router, call, prepared)
        case "match_prefix":
            return await match(router, call, prepared, asked)
        case "evict":
            return await evict(router, call, asked)
        case "events":
            return await events(router, call, prepared)
        case "holds":
            return await holds(router, call)
        case "engines":
            return await engines(router, call, asked)
        case "snapshot":
            return await snapshot(router, call, asked)
        case name:
            if name == "list_sequences":
                router.members.check_all_answer()
            parts = shares(name, asked, len(router.members.engines))
            told = await ask_all(router, call, parts, if_there=name in IF_THERE)
            whole = JOINS[name](prepared.fields.model_dump(), [one.fields for _, one in told])
            return reply(router.arena, call, whole, stages=longest(o.stages for _, o in told))


async def match(router: Router, call: Call, prepared: Prepared, asked: dict[str, Any]) -> Answer:
    """The longest match of the engines that take new sequences, or of all where none does; only the
    engine that has it gives a lease. Token ids go to the engines as a tensor: a long list is not
    written and read as JSON again."""
    arrays = call.arrays(prepared.layout)
    if prepared.fields.ids_array is not None:
        arrays["token_ids"] = prepared.fields.ids_array
    looked = asked | {"lease_s": 0.0}
    told = await ask_all(router, call, [looked] * len(router.members.engines), arrays)
    among = [one for one in told if one[0].takes_new] or told
    engine, best = max(among, key=lambda one: one[1].fields["num_pages"])
    fields = best.fields
    if prepared.fields.lease_s and fields["num_pages"]:
        fields = (await engine.ask(call, asked, arrays)).fields
        if fields["lease"] is not None:
            fields["lease"]["id"] += f".{engine.tag}"
    return reply(router.arena, call, fields, stages=best.stages)


async def holds(router: Router, call: Call) -> Answer:
    """Of all engines, a pin that several have once."""
    told = await ask_all(router, call, [{}] * len(router.members.engines))
    pins: dict[tuple[str, str], dict[str, Any]] = {}
    leases: list[dict[str, Any]] = []
    for engine, one in told:
        for hold in one.fields["holds"]:
            if hold["lease"] is None:
                pins.setdefault((hold["page_key"], hold["cache_salt"]), hold)
            else:
                leases.append(hold | {"lease": f"{hold['lease']}.{engine.tag}"})
    every = [*pins.values(), *leases][:MAX_HOLDS]
    return reply(router.arena, call, {"holds": every}, stages=longest(o.stages for _, o in told))


async def evict(router: Router, call: Call, asked: dict[str, Any]) -> Answer:
    """As many pages as asked for, from one engine after another."""
    left = asked["num_pages"]
    for engine in router.members.engines:
        if left:
            told = await engine.ask(call, {"num_pages": left})
            left -= told.fields["num_pages"]
    return reply(router.arena, call, {"num_pages": asked["num_pages"] - left})


async def events(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The cluster's own events: an engine's become so as they are read, within a quarter of a
    second; at the first time, now."""
    fields, members, space = prepared.fields, router.members, call.tenant.namespace
    if space not in members.prefixes:
        await members.follow(space)
    page = members.prefixes_of(space).log.page(fields.after, fields.limit)
    return reply(router.arena, call, page)


async def engines(router: Router, call: Call, asked: dict[str, Any]) -> Answer:
    """Every engine by its name in the cluster."""
    told = await ask_all(router, call, [asked] * len(router.members.engines))
    every = [view | {"name": engine.name} for engine, one in told for view in one.fields["engines"]]
    every.sort(key=lambda view: view["name"])
    return reply(router.arena, call, {"engines": every})


async def snapshot(router: Router, call: Call, asked: dict[str, Any]) -> Answer:
    """The pools of all engines as one: their pages one after another, in the engines' order."""
    told = await ask_all(router, call, [asked] * len(router.members.engines))
    told.sort(key=lambda one: one[0].name)
    names = [engine.name for engine, _ in told]
    fields, arrays = joined(names, [(one.fields, one.arrays) for _, one in told])
    return reply(router.arena, call, fields, arrays, longest(one.stages for _, one in told))


async def ask_for_lease(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The engine that gave the lease, or has got it since. Raises UnknownLease."""
    name = prepared.fields.id
    tag = tag_in(name)
    if tag is None:
        raise UnknownLease(name)
    asked = prepared.fields.model_dump(exclude_unset=True)
    if "page_key" in asked:
        rule = "is for one engine: match the prefix instead"
        raise InvalidRequest("page_key", asked["page_key"], rule)
    asked["id"] = name.removesuffix(f".{tag}")
    first = [one for one in router.members.engines if one.tag == tag]
    for engines in (first, [one for one in router.members.engines if one.tag != tag]):
        for told in await each([engine.ask(call, asked) for engine in engines]):
            if isinstance(told, Told):
                fields = told.fields | ({"id": name} if "id" in told.fields else {})
                return reply(router.arena, call, fields, stages=told.stages)
            if not (isinstance(told, ProblemText) and told.problem["code"] == "unknown_lease"):
                raise told
    raise UnknownLease(name)
