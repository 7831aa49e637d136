"""Calls that every engine has a part in, and those for leases, whose ids name their engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import DoorCall, EngineSession, RawReply, in_time
from service.cluster.membership.members import Members
from service.cluster.membership.polling import follow, restate
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.cluster.routing.ids import Ids, tag_in
from service.cluster.routing.joins import JOINS, join_snapshots, shares
from service.cluster.routing.replies import longest, reply, results_of, whole
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply
from service.errors import NotReady, UnknownLease
from service.operations.prefix import MATCH, MAX_HOLDS
from service.operations.schema.spec import Prepared

Fields = dict[str, Any]
IF_THERE: Final = frozenset({"pin", "unpin"})
"""Only fail where no engine has the page."""
BY_ALL: Final = frozenset({"list_sequences", "unpin", "clear", "holds"})
"""Refused while an engine cannot be called that may have a part."""
WITHOUT_SILENT: Final = frozenset({"info", "pool", "engines", "snapshot", "match_prefix"})
"""Answered from the engines that reply, where others do not."""


async def ask_all(
    members: Members,
    call: DoorCall,
    parts: Fields | Sequence[Fields],
    arrays: dict[str, Array] | None = None,
) -> list[tuple[EngineSession, EngineReply]]:
    """The reply of each engine, to the same fields or to its part. Leaves out those lost meanwhile.

    Raises the first error (`IF_THERE`: only where all fail), NotReady before others.
    """
    name, engines = call.operation.name, members.engines
    may_miss, if_there = name in WITHOUT_SILENT, name in IF_THERE

    async def ask(engine: EngineSession, part: Fields) -> EngineReply:
        asking = engine.ask(call, part, arrays)
        return await (in_time(asking, engine) if may_miss else asking)

    every = [parts] * len(engines) if isinstance(parts, dict) else parts
    asking = [ask(engine, part) for engine, part in zip(engines, every, strict=True)]
    replies: list[tuple[EngineSession, EngineReply]] = []
    errors: list[BaseException] = []
    for engine, one in zip(engines, await results_of(asking), strict=True):
        if isinstance(one, EngineReply):
            replies.append((engine, one))
        elif not (may_miss and isinstance(one, NotReady) and len(engines) > 1):
            await members.wait_for_fate([engine.tag])
            if not (if_there and members.is_dead(engine.tag)):
                errors.append(one)
    away = [one for one in errors if isinstance(one, NotReady)]
    if errors and not (if_there and replies and (name not in BY_ALL or not away)):
        if if_there:
            members.check_reachable()
        raise (away or errors)[0]
    if not replies:
        members.least_busy()  # raises for want of engines
        raise NotReady("no engine has replied: retry later")
    return replies


def arrays_of(call: DoorCall, prepared: Prepared) -> dict[str, Array]:
    """The names of pages; token ids are sent as a tensor, which is faster than JSON."""
    arrays = call.arrays(prepared.layout)
    if prepared.fields.ids_array is not None:
        arrays["token_ids"] = prepared.fields.ids_array
    return arrays


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Sends calls to all engines and joins their replies, for one router."""

    members: Members
    ids: Ids
    prompts: InflightPrompts

    async def call(self, call: DoorCall, prepared: Prepared) -> RawReply:
        fields = prepared.fields.model_dump(exclude_unset=True, exclude={"token_ids"})
        if call.operation.name in BY_ALL:
            self.members.check_all_respond()
        match call.operation.name:
            case "delete_sequences":
                return await self.delete(call, prepared)
            case "match_prefix":
                return await self.match(call, prepared, fields)
            case "prefetch":
                return await self.prefetch(call, prepared, fields)
            case "evict":
                return await self.evict(call, fields)
            case "events":
                return await self.events(call, prepared)
            case "holds":
                return await self.holds(call)
            case "engines":
                return await self.engines(call, fields)
            case "snapshot":
                return await self.snapshot(call, fields)
            case name:
                return await self.joined(call, name, prepared, fields)

    async def joined(
        self, call: DoorCall, name: str, prepared: Prepared, fields: Fields
    ) -> RawReply:
        parts = shares(name, fields, len(self.members.engines))
        replies = await ask_all(self.members, call, parts)
        joined = JOINS[name](prepared.fields.model_dump(), [one.fields for _, one in replies])
        return self.reply(call, joined, replies)

    async def match(self, call: DoorCall, prepared: Prepared, fields: Fields) -> RawReply:
        """The longest match of the engines that take new sequences, or of all where none does; only
        that engine gives a lease, and loads from its other tiers."""
        arrays = arrays_of(call, prepared)
        engine, best = await self.longest_match(call, fields, arrays)
        match = best.fields
        if prepared.fields.lease_s and match["num_pages"]:
            match = (await engine.ask(call, fields, arrays)).fields
            if match["lease"] is not None:
                match["lease"]["id"] += f".{engine.tag}"
        return self.reply(call, match, [(engine, best)])

    async def prefetch(self, call: DoorCall, prepared: Prepared, fields: Fields) -> RawReply:
        """The reply of the engine with the longest match in all its tiers."""
        arrays = arrays_of(call, prepared)
        engine, _ = await self.longest_match(replace(call, operation=MATCH), fields, arrays)
        reply = await engine.ask(call, fields, arrays)
        return self.reply(call, reply.fields, [(engine, reply)])

    async def longest_match(
        self, call: DoorCall, fields: Fields, arrays: dict[str, Array]
    ) -> tuple[EngineSession, EngineReply]:
        replies = await ask_all(self.members, call, fields | {"lease_s": 0.0}, arrays)
        among = [one for one in replies if one[0].takes_new] or replies
        return max(among, key=lambda one: one[1].fields["num_pages"])

    async def holds(self, call: DoorCall) -> RawReply:
        """All leases; a pin that several engines have is listed once."""
        replies = await ask_all(self.members, call, {})
        pins: dict[tuple[str, str], Fields] = {}
        leases: list[Fields] = []
        for engine, one in replies:
            for hold in one.fields["holds"]:
                if hold["lease"] is None:
                    pins.setdefault((hold["page_key"], hold["cache_salt"]), hold)
                else:
                    leases.append(hold | {"lease": f"{hold['lease']}.{engine.tag}"})
        return self.reply(call, {"holds": [*pins.values(), *leases][:MAX_HOLDS]}, replies)

    async def evict(self, call: DoorCall, fields: Fields) -> RawReply:
        """Evicts from one engine after another until enough pages are free."""
        left = fields["num_pages"]
        for engine in self.members.engines:
            if left:
                left -= (await engine.ask(call, {"num_pages": left})).fields["num_pages"]
        return self.reply(call, {"num_pages": fields["num_pages"] - left})

    async def events(self, call: DoorCall, prepared: Prepared) -> RawReply:
        """The cluster's events, at most a poll interval old; read now at the first call."""
        fields, members, space = prepared.fields, self.members, call.tenant.namespace
        if space not in members.prefixes:
            await follow(members, space)
        for member in members.by_name.values():
            if member.engine is not None and member.no_events is not None:
                raise member.no_events
        log = members.prefixes_of(space).log
        async with log.restating:
            while log.lacks(fields.after):
                await restate(members, space)
        return self.reply(call, log.page(fields.after, fields.limit))

    async def engines(self, call: DoorCall, fields: Fields) -> RawReply:
        replies = await ask_all(self.members, call, fields)
        views = [
            view | {"name": engine.name}
            for engine, one in replies
            for view in one.fields["engines"]
        ]
        return self.reply(call, {"engines": sorted(views, key=lambda view: str(view["name"]))})

    async def snapshot(self, call: DoorCall, fields: Fields) -> RawReply:
        """The pools of all engines as one, in the order of the engines' names."""
        replies = await ask_all(self.members, call, fields)
        replies.sort(key=lambda one: one[0].name)
        names = [engine.name for engine, _ in replies]
        joined, arrays = join_snapshots(names, [(one.fields, one.arrays) for _, one in replies])
        return self.reply(call, joined, replies, arrays)

    async def lease(self, call: DoorCall, prepared: Prepared) -> RawReply:
        """The reply of the engine in a lease's id. Raises UnknownLease; NotReady where that engine
        cannot be called."""
        name = prepared.fields.id
        tag = tag_in(name) or ""
        engine = self.members.by_tag.get(tag)
        if engine is None:
            if tag:
                self.members.check_reachable([tag])
            raise UnknownLease(name)
        fields = prepared.fields.model_dump(exclude_unset=True)
        own = fields | {"id": name.removesuffix(f".{tag}")}
        try:
            one = await engine.ask(call, own)
        except ProblemText as error:
            raise (
                UnknownLease(name) if error.problem["code"] == "unknown_lease" else error
            ) from None
        shown = one.fields | ({"id": name} if "id" in one.fields else {})
        return self.reply(call, shown, [(engine, one)])

    async def delete(self, call: DoorCall, prepared: Prepared) -> RawReply:
        """Deletes sequences by ids, each at its engine, or at all where that is not known; or by a
        prefix at all. Other engines have deleted theirs where one refuses or does not reply."""
        fields, tenant = prepared.fields, call.tenant
        since, total = self.ids.clock, 0
        request = fields.model_dump(exclude_unset=True)
        if fields.prefix is not None:
            self.members.check_all_respond()
        while True:  # again where an engine has come meanwhile, which may have some
            changes, engines = self.members.changes, self.members.engines
            wanted: dict[EngineSession, Fields] = {}
            if fields.prefix is not None:
                wanted = dict.fromkeys(engines, request)
            for name in fields.names:
                if self.ids.is_only_made(name, tenant):
                    continue
                home = self.ids.home(name, tenant)
                for engine in engines if home is None else [home]:
                    wanted.setdefault(engine, request | {"ids": []})["ids"].append(name)
            asking = [engine.ask(call, part) for engine, part in wanted.items()]
            replies = whole(await results_of(asking))
            total += sum(one.fields["num_deleted"] for one in replies)
            if fields.prefix is not None or total >= len(fields.names):
                break
            self.members.check_all_respond()
            if changes == self.members.changes:
                break
        self.ids.forget(tenant, fields.names, since)
        self.prompts.end(tenant.namespace, fields.names)
        return self.reply(call, {"num_deleted": total})

    def reply(
        self,
        call: DoorCall,
        fields: Mapping[str, Any],
        replies: Sequence[tuple[EngineSession, EngineReply]] = (),
        arrays: dict[str, Array] | None = None,
    ) -> RawReply:
        """A reply with the longest stages of the engines' replies."""
        stages = longest(one.stages for _, one in replies)
        return reply(self.members.arena, call, fields, arrays, stages)
