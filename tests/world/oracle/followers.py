"""Routers in a world: each knows a namespace's blocks by events alone, which it reads at times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Final

from service.engine.store.event_history import Page
from service.engine.store.store import Store
from tests.harness.router import BlockIndex, blocks_of
from tests.world.oracle.calls import check

Ask = Callable[[int], Awaitable[Mapping[str, Any] | None]]
"""The page of events after a number; None where no answer came."""
Blocks = dict[str, set[bytes]]
MEDIA: Final = ("GPU", "CPU", "DISK")
MOST_READS: Final = 1000


class Follower:
    """Reads a page of events now and then. Where it gets none, it knows all blocks."""

    def __init__(self, name: str, seed: int, ask: Ask) -> None:
        self.name, self.ask = name, ask
        self.order = random.Random(f"{seed} follower {name}")
        self.index = BlockIndex()
        self.is_over = False
        self.blocks: Blocks = {}
        """When the engine last replied that there are no events; without media that it changed
        then."""

    def watch(self, store: Store) -> None:
        """Note what a new engine has whenever it has no more events."""
        read = store.history.read

        def watched(namespace: str, after: int, limit: int) -> Generator[None, None, Page]:
            page = yield from read(namespace, after, limit)
            if namespace == self.name and not page[0]:
                self.blocks = blocks_of(store, namespace)
                if store.loading is not None and is_changing(store):
                    self.blocks = {"GPU": self.blocks["GPU"]}
            return page

        store.history.read = watched  # type: ignore[method-assign]

    async def run(self) -> None:
        """Until it is over."""
        while not self.is_over:
            await asyncio.sleep(self.order.choice((0.001, 0.05, 0.3, 2.0)))
            await self.read()

    async def read(self) -> bool:
        """Whether there are no more events."""
        page = await self.ask(self.index.last)
        if page is None:
            return False
        self.index.take_page(page)
        if not page["events"]:
            self.check(self.blocks)
        return not page["events"]

    async def read_all(self, blocks: Blocks | None = None) -> None:
        """Read until there are no more events, and tiers are at rest; `blocks` are there then
        (None: those of the engine)."""
        for _ in range(MOST_READS):
            if await self.read() and (blocks is not None or len(self.blocks) == len(MEDIA)):
                self.check(blocks or self.blocks)
                return
            await asyncio.sleep(0.01)
        check(False, self.name, "has new events for ever")

    def check(self, blocks: Blocks) -> None:
        for medium, there in blocks.items():
            known = self.index.by_medium[medium]
            extra, missing = known - there, there - known
            check(not extra, self.name, medium, "knows too much:", len(extra), len(known))
            check(not missing, self.name, medium, "knows too little:", len(missing), len(known))


def is_changing(store: Store) -> bool:
    """Whether records come and go in the tiers whose events come later."""
    assert store.loading is not None
    tiers = store.loading.tiers
    return bool(tiers.is_copying or tiers.disk._gone)
