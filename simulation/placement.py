"""The router's placement rule with its own constants, over arrays of many engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from bench.cases.trace import BLOCK_TOKENS
from bench.driver.replay import PAGE
from service.cluster.placement.cost import Pace, Prompt, busy_until_s, fits
from service.cluster.placement.prefixes import EXPECTED_PAGES

PAGES: Final = BLOCK_TOKENS // PAGE
"""Pages of a block: the rule counts pages of 16 tokens."""
EXPECTED: Final = EXPECTED_PAGES // PAGES
"""Blocks of a placed prompt that count as cached before they are."""
NOWHERE: Final = 1e18


class Placing:
    """The router's knowledge of every engine; `place` chooses one for a prompt."""

    def __init__(self, engines: int, blocks: int, pace: Pace) -> None:
        """`engines` engines with `blocks` blocks each, that report this pace."""
        self._blocks = blocks
        self._pace = pace
        self._held = np.zeros(engines)
        self._promised = np.zeros(engines)
        self._queue_s = np.zeros(engines)
        self._until = np.zeros(engines)
        self._holder: dict[int, int] = {}

    def place(self, blocks: Sequence[int], now: float) -> int:
        """The engine of least cost. The prompt's first blocks and its work count there at once."""
        matched, home = self.match(blocks)
        needed = len(blocks)
        there = np.zeros(self._held.size)
        if home is not None:
            there[home] = matched
        held = self._held + self._promised
        wait_s = np.maximum(self._until - now, self._queue_s)
        prompt = Prompt(PAGES * needed, PAGES * matched)
        cost = prompt.cost_s(PAGES * there, wait_s, PAGES * held, self._pace)
        fitting = fits(held, needed - there, np.full(held.size, float(self._blocks)))
        if fitting.any():
            cost[~fitting] += NOWHERE / 2
        chosen = int(cost.argmin())
        self._take(chosen, int(there[chosen]), blocks, now)
        return chosen

    def _take(self, chosen: int, there: int, blocks: Sequence[int], now: float) -> None:
        """Record that an engine got all blocks but the first `there`."""
        self._promised[chosen] += len(blocks) - there
        work_s = self._pace.span_s(float(PAGES * there), PAGES * len(blocks))
        self._until[chosen] = busy_until_s(float(self._until[chosen]), now, work_s)
        for block in blocks[there : there + EXPECTED]:
            self._holder.setdefault(block, chosen)

    def match(self, blocks: Sequence[int]) -> tuple[int, int | None]:
        """The number of first blocks that an engine has, and that engine."""
        for count in range(len(blocks), 0, -1):
            home = self._holder.get(blocks[count - 1])
            if home is not None:
                return count, home
        return 0, None

    def took(
        self, engine: int, blocks: Sequence[int], evicted: Sequence[int], held: int, waited_s: float
    ) -> None:
        """An engine's pool has taken a prompt, and evicted other blocks."""
        holder = self._holder
        holder.update(dict.fromkeys(blocks, engine))
        for block in evicted:
            if holder.get(block) == engine:
                del holder[block]
        self._held[engine] = held
        self._promised[engine] = max(0.0, self._promised[engine] - len(blocks))
        self._queue_s[engine] = waited_s

    def holds(self, engine: int, held: int) -> None:
        self._held[engine] = held

    def waits(self, engine: int, seconds: float) -> None:
        """Record how long an engine's first waiting prompt has waited."""
        self._queue_s[engine] = seconds
