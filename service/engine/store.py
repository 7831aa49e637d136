"""The store: the prefix tree and the backend's pool as one thing, with the plans made for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.backend import Backend, Int32, Pending, Tensor
from service.core.tree import PrefixTree
from service.core.values import Extension
from service.engine.plans import PlanCache
from service.engine.slices import Pace
from service.engine.work import Cost, Seconds
from service.operations.info import InfoAnswer


class StoreLost(RuntimeError):
    """Tree and pool no longer agree; nothing they hold can be trusted."""


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """The pool in counts: pages, sequences, shared nodes."""

    free: int
    referenced: int
    sequences: int
    nodes: int


class Store:
    """Owned by one thread: nothing here is locked."""

    def __init__(self, backend: Backend, pace: Pace, info: InfoAnswer) -> None:
        geometry = backend.geometry
        self.info = info
        self.backend = backend
        self.geometry = geometry
        self.pace = pace
        self.max_sequences = info.limits.max_sequences
        self.tree = PrefixTree(geometry.num_pages, geometry.page_size, geometry.num_layers)
        self.plans = PlanCache(self.tree)

    def extend(
        self,
        layer: int,
        ids: Sequence[str],
        counts: Int32,
        offsets: Int32 | None,
        seconds: Seconds,
    ) -> Extension:
        """Make room for `counts` [B] tokens; nothing is written there yet."""
        started = time.monotonic()
        extension = self.tree.extend(layer, ids, counts, offsets)
        seconds.plan += time.monotonic() - started
        return extension

    def write(
        self, extension: Extension, rows: tuple[Tensor, Tensor], seconds: Seconds
    ) -> Pending[None]:
        """Write `rows` (k and v [n, Hkv, D]) where the extension made room; undone if it fails."""
        started = time.monotonic()
        try:
            pending = self.backend.append(extension.layer, *rows, extension.slots)
        except BaseException:
            self.undo(extension)
            raise
        seconds.copy_in += time.monotonic() - started
        return pending

    def undo(self, extension: Extension) -> None:
        """Take back an extension; the tree renames what was planned for it."""
        self.tree.undo(extension)

    def is_long_write(self, rows: tuple[Tensor, Tensor]) -> bool:
        """Whether writing `rows` is more than one slice."""
        return self.pace.is_long("append", write_cost(rows))

    def numbers(self) -> PoolNumbers:
        allocator = self.tree.allocator
        return PoolNumbers(
            allocator.num_free,
            allocator.num_referenced,
            self.tree.num_sequences,
            self.tree.num_nodes,
        )


def write_cost(rows: tuple[Tensor, Tensor]) -> Cost:
    return Cost(num_bytes=2.0 * sum(part.nbytes for part in rows))
