"""How long named nodes are kept: priorities and soft pins, and when they end."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final

from service.core.nodes import CACHED, FOREVER, Name, Node, Retention, named

SOFT_PIN: Final = 1000
"""Rank that a soft pin adds: above every priority."""
LEAST_TIMERS: Final = 1024
"""Timers that stand for nothing any more are not looked for among fewer."""
ENDED_AT_ONCE: Final = 1024
"""Timers looked at in one tick: some milliseconds. The next tick looks at the rest."""

Timer = tuple[float, int, Node, Name]


class Keeping:
    """`now` is the time by the tree's clock."""

    __slots__ = ("_num_live", "_num_made", "_timers", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []
        self._num_made = self._num_live = 0

    def rank(self, name: Name) -> int:
        """Low ranks are evicted first."""
        return name.keep.priority + (SOFT_PIN if name.keep.soft_ends > self.now else 0)

    def keep(self, node: Node, keep: Retention) -> None:
        """Keep a node at least like this: the higher priority counts, then the later end."""
        name = named(node)
        held = name.keep
        priority, ends = max(
            (held.priority, held.priority_ends), (keep.priority, keep.priority_ends)
        )
        name.keep = Retention(priority, ends, max(held.soft_ends, keep.soft_ends))
        self._rank_again(node, name)

    def unpin(self, node: Node) -> None:
        """End a soft pin now."""
        name = named(node)
        name.keep = replace(name.keep, soft_ends=-FOREVER)
        self._rank_again(node, name)

    def expire(self) -> None:
        """End priorities and soft pins whose time is over, some at a time."""
        for _ in range(ENDED_AT_ONCE):
            if not self._timers or self._timers[0][0] > self.now:
                return
            timer = heappop(self._timers)
            if not stands(timer):
                continue
            _, _, node, name = timer
            self.forget(name)
            if name.keep.priority_ends <= self.now:
                name.keep = Retention(soft_ends=name.keep.soft_ends)
            if name.keep.soft_ends <= self.now:
                name.keep = replace(name.keep, soft_ends=-FOREVER)
            self._rank_again(node, name)

    @property
    def next_end(self) -> float:
        return self._timers[0][0] if self._timers else FOREVER

    def watch(self, node: Node, name: Name) -> None:
        """Look at a node again when the first of its ends has come."""
        keep = name.keep
        ends = keep.priority_ends if keep.priority_ends > self.now else FOREVER
        if self.now < keep.soft_ends < ends:
            ends = keep.soft_ends
        if ends >= name.timer:
            return
        self.forget(name)
        name.timer = ends
        self._num_live += 1
        self._num_made += 1  # no two timers are equal, so nodes are never compared
        heappush(self._timers, (ends, self._num_made, node, name))
        if len(self._timers) > LEAST_TIMERS + 2 * self._num_live:
            self._timers = [timer for timer in self._timers if stands(timer)]
            heapify(self._timers)

    def forget(self, name: Name) -> None:
        """A node is gone, or its timer has come: its timer stands for nothing from now on."""
        self._num_live -= name.timer < FOREVER
        name.timer = FOREVER

    def _rank_again(self, node: Node, name: Name) -> None:
        self.watch(node, name)
        rank = self.rank(name)
        if name.state == CACHED and rank != name.rank:
            name.root.namespace.order.rank_again(node, name, rank)


def stands(timer: Timer) -> bool:
    """Whether a timer is still its node's."""
    ends, _, _, name = timer
    return name.timer == ends
