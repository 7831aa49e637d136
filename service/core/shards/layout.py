"""Shards: the pages of one sequence that one engine of several holds.

Page i of a sequence is at rank i mod `ranks`. A rank's tokens keep their order: any stretch of the
sequence is one stretch of a rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.errors import IntegrityError, InvalidRequest, SequenceTaken

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Pages `rank`, `rank + ranks`, ... of a sequence."""

    rank: int
    ranks: int

    def held(self, tokens: int, page_size: int) -> int:
        """The number of tokens in these pages among the sequence's first `tokens`."""
        return int(held(tokens, self.rank, self.ranks, page_size))

    def whole_for(self, num_pages: int, page_size: int) -> int:
        """The least length of a sequence that fills `num_pages` of these pages."""
        return ((num_pages - 1) * self.ranks + self.rank + 1) * page_size if num_pages else 0


@dataclass(slots=True, eq=False)
class Shard:
    """An engine's knowledge of a sequence that it holds in part.

    `lengths` int32 [num_layers] is kv_len of the whole sequence. `epoch` numbers the door that may
    write, see `claim`; 0 while no door has claimed the sequence.
    """

    layout: ShardLayout
    lengths: Int32
    epoch: int = 0

    def claim(self, name: str, epoch: int) -> int:
        """Start a new epoch; returns the one before.

        Writers and readers of earlier epochs are rejected from now on. Raises `SequenceTaken` for
        an epoch that is not later than the present one.
        """
        before = self.epoch
        if epoch <= before:
            raise SequenceTaken({name: before})
        self.epoch = epoch
        return before

    def describe(self) -> dict[str, Any]:
        """Rank, ranks, epoch and the whole's lengths, as replies give them."""
        place = {"rank": self.layout.rank, "ranks": self.layout.ranks}
        return place | {"epoch": self.epoch, "lengths": self.lengths.tolist()}

    def fork(self, length: int | None) -> Shard:
        """The shard of a fork at `length` tokens of the whole sequence (None: all of them).

        Raises `InvalidRequest` for a length beyond the parent's.
        """
        longest = int(self.lengths.min())
        if length is None:
            length = longest
        if not 0 <= length <= longest:
            rule = f"0 to {longest}, the length of the whole parent"
            raise InvalidRequest("length", length, rule)
        return Shard(self.layout, np.full_like(self.lengths, length), self.epoch)

    def check(self, where: str, lengths: Int32, page_size: int) -> None:
        """Raises `IntegrityError` where the engine holds other `lengths` than the whole implies."""
        rank, ranks = self.layout.rank, self.layout.ranks
        if not np.array_equal(held(self.lengths, rank, ranks, page_size), lengths):
            whole = self.lengths.tolist()
            raise IntegrityError(f"{where}, rank {rank}, has {lengths.tolist()} of {whole} tokens")


def held(tokens: Any, rank: Any, ranks: Any, page_size: int) -> Any:
    """`ShardLayout.held` for numbers or int64 arrays; negative `tokens` count as none."""
    full, rest = np.divmod(np.maximum(tokens, 0), page_size)
    pages = (full - rank + ranks - 1) // ranks
    return pages * page_size + np.where(full % ranks == rank, rest, 0)
