"""Imports: begun where there is room and most of their prefix, continued on that engine."""

from __future__ import annotations

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.placement.creation import prefix_of
from service.cluster.placement.placer import Placer
from service.cluster.routing.locator import ASK_DEADLINE_S
from service.cluster.routing.outcomes import NEXT_ENGINE, Outcome
from service.cluster.routing.replies import results_of
from service.errors import SequenceExists
from service.operations.schema.page_names import PageNames
from service.operations.schema.spec import Prepared
from service.operations.transfer import GET_IMPORT


class ImportCall:
    """The attempts of one call for an import; an engine that fails to begin it is excluded."""

    def __init__(self, placer: Placer, call: Call, prepared: Prepared) -> None:
        self.placer, self.members, self.locator = placer, placer.members, placer.locator
        self.call = call
        self.fields = prepared.fields
        self.arrays = call.arrays(prepared.layout)
        self.is_new = False
        self.excluded: set[str] = set()

    async def attempt(self) -> RawReply:
        """Continues the import at its engine, or begins it at another. Raises SequenceExists."""
        if not self.is_new:
            header = getattr(self.fields, "header", None)
            engine = await self.engine_of_import()
            if engine is not None:
                return await engine.call(self.call)
            if header is None:
                return await self.members.least_busy().call(self.call)  # replies unknown_import
            if await self.locator.holders([self.fields.id], self.call.tenant, self.members.engines):
                raise SequenceExists([self.fields.id])
            self.is_new = True
        return await self.begin()

    async def engine_of_import(self) -> Engine | None:
        """The engine that is remembered for the import or its sequence, else the one that has the
        import when all are asked."""
        name, tenant = self.fields.id, self.call.tenant
        tag = self.locator.tags.tag((tenant.namespace, name)) or ""
        if tag in self.members.by_tag:
            return self.members.by_tag[tag]
        engines = self.members.engines
        asking = [
            one.ask(one.own(GET_IMPORT, tenant, ASK_DEADLINE_S), {"id": name}) for one in engines
        ]
        for engine, answer in zip(engines, await results_of(asking), strict=True):
            if isinstance(answer, EngineReply):
                self.locator.learn(self.call, [name], engine)
                return engine
        return None

    async def begin(self) -> RawReply:
        header = self.fields.header
        names = PageNames(cache_salt=header.cache_salt)
        prefix = prefix_of(names, self.arrays) if self.arrays and self.fields.share else None
        namespace, needed = self.call.tenant.namespace, max(header.num_pages, 1)
        engine = self.placer.place(namespace, prefix, needed, self.excluded).engine
        self.excluded.add(engine.tag)
        answered = await engine.call(self.call)
        self.locator.learn(self.call, [self.fields.id], engine)
        return answered

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Raises `error` unless another engine may begin the import."""
        can_begin = self.is_new and outcome in NEXT_ENGINE
        if not can_begin or not self.placer.candidates(self.excluded):
            raise error
