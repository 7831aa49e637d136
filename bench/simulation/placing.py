"""The router's choice for many engines at once: its own rule and numbers, over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from bench.replay import PAGE
from bench.simulation.trace import BLOCK_TOKENS
from service.cluster.placement import FULL, HELD_WEIGHT, QUEUE_PAGES_PER_S

PAGES: Final = BLOCK_TOKENS // PAGE
"""Pages of a block: the rule counts pages of 16 tokens."""
NOWHERE: Final = 1e18


class Placing:
    """What is known of every engine; `place` gives the engine for a prompt."""

    def __init__(self, engines: int, blocks: int) -> None:
        self._blocks = blocks
        self._held = np.zeros(engines)
        self._promised = np.zeros(engines)
        self._queue_s = np.zeros(engines)
        self._gone = np.zeros(engines)
        self._holder: dict[int, int] = {}

    def place(self, blocks: Sequence[int]) -> int:
        """The engine that costs least: pages to compute, a share of those held, its queue."""
        held = self._held + self._promised
        cost = PAGES * HELD_WEIGHT * held + QUEUE_PAGES_PER_S * self._queue_s
        cost += self._gone
        matched, home = self.match(blocks)
        needed = len(blocks)
        full = held + needed > FULL * self._blocks
        if home is not None:
            cost[home] -= PAGES * matched
            full[home] = held[home] + needed - matched > FULL * self._blocks
        if not full.all():
            cost[full] += NOWHERE / 2
        chosen = int(cost.argmin())
        self._promised[chosen] += needed - (matched if chosen == home else 0)
        return chosen

    def match(self, blocks: Sequence[int]) -> tuple[int, int | None]:
        """The longest beginning that some engine has, and who."""
        for count in range(len(blocks), 0, -1):
            home = self._holder.get(blocks[count - 1])
            if home is not None:
                return count, home
        return 0, None

    def took(
        self, engine: int, blocks: Sequence[int], evicted: Sequence[int], held: int, waited_s: float
    ) -> None:
        """A prompt is in an engine's pool, and other blocks have gone for it."""
        holder = self._holder
        for block in blocks:
            holder[block] = engine
        for block in evicted:
            if holder.get(block) == engine:
                del holder[block]
        self._held[engine] = held
        self._promised[engine] = max(0.0, self._promised[engine] - len(blocks))
        self._queue_s[engine] = waited_s

    def holds(self, engine: int, held: int) -> None:
        self._held[engine] = held

    def waits(self, engine: int, seconds: float) -> None:
        """How long the first that waits there has."""
        self._queue_s[engine] = seconds

    def lose(self, engine: int, blocks: Sequence[int]) -> None:
        self._gone[engine] = NOWHERE
        self._held[engine] = self._promised[engine] = self._queue_s[engine] = 0.0
        for block in blocks:
            if self._holder.get(block) == engine:
                del self._holder[block]

    def come_back(self, engine: int) -> None:
        self._gone[engine] = 0.0
