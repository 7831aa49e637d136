"""Imports: begun where the placer says, and continued there."""

from __future__ import annotations

from service.cluster.membership.engine import DoorCall, EngineSession, RawReply
from service.cluster.placement.creation import is_unclear, refuse_unless_dead
from service.cluster.placement.placer import Placer
from service.cluster.placement.prefixes import prefix_of
from service.cluster.routing.ids import Ids
from service.cluster.routing.outcomes import NEXT_ENGINE, Outcome, outcome_of
from service.cluster.routing.replies import results_of
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply
from service.errors import AttndError
from service.operations.schema.page_names import PromptNames
from service.operations.schema.spec import Prepared
from service.operations.transfer import GET_IMPORT, IMPORT, MAX_IDLE_S


async def call_for_import(placer: Placer, ids: Ids, call: DoorCall, prepared: Prepared) -> RawReply:
    """The reply to a call for an import, which its first call begins."""
    name, tenant = prepared.fields.id, call.tenant
    if getattr(prepared.fields, "header", None) is not None:
        held = await ids.hold(tenant, [name])
        try:
            return await begin_import(placer, ids, call, prepared)
        finally:
            ids.release(held)
    engine = await engine_of_import(ids, call, name)
    if engine is None:
        return await ids.members.least_busy().call(call)  # replies unknown_import
    if call.operation is IMPORT:
        ids.importing(tenant, name, MAX_IDLE_S)
    answered = await engine.call(call)
    if call.operation is not GET_IMPORT and getattr(prepared.fields, "part", None) is None:
        ids.imports.pop((tenant.namespace, name), None)  # it has ended, or was cancelled
    return answered


async def begin_import(placer: Placer, ids: Ids, call: DoorCall, prepared: Prepared) -> RawReply:
    """Begins an import, or continues the one that an engine has. One without room for it has
    neither the import nor a sequence of its id: then the next one is tried."""
    name, tenant = prepared.fields.id, call.tenant
    known, excluded = await engine_of_import(ids, call, name), set[str]()
    while True:
        engine = known or await placed(placer, call, prepared, excluded)
        is_unsure = True  # a call that is cancelled may have begun it
        try:
            answered = await engine.call(call)
        except (ProblemText, AttndError) as error:
            is_unsure, outcome = is_unclear(error), outcome_of(error)
            if is_unsure:
                await refuse_unless_dead(ids.members, engine.tag, error)
            excluded.add(engine.tag)
            may_retry = outcome is Outcome.FULL or (known is None and outcome in NEXT_ENGINE)
            if not may_retry or not placer.candidates(excluded):
                raise
            known = None
        else:
            return answered
        finally:
            if is_unsure:
                ids.learn(tenant, [name], engine.tag)
                ids.importing(tenant, name, MAX_IDLE_S)


async def engine_of_import(ids: Ids, call: DoorCall, name: str) -> EngineSession | None:
    """The engine that has the id by the map, else the one that has the import when all are asked,
    after a restart of the router. Raises NotReady."""
    if (home := ids.home_of_new(name, call.tenant)) is not None:
        return home
    ids.members.check_all_respond()
    engines = ids.members.engines
    asking = [one.question(GET_IMPORT, call.tenant, {"id": name}) for one in engines]
    for engine, answer in zip(engines, await results_of(asking), strict=True):
        if isinstance(answer, EngineReply):
            ids.learn(call.tenant, [name], engine.tag)
            return engine
    return None


async def placed(
    placer: Placer, call: DoorCall, prepared: Prepared, excluded: set[str]
) -> EngineSession:
    """The engine to begin an import at. Raises NotReady."""
    fields = prepared.fields
    header = fields.header
    names = PromptNames(cache_salt=header.cache_salt, extra=header.extra)
    rows = call.arrays(prepared.layout) if fields.share else {}
    prefix = prefix_of(names, rows, header.page_size) if rows else None
    needed = max(header.num_pages, 1)
    namespace = call.tenant.namespace
    return (await placer.place(namespace, prefix, needed, excluded)).engine
