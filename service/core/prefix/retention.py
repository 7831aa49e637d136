"""How long named nodes are kept: priorities and soft pins, and when they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from service.core.prefix.nodes import (
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
"""Rank that a soft pin adds: above every priority."""
ENDED_AT_ONCE: Final = 256
"""Nodes looked at in one tick: a millisecond or two. The next tick looks at the rest."""


class Keeping:
    """`now` is the time by the tree's clock."""

    __slots__ = ("_ends", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: Timers[Node] = Timers()

    def rank(self, name: Name) -> int:
        """Low ranks are evicted first."""
        return name.keep.priority + (SOFT_PIN if name.keep.soft_ends > self.now else 0)

    def keep(self, node: Node, keep: Retention) -> None:
        """Keep a node at least like this: the higher priority counts, then the later end.

        The best priority without an end counts again when one with an end is over.
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
        """End priorities and soft pins whose time is over, some at a time."""
        if self._ends.next_due > self.now:
            return
        for node in self._ends.take_due(self.now, ENDED_AT_ONCE):
            name = named(node)
            name.keep = after(name.keep, self.now)
            self._rank_again(node, name)

    @property
    def next_end(self) -> float:
        return self._ends.next_due

    def watch(self, node: Node, name: Name) -> None:
        """Look at a node again when the first of its ends has come."""
        ends = (name.keep.priority_ends, name.keep.soft_ends)
        self._ends.set(node, min((one for one in ends if one > self.now), default=FOREVER))

    def forget(self, node: Node) -> None:
        """A node loses its name."""
        self._ends.cancel(node)

    def _rank_again(self, node: Node, name: Name) -> None:
        self.watch(node, name)
        rank = self.rank(name)
        if name.state == CACHED and rank != name.rank:
            name.root.namespace.order.rank_again(node, name, rank)


def after(keep: Retention, now: float) -> Retention:
    """What is left of a retention when its ends up to `now` have come."""
    if keep.priority_ends <= now:
        lasts = DEFAULT_PRIORITY if keep.fallback is None else keep.fallback
        keep = Retention(lasts, soft_ends=keep.soft_ends)
    return replace(keep, soft_ends=-FOREVER) if -FOREVER < keep.soft_ends <= now else keep
