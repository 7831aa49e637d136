"""The plan cache: all layers of a step get the same `Plan` object, which backends key on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kernels.backend import Int32, Level, Plan
from service.core.plans.plan import CascadeMode, CascadePlan, explicit_levels, make_plan
from service.core.sequences.books import Ids
from service.core.tree import PrefixTree

MAX_ENTRIES: Final = 1024
MAX_INDICES: Final = 4 * 2**20
"""Page ids over all kept plans (16 MiB; a backend may keep as much again on its device)."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan for the backend, with its cost: KV tokens read, and tokens that flat attention reads.

    `max_keys` is the maximum number of keys that one of its rows can see; `num_segments` counts the
    segments that have keys; `page_size` is the layer's.
    """

    plan: Plan
    num_levels: int
    is_cascade: bool
    tokens_read: int
    tokens_flat: int
    max_keys: int
    num_segments: int
    page_size: int
    by_kind: dict[Hashable, Any] = field(default_factory=dict)
    """What attention derives from the plan for one kind of query: the same for all layers."""

    @property
    def num_indices(self) -> int:
        return sum(level.kv_indices.size for level in self.plan.levels) + self.plan.positions.size


class PlanCache:
    """Evicts the least recently used plans, by count and by size."""

    def __init__(self, tree: PrefixTree, split_keys: int = 0) -> None:
        """`split_keys`: the backend's; shared segments end at multiples of it."""
        self._tree, self._split_keys = tree, split_keys
        self._kept: OrderedDict[Hashable, Planned] = OrderedDict()
        self._num_indices = 0

    def sequences(
        self,
        ids: Ids,
        layer: int,
        qo_indptr: Int32,
        causal: bool,
        mode: CascadeMode,
    ) -> Planned:
        """Query rows `qo_indptr` [B+1] over sequences `ids`, shared prefixes once."""
        key = (self._tree.plan_key(ids, layer), qo_indptr.tobytes(), causal, mode)
        planned = self._kept.get(key)
        if planned is not None:
            self._kept.move_to_end(key)
            return planned
        how = (causal, mode, self._split_keys)
        return self._keep(key, make_plan(self._tree, ids, layer, qo_indptr, *how))

    def levels(
        self, levels: Sequence[tuple[Ids, Int32]], layer: int, causal: bool, num_rows: int
    ) -> Planned:
        """Levels that a caller spelled out, as (ids, qo_indptr [S+1]) each.

        Raises `InvalidRequest` where they count KV twice.
        """
        tree = self._tree
        key = (
            tuple((tree.plan_key(ids, layer), qo_indptr.tobytes()) for ids, qo_indptr in levels),
            causal,
            num_rows,
        )
        planned = self._kept.get(key)
        if planned is not None:
            self._kept.move_to_end(key)
            return planned
        return self._keep(key, explicit_levels(tree, layer, levels, causal, num_rows))

    def clear(self) -> None:
        self._kept.clear()
        self._num_indices = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _keep(self, key: Hashable, plan: CascadePlan) -> Planned:
        planned = from_core(plan)
        self._kept[key] = planned
        self._num_indices += planned.num_indices
        while len(self._kept) > MAX_ENTRIES or (
            self._num_indices > MAX_INDICES and len(self._kept) > 1
        ):
            _, oldest = self._kept.popitem(last=False)
            self._num_indices -= oldest.num_indices
        return planned


def from_core(plan: CascadePlan) -> Planned:
    """The core's plan as the backend takes it, with the same arrays."""
    levels = tuple(
        Level(
            qo_indptr=level.qo_indptr,
            kv_indptr=level.kv_indptr,
            kv_indices=level.kv_indices,
            kv_last_page_len=level.kv_last_page_len,
            kv_start=level.kv_start,
            causal=level.causal,
        )
        for level in plan.levels
    )
    pages = [np.diff(level.kv_indptr) for level in levels]
    return Planned(
        Plan(levels, plan.positions, plan.order),
        plan.num_levels,
        plan.is_cascade,
        plan.tokens_read,
        plan.tokens_flat,
        sum(int(each.max(initial=0)) for each in pages) * plan.page_size,
        sum(int(np.count_nonzero(each)) for each in pages),
        plan.page_size,
    )
