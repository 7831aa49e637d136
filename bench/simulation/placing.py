"""The router's choice for many engines at once: its own rule and numbers, over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.replay import PAGE
from bench.simulation.gpu import Model
from bench.simulation.trace import BLOCK_TOKENS
from service.cluster.placement import (
    BODY_WEIGHT,
    CALL_PAGES,
    ELSEWHERE_WEIGHT,
    FULL,
    HELD_WEIGHT,
    QUEUE_PAGES_PER_S,
)
from service.cluster.prefixes import EXPECTED_PAGES

PAGES: Final = BLOCK_TOKENS // PAGE
"""Pages of a block: the rule counts pages of 16 tokens."""
EXPECTED: Final = EXPECTED_PAGES // PAGES
"""Blocks of a prompt that count as held where it was placed before they are."""
SENT: Final = 16
"""Blocks of a prompt whose rows are sent at once: chunks of 8192 tokens."""
BODY: Final = 1 + Model().num_qo_heads / (2 * Model().num_kv_heads)
"""Rows of q, k and v of a page, as pages of keys and values."""
NOWHERE: Final = 1e18


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine of a prompt, and what its calls weigh there until it has its first token."""

    engine: int
    weight: float


class Placing:
    """What is known of every engine; `place` gives the engine for a prompt."""

    def __init__(self, engines: int, blocks: int) -> None:
        self._blocks = blocks
        self._held = np.zeros(engines)
        self._promised = np.zeros(engines)
        self._queue_s = np.zeros(engines)
        self._calls = np.zeros(engines)
        self._gone = np.zeros(engines)
        self._holder: dict[int, int] = {}

    def place(self, blocks: Sequence[int]) -> Placed:
        """The engine that costs least: pages to compute, a share of those held, its calls and its
        queue. The prompt's first blocks count as held there from now on."""
        held = self._held + self._promised
        cost = PAGES * HELD_WEIGHT * held + QUEUE_PAGES_PER_S * self._queue_s
        cost += self._calls + self._gone
        matched, home = self.match(blocks)
        needed = len(blocks)
        full = held + needed > FULL * self._blocks
        if home is not None:
            cost[home] -= PAGES * matched * (1 + ELSEWHERE_WEIGHT)
            full[home] = held[home] + needed - matched > FULL * self._blocks
        if not full.all():
            cost[full] += NOWHERE / 2
        chosen = int(cost.argmin())
        there = matched if chosen == home else 0
        self._promised[chosen] += needed - there
        weight = CALL_PAGES + BODY_WEIGHT * BODY * PAGES * min(SENT, needed - there)
        self._calls[chosen] += weight
        for block in blocks[there : there + EXPECTED]:
            self._holder.setdefault(block, chosen)
        return Placed(chosen, weight)

    def answered(self, engine: int, weight: float) -> None:
        """A prompt has its first token: the calls for it are over."""
        self._calls[engine] -= weight

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
        for known in (self._held, self._promised, self._queue_s, self._calls):
            known[engine] = 0.0
        for block in blocks:
            if self._holder.get(block) == engine:
                del self._holder[block]

    def come_back(self, engine: int) -> None:
        self._gone[engine] = 0.0
