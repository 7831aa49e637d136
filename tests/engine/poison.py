"""Freed pages are overwritten at once, so that a later read of one shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.core.plans.ragged import ramps
from service.core.pool.allocator import PageAllocator
from service.engine.store.store import Store

POISON = -77.0


def poison_freed_pages(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Fill each page of the store's pool with `POISON` as it becomes free."""
    release, geometry = PageAllocator.release, store.geometry

    def release_and_fill(self: PageAllocator, pages: Any) -> None:
        freed = pages.copy()
        release(self, freed)
        if self is not store.tree.allocator or not freed.size:
            return
        size = geometry.page_size
        sizes = np.full(freed.size, size, np.int32)
        slots = ramps(freed * size, sizes).astype(np.int32)
        shape = (slots.size, geometry.num_kv_heads, geometry.head_dim)
        rows = np.full(shape, POISON, np.float32)
        for layer in range(geometry.num_layers):
            store.backend.append(layer, rows, rows, slots)

    monkeypatch.setattr(PageAllocator, "release", release_and_fill)


def has_poison(*arrays: Any) -> bool:
    """Whether one of the arrays has a number of a page that was free."""
    return any(bool((np.asarray(one, np.float32) == POISON).any()) for one in arrays)
