"""Engines that sequences are dealt out over, page by page: to the router one engine among others.

Every engine is asked the same, with the sequences' whole lengths; it stores the rows whose pages
are its own and attends what it holds, and the states are merged here. Lengths are remembered, and
believed for as long as the ranks agree (`epochs.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, Told
from service.cluster.routing.replies import each, reply
from service.cluster.routing.tags import BETWEEN, Name
from service.cluster.sharded.epochs import Dealt
from service.cluster.sharded.operations import asked
from service.errors import NotReady
from service.image.reading import REQUEST, place, read_layout, split
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

MOST_REMEMBERED: Final = 2**16
Arrays = Mapping[str, Array]


class Ranks:
    """Has what the router needs of an `Engine`; `engines` are those of rank 0, 1, ..."""

    def __init__(
        self, engines: Sequence[Engine], acting_for: Callable[[Tenant], Tenant] = lambda one: one
    ) -> None:
        """`acting_for`: whose the questions are that are asked for the sake of a caller."""
        self.engines = tuple(engines)
        self.acting_for = acting_for
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
            slot = self.engines[0].arena.slot(0)
            return Answered(call.operation.status, slot.view(0), 0, told.stages), slot
        return reply(self.engines[0].arena, call, told.fields, told.arrays, told.stages)

    async def ask(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> Told:
        """As `Engine.ask`."""
        return await asked(self, call, fields, arrays or {})

    async def all(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> list[Told]:
        """The answers of all ranks to the same. Raises the first refusal."""
        return self.whole(await self.told_by_all(call, fields, arrays))

    async def told_by_all(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> list[Told | BaseException]:
        """What each rank says to the same."""
        return await each([engine.ask(call, fields, arrays) for engine in self.engines])

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
        """The sequences, on which nobody else in this door has a call meanwhile."""
        every = [self.dealt(call.tenant, name) for name in ids]
        async with AsyncExitStack() as stack:
            for one in sorted(every, key=lambda one: one.id):
                await stack.enter_async_context(one.lock)
            yield every

    def dealt(self, tenant: Tenant, name: str) -> Dealt:
        key = (tenant.namespace, name)
        found = self.books.get(key)
        if found is None:
            found = self.books[key] = Dealt(self.acting_for(tenant), name)
            if len(self.books) > MOST_REMEMBERED:
                oldest = next(key for key, one in self.books.items() if not one.lock.locked())
                del self.books[oldest]
        self.books.move_to_end(key)
        return found

    def forget_all(self, every: Sequence[Dealt]) -> None:
        for one in every:
            self.books.pop((one.tenant.namespace, one.id), None)

    def forget(self, call: Call, ids: Sequence[str]) -> None:
        for name in ids:
            self.books.pop((call.tenant.namespace, name), None)

    def abandon(self) -> dict[Tenant, list[str]]:
        """One of the engines is lost: the sequences that were dealt out over them."""
        by_tenant: dict[Tenant, list[str]] = {}
        for one in self.books.values():
            by_tenant.setdefault(one.tenant, []).append(one.id)
        self.books.clear()
        return by_tenant


Home = Engine | Ranks
"""Where a sequence is."""
