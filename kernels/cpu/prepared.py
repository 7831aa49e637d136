"""Prepared work of the attention loop for a batch of plans; small ones are cached by identity.

For a small batch it costs more than the attention itself, and it is the same for every layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kernels.backend import Attend, Plan
from kernels.cpu.steps import Step, steps
from kernels.cpu.work import PagedShape, Work, lay_out

KEPT_SCORES: Final = 256 * 1024
"""Maximum rows x keys of a cached batch: its masks take up to a byte for each."""
MOST_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class Order:
    """Where a plan's rows come from in the request, and where the request's go to in the plan."""

    forth: torch.Tensor
    back: torch.Tensor

    @classmethod
    def of(cls, plan: Plan) -> Order | None:
        """None for a plan in the request's own order."""
        if plan.order is None:
            return None
        forth = plan.order.astype(np.int64)
        return cls(torch.from_numpy(forth), torch.from_numpy(np.argsort(forth)))


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Steps over the rows of a batch of requests, in plan order, and each request's own order.

    `plans` are kept so that their identity stays theirs.
    """

    plans: tuple[Plan, ...]
    steps: Iterable[Step]
    orders: tuple[Order | None, ...]


def prepare(
    requests: Sequence[Attend],
    shape: PagedShape,
    first_block: int = 0,
    keep: bool = False,
    split_keys: int = 0,
) -> tuple[Prepared, bool]:
    """Lay requests out over a pool, whose blocks count from `first_block`.

    With `keep`, a small batch is worked out at once and can be used again; whether it was.
    """
    work = lay_out(requests, shape, first_block, split_keys)
    first = requests[0]
    walk: Iterable[Step] = steps(work, shape, first.q.shape[1], first.scoring.window_left)
    keep = keep and work.mask is None and _scores(work, shape) <= KEPT_SCORES
    if keep:
        walk = tuple(walk)
    plans = tuple(request.plan for request in requests)
    return Prepared(plans, walk, tuple(map(Order.of, plans))), keep


def _scores(work: Work, shape: PagedShape) -> int:
    """Rows times keys, the keys that pad short runs among them."""
    pages: int = sum(batch.rows.size * batch.pages.shape[1] for batch in work.batches)
    return pages * shape.page_size


class Preparer:
    """Prepares requests over one pool, and caches recent results."""

    def __init__(self, shape: PagedShape, split_keys: int) -> None:
        self._shape, self._split_keys = shape, split_keys
        self._kept: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()

    def __call__(self, requests: Sequence[Attend]) -> tuple[Prepared, int]:
        """The work, and the pool's block from which its blocks count."""
        blocks = [self._shape.layer_blocks[request.layer] for request in requests]
        # requests of one layer share their work with requests of all other layers
        base = blocks[0] if blocks.count(blocks[0]) == len(blocks) else 0
        if any(request.mask is not None for request in requests):
            return prepare(requests, self._shape, base, False, self._split_keys)[0], base
        key = _key(requests, blocks, base)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found, base
        made, kept = prepare(requests, self._shape, base, True, self._split_keys)
        if kept:
            self._kept[key] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made, base


def _key(requests: Sequence[Attend], blocks: Sequence[int], base: int) -> tuple[object, ...]:
    """Plans never change, so their identity is their value while they are kept."""
    plans = ((at - base, id(one.plan)) for one, at in zip(requests, blocks, strict=True))
    return (requests[0].q.shape[1], requests[0].scoring.window_left, *plans)
