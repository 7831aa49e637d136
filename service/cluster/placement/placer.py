"""Chooses the engines of new sequences: collects the inputs of the cost rule, and records the
placements."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Final

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.membership.members import Members
from service.cluster.placement.cost import choose
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.prefixes import Prefixes, chained_keys, prefix_of
from service.cluster.placement.unique_ids import UniqueIds
from service.cluster.routing.locator import Locator
from service.cluster.routing.outcomes import NEXT_ENGINE, Outcome
from service.cluster.routing.replies import results_of
from service.cluster.routing.sequence_calls import SequenceCalls
from service.cluster.routing.tags import refuse_anchor
from service.core.prefix.keys import Prefix
from service.doors.kit.pieces import OneByOne
from service.image.json_text import Pieces
from service.operations.schema.page_names import PromptNames
from service.operations.schema.spec import Prepared
from service.operations.transfer import GET_IMPORT, IMPORT

WORTH_WAITING: Final = 2.0
"""A prompt waits for pages that another prompt brings this many times as long as its engine needs
to finish its work and compute them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An engine, the number of a prompt's first pages that it has or will have, and the prompt to
    wait for."""

    engine: Engine
    matched: int = 0
    wait: Wait | None = None


@dataclass(frozen=True, slots=True)
class Placer:
    """The placement of one router. Tags in `excluded` are not chosen. Long prompts are matched in
    pieces of `long_work`."""

    members: Members
    locator: Locator
    long_work: OneByOne

    def candidates(self, excluded: Collection[str]) -> dict[str, Engine]:
        """Engines that take new sequences, by tag."""
        return {tag: one for tag, one in self.members.open_engines.items() if tag not in excluded}

    def place(
        self,
        namespace: str,
        prefix: Prefix | None,
        needed: int,
        excluded: Collection[str],
        prompt: InflightPrompt | None = None,
    ) -> Pieces[Placement]:
        """In pieces: the engine for `needed` pages, of which the first have the prefix's keys; it
        expects them from now on. Raises NotReady."""
        known: Prefixes | None = None
        matched, loaded = dict[str, int](), Counter[str]()
        keys: Iterator[bytes] = iter(())
        if prefix is not None:
            known = self.members.prefixes_of(namespace)
            chain, keys = tee(chained_keys(prefix, namespace, self.members.info.page_size))
            matched, loaded = yield from known.matched(chain, time.monotonic())
        among = self.candidates(excluded)
        if not among:
            return Placement(self.members.least_busy())
        loads = {tag: one.load_now for tag, one in among.items()}
        tag = choose(loads, matched, needed, loaded)
        load, there = loads[tag], min(matched.get(tag, 0), needed)
        wait: Wait | None = None
        if known is not None:
            cached, other = known.awaited(tag, list(islice(keys, there)))
            if other is not None:
                pages_s = load.pace.span_s(float(cached), there)
                wait = Wait(other, WORTH_WAITING * (load.wait_s + pages_s))
            known.expect(tag, keys, time.monotonic(), prompt)
        among[tag].promised += max(needed - there + min(loaded[tag], there), 1)
        return Placement(among[tag], there, wait)

    def place_sequence(
        self,
        namespace: str,
        prefix: Prefix | None,
        excluded: Collection[str],
        prompt: InflightPrompt,
    ) -> Pieces[Placement]:
        """In pieces: the engine for a sequence without a parent. Raises NotReady."""
        needed = 1
        if prefix is not None:
            needed = max(prefix.num_pages(self.members.info.page_size), 1)
        placed = yield from self.place(namespace, prefix, needed, excluded, prompt)
        placed.engine.add_work(placed.matched, needed)
        return placed


class ImportCall:
    """The attempts of one call for an import; an engine that fails to begin it is excluded."""

    def __init__(
        self, placer: Placer, calls: SequenceCalls, call: Call, prepared: Prepared
    ) -> None:
        self.unique = UniqueIds(calls, call)
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
            engine = await self.engine_of_import(is_new=header is not None)
            if engine is not None:
                return await self.go_on(engine)
            if header is None:
                return await self.members.least_busy().call(self.call)  # replies unknown_import
            refuse_anchor("id", self.fields.id)
            await self.unique.refuse_taken([self.fields.id])
            self.is_new = True
        return await self.begin()

    async def go_on(self, engine: Engine) -> RawReply:
        """A step of an import. Its end makes a sequence, which may have been made elsewhere since
        the beginning."""
        fields, is_import = self.fields, self.call.operation is IMPORT
        if not is_import or fields.header is not None or fields.part is not None:
            return await engine.call(self.call)
        ending = replace(self.call, tenant=self.members.acting_for(self.call.tenant))
        given = fields.model_dump(exclude_unset=True)
        answered, slot = await engine.send(ending, given | self.unique.confirming, {})
        try:
            await self.unique.confirm({fields.id: engine}, [fields.id])
        except BaseException:
            self.members.arena.give_back(slot)
            raise
        return answered, slot

    async def engine_of_import(self, *, is_new: bool) -> Engine | None:
        """The engine that is remembered for the import or its sequence, else the one that has the
        import when all are asked. A new import may have an id that was used before."""
        name, tenant = self.fields.id, self.call.tenant
        tag = self.locator.tags.tag((tenant.namespace, name)) or ""
        if tag in self.members.by_tag and not is_new:
            return self.members.by_tag[tag]
        engines = self.members.engines
        asking = [one.question(GET_IMPORT, tenant, {"id": name}) for one in engines]
        for engine, answer in zip(engines, await results_of(asking), strict=True):
            if isinstance(answer, EngineReply):
                self.locator.learn(self.call, [name], engine)
                return engine
        return None

    async def begin(self) -> RawReply:
        header = self.fields.header
        names = PromptNames(cache_salt=header.cache_salt, extra=header.extra)
        rows = self.arrays if self.fields.share else {}
        prefix = prefix_of(names, rows, header.page_size) if rows else None
        namespace, needed = self.call.tenant.namespace, max(header.num_pages, 1)
        placing = self.placer.place(namespace, prefix, needed, self.excluded)
        engine = (await self.placer.long_work.do(placing, namespace)).engine
        self.excluded.add(engine.tag)
        answered = await engine.call(self.call)
        self.locator.learn(self.call, [self.fields.id], engine)
        return answered

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Raises `error` unless another engine may begin the import."""
        can_begin = self.is_new and outcome in NEXT_ENGINE
        if not can_begin or not self.placer.candidates(self.excluded):
            raise error
