"""A pool of blocks with the prefix cache's eviction.

Held blocks stay; of the others the least recently used are evicted first, from the ends of their
chains.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`capacity` blocks. A request holds its prompt's blocks, and blocks for its output."""

    __slots__ = ("_cached", "_held", "_own", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[int] = Counter()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._own = 0

    @property
    def num_held(self) -> int:
        return len(self._held) + self._own

    @property
    def num_free(self) -> int:
        """Blocks available to a request: free and evictable ones."""
        return self.capacity - self.num_held

    def match(self, blocks: Sequence[int]) -> int:
        """The number of first blocks that the pool has."""
        held, cached = self._held, self._cached
        for count, block in enumerate(blocks):
            if block not in held and block not in cached:
                return count
        return len(blocks)

    def hold(self, blocks: Sequence[int], own: int = 0) -> list[int] | None:
        """Hold a prompt's blocks and `own` more; returns evicted blocks, None without room."""
        held, cached = self._held, self._cached
        new = sum(block not in held for block in blocks)
        if new + own > self.num_free:
            return None
        for block in blocks:
            held[block] += 1
            cached.pop(block, None)
        self._own += own
        evicted = []
        while self.num_held + len(cached) > self.capacity:
            evicted.append(cached.popitem(last=False)[0])
        return evicted

    def release(self, blocks: Sequence[int], own: int = 0) -> None:
        """Release a prompt's blocks: they become cached, and are evicted from the end."""
        held, cached = self._held, self._cached
        self._own -= own
        for block in reversed(blocks):
            held[block] -= 1
            if held[block] == 0:
                del held[block]
                cached[block] = None
