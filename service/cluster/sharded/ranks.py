"""The engines of sharded sequences, which the router uses as if they were one engine.

Every engine gets the same request, with the sequences' whole lengths. It stores the rows of its own
pages and attends them; the states are merged here. Lengths are cached, and used for as long as the
ranks agree with them (`epochs.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, EngineReply
from service.cluster.routing.replies import reply as reply_in_slot
from service.cluster.routing.replies import results_of
from service.cluster.routing.tags import BETWEEN, Name
from service.cluster.sharded.epochs import ShardedSequence
from service.cluster.sharded.operations import handle
from service.image.reading import read_image
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant

MOST_REMEMBERED: Final = 2**16
Arrays = Mapping[str, Array]


class Ranks:
    """`engines`, ordered by rank, with the methods of `Engine` that the router uses."""

    def __init__(
        self, engines: Sequence[Engine], acting_for: Callable[[Tenant], Tenant] = lambda one: one
    ) -> None:
        """`acting_for`: the tenant of the router's own requests on behalf of a caller."""
        self.engines = tuple(engines)
        self.acting_for = acting_for
        self.tag = BETWEEN.join(engine.tag for engine in engines)
        self.name = BETWEEN.join(engine.name for engine in engines)
        self.promised = 0
        self.books: OrderedDict[Name, ShardedSequence] = OrderedDict()

    @property
    def page_size(self) -> int:
        return self.engines[0].info.page_size

    async def call(self, call: Call) -> tuple[Answered, Slot]:
        """The reply, in a slot of the router. Raises the ranks' errors."""
        reply = await self.ask(call, *read_image(call.image))
        if call.operation.answer is None:
            slot = self.engines[0].arena.slot(0)
            return Answered(call.operation.status, slot.view(0), 0, reply.stages), slot
        return reply_in_slot(self.engines[0].arena, call, reply.fields, reply.arrays, reply.stages)

    async def ask(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> EngineReply:
        return await handle(self, call, fields, arrays or {})

    async def broadcast(
        self, call: Call, fields: Mapping[str, Any], arrays: Arrays | None = None
    ) -> list[EngineReply | BaseException]:
        """The reply or the error of each rank to one request."""
        return await results_of([engine.ask(call, fields, arrays) for engine in self.engines])

    async def question(
        self, operation: Operation, tenant: Tenant, fields: Mapping[str, Any]
    ) -> list[EngineReply | BaseException]:
        """As `broadcast`, of the router's own."""
        return await self.broadcast(self.engines[0].own(operation, tenant), fields)

    # Cache of sequences.

    @asynccontextmanager
    async def locked(self, call: Call, ids: Sequence[str]) -> AsyncIterator[list[ShardedSequence]]:
        """The sequences, while no other call of this door uses them."""
        sequences = [self.sequence(call.tenant, name) for name in ids]
        async with AsyncExitStack() as stack:
            for one in sorted(sequences, key=lambda one: one.id):
                await stack.enter_async_context(one.lock)
            yield sequences

    def sequence(self, tenant: Tenant, name: str) -> ShardedSequence:
        key = (tenant.namespace, name)
        found = self.books.get(key)
        if found is None:
            found = self.books[key] = ShardedSequence(self.acting_for(tenant), name)
            if len(self.books) > MOST_REMEMBERED:
                oldest = next(key for key, one in self.books.items() if not one.lock.locked())
                del self.books[oldest]
        self.books.move_to_end(key)
        return found

    def forget_all(self, sequences: Sequence[ShardedSequence]) -> None:
        for one in sequences:
            self.books.pop((one.tenant.namespace, one.id), None)

    def forget(self, call: Call, ids: Sequence[str]) -> None:
        for name in ids:
            self.books.pop((call.tenant.namespace, name), None)

    def abandon(self) -> dict[Tenant, list[str]]:
        """Forget all sequences, as one of the engines is lost; their ids by tenant."""
        by_tenant: dict[Tenant, list[str]] = {}
        for one in self.books.values():
            by_tenant.setdefault(one.tenant, []).append(one.id)
        self.books.clear()
        return by_tenant
