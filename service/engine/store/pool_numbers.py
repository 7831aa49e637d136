"""Numbers of the pool: pages by their state, sequences, leases and imports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.core.pool.namespaces import Namespace
from service.core.tree import PrefixTree


@dataclass(slots=True)
class PoolNumbers:
    """Pages by their state, and counts; of the whole pool, or of the part a namespace sees.

    `available` pages can be had by the namespace now, evictions included.
    """

    free: int
    imports: int
    sequences: int
    nodes: int
    available: int = 0
    referenced: int = 0
    cached: int = 0
    pinned: int = 0
    leases: int = 0


def pool_numbers(tree: PrefixTree, num_imports: int, namespace: str | None) -> PoolNumbers:
    """Numbers of the whole pool (None), or of the part that a namespace sees."""
    numbers = PoolNumbers(tree.allocator.num_free, num_imports, -num_imports, tree.num_nodes)
    chosen: Iterable[Namespace] = tree.budget.namespaces.values()
    if namespace is not None:
        own = tree.budget.namespaces.get(namespace) or Namespace(namespace)
        chosen, numbers.free = (own,), max(0, tree.budget.available(own))
        numbers.available = tree.budget.obtainable(own)
    for one in chosen:
        numbers.referenced += one.referenced
        numbers.cached += one.cached
        numbers.pinned += one.pinned
        numbers.leases += one.num_leases
        numbers.sequences += one.num_sequences
    return numbers
