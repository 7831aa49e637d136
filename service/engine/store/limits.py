"""How much of what all namespaces share one of them may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from service.core.pool.namespaces import Namespace
from service.core.tree import PrefixTree
from service.errors import OutOfSequences, Overloaded

RETRY_S: Final = 1.0
"""When to try again where a share is used up: nobody knows when something of it is given back."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of all namespaces together, and the `share` of it that one may have."""

    sequences: int
    leases: int
    share: float = 1.0

    def part(self, most: int) -> int:
        """What one namespace may have of `most`: at least one."""
        return max(1, int(most * self.share))

    def refuse_sequences(self, tree: PrefixTree, namespace: str, count: int) -> None:
        """Raises OutOfSequences where `count` more are too many; those being imported count."""
        free = self.sequences - tree.num_sequences
        if count > free:
            raise OutOfSequences(count, max(free, 0), self.sequences)
        most = self.part(self.sequences)
        held = tree.budget.namespaces.get(namespace) or Namespace(namespace)
        if count > most - held.num_sequences:
            free = max(0, most - held.num_sequences)
            raise OutOfSequences(count, free, most, share_retry_s=RETRY_S)

    def refuse_lease(self, tree: PrefixTree, namespace: str) -> None:
        """Raises Overloaded where one more is too many."""
        held = tree.budget.namespaces.get(namespace)
        most = self.part(self.leases)
        if held is not None and held.num_leases >= most:
            told = f"this namespace holds {most} leases, its share of engine.max_leases"
            remedy = "release some or let them end, or raise engine.namespace_share"
            raise Overloaded(f"{told}: {remedy}", retry_after_s=RETRY_S)
        if len(tree.cache.leases) >= self.leases:
            told = (
                f"{self.leases} leases are held: wait for some to end, or raise engine.max_leases"
            )
            raise Overloaded(told, retry_after_s=RETRY_S)
