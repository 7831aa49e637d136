"""Imports: begun where the placer says, and continued there."""

from __future__ import annotations

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.placement.creation import Claims, refuse_unless_dead
from service.cluster.placement.placer import Placer
from service.cluster.placement.prefixes import prefix_of
from service.cluster.routing.outcomes import NEXT_ENGINE, Outcome, retried
from service.cluster.routing.replies import results_of
from service.cluster.routing.sequence_calls import SequenceCalls
from service.operations.schema.page_names import PromptNames
from service.operations.schema.spec import Prepared
from service.operations.transfer import GET_IMPORT, IMPORT, MAX_IDLE_S
from service.road.caller_end.caller import AnswerLost


class ImportCall:
    """The attempts of one call for an import; an engine that fails to begin it is excluded."""

    def __init__(
        self, placer: Placer, calls: SequenceCalls, call: Call, prepared: Prepared
    ) -> None:
        self.placer, self.members, self.ids = placer, placer.members, calls.ids
        self.call = call
        self.fields = prepared.fields
        self.arrays = call.arrays(prepared.layout)
        self.claims = Claims(self.ids, call, [self.fields.id])
        self.excluded: set[str] = set()
        self.tried: Engine | None = None
        """By the latest attempt."""

    async def run(self) -> RawReply:
        with self.ids.being_made(self.call.tenant, self.claims.chosen):
            return await retried(self)

    async def attempt(self) -> RawReply:
        """Continues the import at its engine, or begins it at another."""
        engine = await self.engine_of_import() if not self.excluded else None
        if engine is None and getattr(self.fields, "header", None) is None:
            return await self.members.least_busy().call(self.call)  # replies unknown_import
        if engine is None:
            engine = await self.placed()
        self.claims.enter(self.fields.id, engine)
        self.tried = engine
        if self.call.operation is IMPORT:
            self.ids.importing(self.call.tenant, self.fields.id, MAX_IDLE_S)
        return await engine.call(self.call)

    async def engine_of_import(self) -> Engine | None:
        """The engine that has the id by the map, else the one that has the import when all are
        asked, after a restart of the router. Raises NotReady."""
        name, tenant = self.fields.id, self.call.tenant
        if (home := self.claims.engine(name)) is not None:
            return home
        self.members.check_all_respond()
        engines = self.members.engines
        asking = [one.question(GET_IMPORT, tenant, {"id": name}) for one in engines]
        for engine, answer in zip(engines, await results_of(asking), strict=True):
            if isinstance(answer, EngineReply):
                self.ids.learn(tenant, [name], engine.tag)
                return engine
        return None

    async def placed(self) -> Engine:
        header = self.fields.header
        names = PromptNames(cache_salt=header.cache_salt, extra=header.extra)
        rows = self.arrays if self.fields.share else {}
        prefix = prefix_of(names, rows, header.page_size) if rows else None
        namespace, needed = self.call.tenant.namespace, max(header.num_pages, 1)
        placing = self.placer.place(namespace, prefix, needed, self.excluded)
        return (await self.placer.long_work.do(placing, namespace)).engine

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Raises `error` unless another engine may begin the import: one that has no room for it
        has neither the import nor a sequence of its id."""
        if self.tried is not None and isinstance(error, AnswerLost):
            await refuse_unless_dead(self.members, self.tried.tag, error)
        tried, is_own = self.tried, self.fields.id in self.claims.own
        begins = tried is not None and getattr(self.fields, "header", None) is not None
        is_sure = outcome is Outcome.FULL or is_own
        if tried is None or not (begins and is_sure and outcome in NEXT_ENGINE):
            raise error
        self.excluded.add(tried.tag)
        self.ids.forget_unmade(self.call.tenant, self.claims.chosen)
        others = self.ids.is_made_by_others(self.call.tenant, self.fields.id)
        if others or not self.placer.candidates(self.excluded):
            raise error
