"""Shards: sequences whose pages are dealt out over several engines, and how many tokens lie where.

Page i of a sequence lies at rank i mod `ranks`. So the tokens that a rank holds keep their order,
and what it holds of any stretch of the sequence is a stretch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shard:
    """Pages `rank`, `rank + ranks`, ... of a sequence."""

    rank: int
    ranks: int

    def held(self, tokens: int, page_size: int) -> int:
        """How many of the first `tokens` tokens of the whole sequence are among them."""
        return int(held(tokens, self.rank, self.ranks, page_size))

    def whole_for(self, num_pages: int, page_size: int) -> int:
        """The least length of a whole sequence of which so many full pages are among them."""
        return ((num_pages - 1) * self.ranks + self.rank + 1) * page_size if num_pages else 0

    @property
    def is_whole(self) -> bool:
        return self.ranks == 1


@dataclass(slots=True, eq=False)
class Whole:
    """What a shard knows of its sequence: kv_len of the whole, int32 [num_layers], and in which
    epoch that is true. Whoever gives epochs is the only writer in his; 0 where nobody does."""

    lengths: NDArray[np.int32]
    epoch: int = 0


WHOLE: Final = Shard(0, 1)
"""All pages: what a sequence is that nobody dealt out."""


def held(tokens: Any, rank: Any, ranks: Any, page_size: int) -> Any:
    """`Shard.held` for numbers or int64 arrays alike; fewer tokens than none count as none."""
    full, rest = np.divmod(np.maximum(tokens, 0), page_size)
    pages = (full - rank + ranks - 1) // ranks
    return pages * page_size + np.where(full % ranks == rank, rest, 0)
