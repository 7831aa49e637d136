"""The store: the prefix tree and the backend's pool as one thing, with the plans made for them."""

from __future__ import annotations

import time

from kernels.backend import Backend, Int32
from service.core.tree import PrefixTree
from service.core.values import Extension
from service.engine import operations as ops
from service.engine.plans import PlanCache
from service.metrics import PoolNumbers


class StoreLost(RuntimeError):
    """Tree and pool no longer agree; nothing they hold can be trusted."""


class Store:
    """Owned by one thread: nothing here is locked."""

    def __init__(self, backend: Backend) -> None:
        geometry = backend.geometry
        self.backend = backend
        self.geometry = geometry
        self.tree = PrefixTree(geometry.num_pages, geometry.page_size, geometry.num_layers)
        self.plans = PlanCache(self.tree)

    def append(
        self,
        layer: int,
        ids: ops.Ids,
        counts: Int32,
        offsets: Int32 | None,
        rows: tuple[ops.Array, ops.Array],
        timings: ops.Timings,
    ) -> Extension:
        """Make room for `counts` [B] tokens and write `rows` (k and v [n, Hkv, D]) there."""
        started = time.monotonic()
        extension = self.tree.extend(layer, ids, counts, offsets)
        planned = time.monotonic()
        try:
            self.backend.append(layer, *rows, extension.slots)
        except BaseException:
            self.undo(extension)
            raise
        timings.plan += planned - started
        timings.copy_in += time.monotonic() - planned
        return extension

    def undo(self, extension: Extension) -> None:
        """Take back the latest extension; the tree renames what was planned for it."""
        self.tree.undo(extension)

    def numbers(self) -> PoolNumbers:
        """The pool's numbers for the metrics."""
        allocator = self.tree.allocator
        return PoolNumbers(
            allocator.num_free,
            allocator.num_referenced,
            self.tree.num_sequences,
            self.tree.num_nodes,
        )
