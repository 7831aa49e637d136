"""Routers in a world: each knows a namespace's blocks by events alone, which it reads at times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

from service.engine.store.event_history import Page
from service.engine.store.store import Store
from tests.harness.router import BlockIndex, blocks_of
from tests.world.calls import check

Ask = Callable[[int], Awaitable[Mapping[str, Any] | None]]
"""The page of events after a number; None where no answer came."""


class Follower:
    """Reads a page of events now and then. Where it gets none, it knows all blocks of the pool."""

    def __init__(self, name: str, seed: int, ask: Ask) -> None:
        self.name, self.ask = name, ask
        self.order = random.Random(f"{seed} follower {name}")
        self.index = BlockIndex()
        self.blocks: set[bytes] = set()  # when the engine last replied that there are no events

    def watch(self, store: Store) -> None:
        """Note what a new engine has whenever it has no more events."""
        read = store.history.read

        def watched(namespace: str, after: int, limit: int) -> Generator[None, None, Page]:
            page = yield from read(namespace, after, limit)
            if namespace == self.name and not page[0]:
                self.blocks = blocks_of(store, namespace)["GPU"]
            return page

        store.history.read = watched  # type: ignore[method-assign]

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.order.choice((0.001, 0.05, 0.3, 2.0)))
            await self.read()

    async def read(self) -> bool:
        """Whether there are no more events."""
        page = await self.ask(self.index.last)
        if page is None:
            return False
        self.index.take_page(page)
        if not page["events"]:
            known, there = self.index.blocks, self.blocks
            check(known == there, self.name, "knows too much:", len(known - there), len(known))
        return not page["events"]
