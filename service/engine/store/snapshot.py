"""Snapshots of the whole pool, and how often they look at all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.images import Shaped
from numpy.typing import NDArray

from service.core.outline import Outline, outline, page_states
from service.core.tree import PrefixTree
from service.image.json_text import dump_json
from service.image.writing import in_order, shaped

COLUMNS: Final = ("parents", "pages", "totals", "sequences", "states")
IN_TIERS: Final = ("host", "disk", "host_records", "disk_records")
"""Numbers of pages and records in the tiers below the pool."""
LEAST_S: Final = 0.2
"""Least seconds between two snapshots; sooner requests get the last one again."""
TREE_SHARE: Final = 0.02
"""Share of the engine's time for looking at the tree: a large one is looked at less often."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolSnapshot:
    """The answer for one moment."""

    text: str
    arrays: dict[str, NDArray[Any]]
    shapes: tuple[Shaped, ...]


@dataclass(slots=True, eq=False)
class TreeOutline:
    """The tree at one moment; the next look is due at `again`."""

    outline: Outline
    again: float


class Snapshots:
    """The last snapshot of a tree. `count` returns the numbers of its pages by state, and of all
    else that a snapshot shows beside the tree."""

    def __init__(self, tree: PrefixTree, count: Callable[[], dict[str, int]]) -> None:
        self._pool, self._count = tree, count
        self._last: PoolSnapshot | None = None
        self._taken = 0.0
        self._tree: TreeOutline | None = None

    def newest(self, now: float) -> PoolSnapshot:
        """A new snapshot, or the last one where that is younger than `LEAST_S`."""
        if self._last is None or now - self._taken >= LEAST_S:
            self._pool.books.is_watched = True
            self._last, self._taken = self._take(now), now
        return self._last

    def _take(self, now: float) -> PoolSnapshot:
        pool, tree = self._pool, self._look(now)
        states, step = page_states(pool)
        numbers = dict.fromkeys(IN_TIERS, 0) | self._count()
        for private in ("available", "imports"):
            del numbers[private]
        fields: dict[str, Any] = numbers | {
            "total": pool.allocator.num_pages,
            "nodes": pool.links.count,
            "evicted": pool.budget.num_evicted,
            "page_step": step,
            "namespaces": tree.namespaces,
            "engines": [],
        }
        arrays = {"page_states": states}
        arrays |= {f"tree_{name}": getattr(tree, name) for name in COLUMNS}
        arrays["tree_idle_s"] = np.maximum(now - tree.used, 0.0).astype(np.float32)
        return PoolSnapshot(dump_json(fields), arrays, in_order(shaped(arrays)))

    def _look(self, now: float) -> Outline:
        tree = self._tree
        if tree is None or now >= tree.again:
            started = time.monotonic()
            seen = outline(self._pool)
            tree = self._tree = TreeOutline(seen, now + (time.monotonic() - started) / TREE_SHARE)
        return tree.outline
