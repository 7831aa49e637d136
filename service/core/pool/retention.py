"""Retention of named nodes: priorities and soft pins, and their ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from service.core.nodes import (
    CACHED,
    DEFAULT_PRIORITY,
    FOREVER,
    Name,
    Node,
    Retention,
    named,
)
from service.core.timers import Timers

SOFT_PIN: Final = 1000
"""A soft pin adds this to a node's rank, which puts it above every priority."""
ENDED_AT_ONCE: Final = 256
"""Maximum nodes updated in one tick: a millisecond or two. The next tick updates the rest."""


class RetentionTimers:
    """Applies retentions to nodes and ends them in time; `now` is the time by the tree's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: Timers[Node] = Timers()

    def rank(self, name: Name) -> int:
        """The node's eviction rank; low ranks are evicted first."""
        return name.keep.priority + (SOFT_PIN if name.keep.soft_ends > self.now else 0)

    def keep(self, node: Node, keep: Retention) -> None:
        """Raise a node's retention: the higher priority wins, then the later end.

        When a priority with an end expires, the highest priority without one applies again.
        """
        name = named(node)
        held = after(name.keep, self.now)
        lasting = [one for one in (held.lasting_priority, keep.lasting_priority) if one is not None]
        priority, ends = max(
            (held.priority, held.priority_ends), (keep.priority, keep.priority_ends)
        )
        lasts = max(lasting) if lasting and ends < FOREVER else None
        name.keep = Retention(priority, ends, max(held.soft_ends, keep.soft_ends), lasts)
        self._rank_again(node, name)

    def unpin(self, node: Node) -> None:
        """End a soft pin now."""
        name = named(node)
        name.keep = replace(name.keep, soft_ends=-FOREVER)
        self._rank_again(node, name)

    def expire(self) -> None:
        """End expired priorities and soft pins, at most `ENDED_AT_ONCE`."""
        for node in self.ends.take_due(self.now, ENDED_AT_ONCE):
            name = named(node)
            name.keep = after(name.keep, self.now)
            self._rank_again(node, name)

    def watch(self, node: Node, name: Name) -> None:
        """Schedule a node's update for the first of its ends."""
        ends = (name.keep.priority_ends, name.keep.soft_ends)
        self.ends.set(node, min((one for one in ends if one > self.now), default=FOREVER))

    def _rank_again(self, node: Node, name: Name) -> None:
        self.watch(node, name)
        rank = self.rank(name)
        if name.state == CACHED and rank != name.rank:
            name.root.namespace.order.rank_again(node, name, rank)


def after(keep: Retention, now: float) -> Retention:
    """The retention that remains at time `now`."""
    if keep.priority_ends <= now:
        lasts = DEFAULT_PRIORITY if keep.fallback is None else keep.fallback
        keep = Retention(lasts, soft_ends=keep.soft_ends)
    return replace(keep, soft_ends=-FOREVER) if -FOREVER < keep.soft_ends <= now else keep
