"""Snapshots of the whole pool, and how often they look at all of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.images import Shaped
from numpy.typing import NDArray

from service.core.outline import Outline, outline, page_states
from service.image.json_text import dump_json
from service.image.writing import in_order, shaped

if TYPE_CHECKING:
    from service.engine.store.store import Store

COLUMNS: Final = ("parents", "pages", "totals", "sequences", "states")
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
    """The last snapshot of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: PoolSnapshot | None = None
        self._taken = 0.0
        self._tree: TreeOutline | None = None

    def newest(self) -> PoolSnapshot:
        """A new snapshot, or the last one where that is younger than `LEAST_S`."""
        now = self._store.now
        if self._last is None or now - self._taken >= LEAST_S:
            self._store.tree.books.is_watched = True
            self._last, self._taken = self._take(now), now
        return self._last

    def _take(self, now: float) -> PoolSnapshot:
        store, tree = self._store, self._look(now)
        states, step = page_states(store.tree)
        numbers = store.numbers()
        for private in ("available", "imports"):
            del numbers[private]
        fields: dict[str, Any] = numbers | {
            "total": store.geometry.num_pages,
            "nodes": store.tree.links.count,
            "evicted": store.tree.budget.num_evicted,
            "host": 0,
            "disk": 0,
            "page_step": step,
            "namespaces": tree.namespaces,
            "engines": [],
        }
        if store.loading is not None:
            fields |= store.loading.tiers.num_records
        arrays = {"page_states": states}
        arrays |= {f"tree_{name}": getattr(tree, name) for name in COLUMNS}
        arrays["tree_idle_s"] = np.maximum(now - tree.used, 0.0).astype(np.float32)
        return PoolSnapshot(dump_json(fields), arrays, in_order(shaped(arrays)))

    def _look(self, now: float) -> Outline:
        tree = self._tree
        if tree is None or now >= tree.again:
            started = time.monotonic()
            seen = outline(self._store.tree)
            tree = self._tree = TreeOutline(seen, now + (time.monotonic() - started) / TREE_SHARE)
        return tree.outline
