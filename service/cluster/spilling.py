"""Sequences that outgrow their engine are dealt out over several, and their calls sent again.

A door that an engine refuses for want of pages deals out one of the call's sequences there, the
longest, and sends the call again: where that is still too large, it deals out the next. Before the
first one goes it is known that there are enough of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from service.cluster.answering import each, is_moving, unknown_in
from service.cluster.batches import row_sums
from service.cluster.copying import REFUSED, ask
from service.cluster.dealing_out import deal_out
from service.cluster.engine import Call, Engine
from service.cluster.ranks import Home, Ranks
from service.doors.problems import ProblemText
from service.errors import SequenceTaken
from service.operations.sequences import GET_SEQUENCE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.router import Router

LOG: Final = logging.getLogger("attnd.cluster")
GROWING: Final = frozenset({"append", "decode", "prefill"})
FULL: Final = "out_of_pages"
TRIES: Final = 4
"""Sequences of a call, the longest first, that may be found to set too little free by
themselves."""


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A sequence that `has` so many pages, and `needs` so many for the call."""

    id: str
    has: int
    needs: int

    @property
    def growth(self) -> int:
        return self.needs - self.has

    def growth_of_part(self, ranks: int) -> int:
        """Of the first of so many parts."""
        return -(-self.needs // ranks) - -(-self.has // ranks)

    def saves(self, ranks: int) -> int:
        """Pages that its engine need not have where it is dealt out, unless some are shared."""
        return self.needs - -(-self.needs // ranks)


class Spills:
    """Of one router; `most`: engines that a sequence may be dealt out over, 0 where none is."""

    def __init__(self, router: Router, most: int) -> None:
        self.router = router
        self.most = most
        self.locks: dict[str, asyncio.Lock] = {}
        self.done: Counter[str] = Counter()
        """How often there was room again, by the engine's tag."""
        self.tasks: set[asyncio.Task[bool]] = set()

    async def has_made_room(
        self,
        call: Call,
        home: Home,
        problem: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether a call that an engine refused is worth being sent again: a sequence has left it,
        or is about to. `given` are the fields, where they are not the call's own. It goes on where
        the call is given up."""
        if not self.most or problem.get("code") != FULL or call.operation.name not in GROWING:
            return False
        if isinstance(home, Ranks) or not home.takes_new:
            return False
        if given is None:
            given = self.router.prepared(call).fields.model_dump(exclude_unset=True)
        counts = np.diff(row_sums(dict(given), len(given["sequences"]))).tolist()
        wanted = dict(zip(given["sequences"], counts, strict=True))
        tenant = self.router.members.acting_for(call.tenant)
        making = self.make_room(tenant, home, wanted, given["layer"], self.done[home.tag])
        task = asyncio.get_running_loop().create_task(making)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await asyncio.shield(task)

    async def make_room(
        self, tenant: Tenant, source: Engine, wanted: Mapping[str, int], layer: int, before: int
    ) -> bool:
        """Deal out one of the sequences, unless another has been since the call was refused."""
        async with self.locks.setdefault(source.tag, asyncio.Lock()):
            if self.done[source.tag] != before:
                return True
            try:
                found = await outgrown(source, tenant, wanted, layer)
                for plan in plans(found):
                    if await self.is_dealt_out(tenant, source, plan, found):
                        self.done[source.tag] += 1
                        return True
            except REFUSED as error:
                if has_left(error) or source.tag not in self.router.members.by_tag:
                    return True  # whoever is lost is told so by the next try
                LOG.warning("no sequence of %s could be dealt out: %s", source.name, error)
            return False

    async def is_dealt_out(
        self, tenant: Tenant, source: Engine, plan: Sequence[Outgrown], batch: Sequence[Outgrown]
    ) -> bool:
        """Deal out the first of the plan; False where not all of the batch would have room once all
        of the plan are dealt out. Raises what engines refuse."""
        members, one = self.router.members, plan[0]
        others = chosen(members.engines, source, sum(part.needs for part in plan), self.most)
        if not others:
            return False
        ranks, started = len(others) + 1, time.monotonic()
        growth = sum(part.growth for part in batch) - one.growth + one.growth_of_part(ranks)
        room = max(0, growth - sum(later.saves(ranks) for later in plan[1:]))
        try:
            num_bytes = await deal_out(self.router, tenant, one.id, [source, *others], room)
        except ProblemText as refused:
            if refused.problem["code"] == FULL:
                return False
            raise
        names = ", ".join(engine.name for engine in (source, *others))
        took = f"{num_bytes >> 20} MiB in {time.monotonic() - started:.2f} s"
        LOG.info("%s had no room on %s: dealt out over %s, %s", one.id, source.name, names, took)
        if members.metrics is not None:
            members.metrics.spilled(source.name)
        return True

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


async def outgrown(
    source: Engine, tenant: Tenant, wanted: Mapping[str, int], layer: int
) -> list[Outgrown]:
    """The sequences that are to grow at a layer, the longest first. Raises what the engine refuses,
    SequenceTaken where one has been dealt out since."""
    size, found = source.info.page_size, []
    asking = [ask(source, GET_SEQUENCE, tenant, {"id": name}) for name in wanted]
    for told in await each(asking):
        if isinstance(told, BaseException):
            raise told
        view = told.fields
        if "shard" not in view:
            needs = -(-(view["lengths"][layer] + wanted[view["id"]]) // size)
            found.append(Outgrown(view["id"], view["pages"], max(view["pages"], needs)))
        elif view["shard"]["epoch"]:
            raise SequenceTaken({view["id"]: view["shard"]["epoch"]})
    return sorted(found, key=lambda one: -one.needs)


def has_left(error: BaseException) -> bool:
    """Whether a sequence is not there as it was, or is about to go."""
    is_elsewhere = isinstance(error, ProblemText) and bool(unknown_in(error.problem))
    return is_moving(error) or is_elsewhere or isinstance(error, SequenceTaken)


def plans(found: Sequence[Outgrown]) -> Iterator[Sequence[Outgrown]]:
    """Which sequences to deal out, the fewest first: one of the longest, or several of them."""
    for one in found[:TRIES]:
        yield [one]
    count = 1
    while count < len(found):
        count *= 2
        yield found[:count]


def chosen(engines: Sequence[Engine], source: Engine, needs: int, most: int) -> list[Engine]:
    """The engines with the most room, as many as may be and have room for their part of a sequence
    that `needs` so many pages; none where there are no such."""
    there = [one for one in engines if one.takes_new and one is not source]
    there.sort(key=lambda one: (-one.load_now.room, one.name))
    for ranks in range(min(most, len(there) + 1), 1, -1):
        if there[ranks - 2].load_now.room >= -(-needs // ranks):
            return there[: ranks - 1]
    return []
