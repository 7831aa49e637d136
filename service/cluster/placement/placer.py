"""Chooses the engines of new sequences: collects the inputs of the cost rule, and records the
placements."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import Final

from service.cluster.membership.engine import EngineSession
from service.cluster.membership.members import Members
from service.cluster.placement.cost import choose
from service.cluster.placement.inflight_prompts import InflightPrompt, Wait
from service.cluster.placement.prefixes import Prefixes, chained_keys
from service.core.keys import Prefix

WORTH_WAITING: Final = 2.0
"""A prompt waits for pages that another prompt brings this many times as long as its engine needs
to finish its work and compute them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An engine, the number of a prompt's first pages that it has or will have, and the prompt to
    wait for."""

    engine: EngineSession
    matched: int = 0
    wait: Wait | None = None


@dataclass(frozen=True, slots=True)
class Placer:
    """The placement of one router. Tags in `excluded` are not chosen."""

    members: Members

    def candidates(self, excluded: Collection[str]) -> dict[str, EngineSession]:
        """Engines that take new sequences, by tag."""
        every = self.members.by_tag
        return {tag: one for tag, one in every.items() if one.takes_new and tag not in excluded}

    async def place(
        self,
        namespace: str,
        prefix: Prefix | None,
        needed: int,
        excluded: Collection[str],
        prompt: InflightPrompt | None = None,
    ) -> Placement:
        """The engine for `needed` pages, of which the first have the prefix's keys; it
        expects them from now on. Raises NotReady."""
        known: Prefixes | None = None
        matched, loaded = dict[str, int](), Counter[str]()
        keys: Iterator[bytes] = iter(())
        if prefix is not None:
            known = self.members.prefixes_of(namespace)
            chain, keys = tee(chained_keys(prefix, namespace, self.members.info.page_size))
            matched, loaded = await known.matched(chain, time.monotonic())
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

    async def place_sequence(
        self,
        namespace: str,
        prefix: Prefix | None,
        excluded: Collection[str],
        prompt: InflightPrompt,
    ) -> Placement:
        """The engine for a sequence without a parent. Raises NotReady."""
        needed = 1
        if prefix is not None:
            needed = max(prefix.num_pages(self.members.info.page_size), 1)
        placed = await self.place(namespace, prefix, needed, excluded, prompt)
        placed.engine.add_work(placed.matched, needed)
        return placed
