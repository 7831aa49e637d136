"""Engines that sequences are dealt out over, page by page: to the router one engine among others.

Every engine is asked the same, with the sequences' whole lengths; it stores the rows whose pages
are its own and attends what it holds, and the states are merged here. What only some of them have
done is taken back. Lengths are remembered; they are asked for where they are not known or wrong.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from service.cluster.answering import each, reply
from service.cluster.asking_ranks import asked
from service.cluster.dealt import held_by, whole_length
from service.cluster.engine import Call, Engine, Told
from service.cluster.names import BETWEEN, Name
from service.doors.problems import ProblemText
from service.errors import NotReady
from service.image.dtypes import Array
from service.image.reading import REQUEST, place, read_layout, split
from service.operations.sequences import DELETE_SEQUENCE, GET_SEQUENCE, TRUNCATE
from service.operations.spec import Operation
from service.road.caller import Answered
from service.road.slots import Slot
from service.tenants import Tenant

MOST_REMEMBERED: Final = 2**16
SETTLED_S: Final = 0.3
"""Parts that do not fit are looked at again so much later: another door may be at work."""
MEND_S: Final = 10.0
Arrays = Mapping[str, Array]


@dataclass(slots=True, eq=False)
class Dealt:
    """One sequence. `lengths` is kv_len by layer, None where it has to be asked for; not `is_even`:
    some ranks may hold more than that."""

    tenant: Tenant
    id: str
    lengths: list[int] | None = None
    is_even: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Ranks:
    """Has what the router needs of an `Engine`; `engines` are those of rank 0, 1, ..."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.tag = BETWEEN.join(engine.tag for engine in engines)
        self.name = BETWEEN.join(engine.name for engine in engines)
        self.promised = 0
        self.books: OrderedDict[Name, Dealt] = OrderedDict()

    @property
    def page_size(self) -> int:
        return self.engines[0].info.page_size

    def own(self, operation: Operation, tenant: Tenant, deadline_s: float) -> Call:
        return self.engines[0].own(operation, tenant, deadline_s)

    async def call(self, call: Call) -> tuple[Answered, Slot]:
        """The answer in a slot of the router's; what is refused is raised."""
        header, start = split(call.image)
        layout = read_layout(header, len(call.image) - start, REQUEST)
        told = await self.ask(call, layout.fields, place(call.image, start, layout))
        if call.operation.answer is None:
            slot = self.engines[0].staging.slot(0)
            return Answered(call.operation.status, slot.view(0), 0, told.stages), slot
        return reply(self.engines[0].staging, call, told.fields, told.arrays, told.stages)

    async def ask(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> Told:
        """As `Engine.ask`."""
        return await asked(self, call, fields, arrays or {})

    async def all(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> list[Told]:
        """The answers of all ranks to the same. Raises the first refusal."""
        told = await each([engine.ask(call, fields, arrays) for engine in self.engines])
        return self.whole(told)

    @staticmethod
    def whole(told: Sequence[Told | BaseException]) -> list[Told]:
        """Answers, when all are. Raises the first refusal, that of an engine that is lost before
        others."""
        refused = [one for one in told if isinstance(one, BaseException)]
        if refused:
            raise next((one for one in refused if isinstance(one, NotReady)), refused[0])
        return [one for one in told if isinstance(one, Told)]

    # books

    @asynccontextmanager
    async def held(self, call: Call, ids: Sequence[str]) -> AsyncIterator[list[Dealt]]:
        """The sequences, of which nobody else here changes anything meanwhile; their lengths are
        known. What breaks off leaves them to be mended."""
        every = [self.dealt(call.tenant, name) for name in ids]
        async with AsyncExitStack() as stack:
            for one in sorted(every, key=lambda one: one.id):
                await stack.enter_async_context(one.lock)
            for one in every:
                await self.know(one)
            yield every

    def dealt(self, tenant: Tenant, name: str) -> Dealt:
        key = (tenant.namespace, name)
        found = self.books.get(key)
        if found is None:
            found = self.books[key] = Dealt(tenant, name)
            if len(self.books) > MOST_REMEMBERED:
                oldest = next(key for key, one in self.books.items() if not one.lock.locked())
                del self.books[oldest]
        self.books.move_to_end(key)
        return found

    async def know(self, one: Dealt) -> list[int]:
        """kv_len by layer; ranks that hold more than that are cut back to it first."""
        if one.lengths is not None and one.is_even:
            return one.lengths
        try:
            parts = await self.parts(one)
        except ProblemText:
            self.books.pop((one.tenant.namespace, one.id), None)  # perhaps nobody knows it
            raise
        lengths = self.lengths_of(parts) if one.lengths is None else one.lengths
        if one.lengths is None and not self.fits(parts, lengths):
            await asyncio.sleep(SETTLED_S)
            parts = await self.parts(one)
            lengths = self.lengths_of(parts)
        await self.cut(one, parts, lengths)
        one.lengths, one.is_even = lengths, True
        return lengths

    async def parts(self, one: Dealt) -> list[dict[str, Any]]:
        call = self.own(GET_SEQUENCE, one.tenant, MEND_S)
        return [told.fields for told in await self.all(call, {"id": one.id})]

    def lengths_of(self, parts: Sequence[Mapping[str, Any]]) -> list[int]:
        columns = zip(*(part["lengths"] for part in parts), strict=True)
        return [whole_length(column, self.page_size) for column in columns]

    def fits(self, parts: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> bool:
        """Whether every rank holds what it would of them."""
        by_layer = zip(*(part["lengths"] for part in parts), strict=True)
        ranks, size = len(self.engines), self.page_size
        return all(
            list(held) == held_by(length, ranks, size)
            for held, length in zip(by_layer, lengths, strict=True)
        )

    async def cut(
        self, one: Dealt, parts: Sequence[Mapping[str, Any]], lengths: Sequence[int]
    ) -> None:
        """Cut every rank that holds more at some layer than it would of `lengths`."""
        call = self.own(TRUNCATE, one.tenant, MEND_S)
        cutting = []
        for layer, length in enumerate(lengths):
            wanted = held_by(length, len(self.engines), self.page_size)
            for engine, part, most in zip(self.engines, parts, wanted, strict=True):
                if part["lengths"][layer] > most:
                    fields = {"id": one.id, "layer": layer, "length": length}
                    cutting.append(engine.ask(call, fields))
        self.whole(await each(cutting))

    async def take_back(self, every: Sequence[Dealt], layer: int, told: Sequence[object]) -> None:
        """Where some ranks appended and others did not, cut those that did back to what is known.
        Where that fails too, the sequences are mended before their next use."""
        cutting = [
            engine.ask(
                self.own(TRUNCATE, one.tenant, MEND_S),
                {"id": one.id, "layer": layer, "length": (one.lengths or [])[layer]},
            )
            for engine, answer in zip(self.engines, told, strict=True)
            if isinstance(answer, Told)
            for one in every
        ]
        if all(isinstance(one, Told) for one in await each(cutting)):
            for one in every:
                one.is_even = True

    def forget(self, call: Call, ids: Sequence[str]) -> None:
        for name in ids:
            self.books.pop((call.tenant.namespace, name), None)

    def abandon(self) -> None:
        """One of the engines is lost, and with it every sequence: the others let their parts go."""
        by_tenant: dict[Tenant, list[str]] = {}
        for one in self.books.values():
            by_tenant.setdefault(one.tenant, []).append(one.id)
        self.books.clear()
        for tenant, ids in by_tenant.items():
            drop(self.engines, tenant, ids)


def drop(engines: Sequence[Engine], tenant: Tenant, ids: Sequence[str]) -> None:
    """Have the engines that are still there delete their parts of sequences, and do not wait."""
    there = [engine for engine in engines if engine.is_ready]
    if not there:
        return
    task = asyncio.ensure_future(each([let_go(engine, tenant, ids) for engine in there]))
    DROPPING.add(task)
    task.add_done_callback(DROPPING.discard)


DROPPING: Final[set[asyncio.Future[Any]]] = set()
"""What nobody waits for must be held by somebody."""


async def let_go(engine: Engine, tenant: Tenant, ids: Sequence[str]) -> None:
    """Delete those sequences of which the engine has a part only."""
    for name in ids:
        with suppress(ProblemText):
            told = await engine.ask(engine.own(GET_SEQUENCE, tenant, MEND_S), {"id": name})
            if "shard" in told.fields:
                await engine.ask(engine.own(DELETE_SEQUENCE, tenant, MEND_S), {"id": name})


Home = Engine | Ranks
"""Where a sequence is."""
