"""Limits of the engine, and of the share that one namespace may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from service.core.pool.namespaces import Namespace
from service.core.tree import PrefixTree
from service.errors import OutOfSequences, Overloaded

RETRY_S: Final = 1.0
"""Seconds until a retry where a share is used up: there is no estimate of when it is freed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for all namespaces together, and the `share` that one may have."""

    sequences: int
    leases: int
    share: float = 1.0

    def part(self, most: int) -> int:
        """One namespace's share of `most`: at least one."""
        return max(1, int(most * self.share))

    def refuse_sequences(self, tree: PrefixTree, namespace: str, count: int) -> None:
        """Raises OutOfSequences where `count` more exceed a limit; unfinished imports count."""
        free = self.sequences - tree.num_sequences
        if count > free:
            raise OutOfSequences(count, max(free, 0), self.sequences)
        most = self.part(self.sequences)
        held = tree.budget.namespaces.get(namespace) or Namespace(namespace)
        if count > most - held.num_sequences:
            free = max(0, most - held.num_sequences)
            raise OutOfSequences(count, free, most, share_retry_s=RETRY_S)

    def refuse_lease(self, tree: PrefixTree, namespace: str) -> None:
        """Raises Overloaded where one more lease exceeds a limit."""
        held = tree.budget.namespaces.get(namespace)
        most = self.part(self.leases)
        if held is not None and held.num_leases >= most:
            reason = f"this namespace holds {most} leases, its share of engine.max_leases"
            remedy = "release some or let them end, or raise engine.namespace_share"
            raise Overloaded(f"{reason}: {remedy}", retry_after_s=RETRY_S)
        if len(tree.cache.leases) >= self.leases:
            remedy = "wait for some to end, or raise engine.max_leases"
            raise Overloaded(f"{self.leases} leases are held: {remedy}", retry_after_s=RETRY_S)
