"""The columns of a padded batch: each row's in the pool, and the new ones of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

MASK_RULE: Final = "give the attention_mask of the whole batch so far, padding of earlier turns too"


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A batch as transformers sees it: rows of equal length, padding hidden by a mask.

    `stored [rows, columns]`: the tokens that the row's sequence holds. Forwards have covered the
    first `covered` columns; beyond them a row has only columns that it shares with others.
    """

    stored: Bools
    covered: int = 0

    @property
    def lengths(self) -> Ints:
        """Tokens of each row's sequence."""
        counted: Ints = self.stored.sum(axis=1)
        return counted

    def select(self, rows: Sequence[int]) -> Columns:
        return Columns(self.stored[list(rows)], self.covered)

    def crop(self, count: int) -> Columns:
        """Without the last `count` columns that forwards have covered."""
        kept = max(self.covered - count, 0)
        return Columns(self.stored[:, :kept], kept)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The columns that one forward adds: `count`, of which some rows store tokens.

    `rows` are those batch rows, `indptr` counts their tokens, `offsets` their lengths before.
    `take`: places of the tokens in the flattened `[rows x count]` columns; None: all of them.
    """

    count: int
    rows: tuple[int, ...]
    indptr: list[int]
    offsets: list[int]
    take: Ints | None
    after: Columns

    @property
    def tokens(self) -> int:
        return self.indptr[-1]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence gets just one token."""
        return self.tokens == len(self.rows)


def hide(columns: Columns, visible: Bools) -> Columns:
    """Without the tokens that a mask hides now: the last ones of a row, say after its end.

    Raises ValueError where a token is kept behind a hidden one: it has attended it.
    """
    stored = widened(columns.stored, visible.shape[1])
    seen = stored.copy()
    seen[:, : visible.shape[1]] &= visible
    if np.array_equal(seen, stored):
        return columns
    lost = stored & ~seen
    behind = seen & (np.cumsum(lost, axis=1) > 0)
    if behind.any():
        row, column = (int(index[0]) for index in np.nonzero(behind))
        raise ValueError(
            f"attention_mask hides a token of row {row} that its token in column {column} has "
            f"attended: only a row's last tokens can be hidden later; {MASK_RULE}"
        )
    return Columns(seen, columns.covered)


def plan(columns: Columns, visible: Bools, count: int) -> Forward:
    """The forward of `count` more columns under the mask `visible [rows, covered + count]`.

    Raises ValueError when the mask is another batch's or shows a column that was hidden before.
    """
    begin, end = columns.covered, columns.covered + count
    stored = widened(columns.stored, end)
    fresh = visible & ~stored[:, :end]
    if fresh[:, :begin].any():
        row, column = (int(index[0]) for index in np.nonzero(fresh[:, :begin]))
        raise ValueError(
            f"attention_mask shows column {column} of row {row}, which was hidden when it was "
            f"computed: {MASK_RULE}"
        )
    new = fresh[:, begin:]
    after = stored.copy()
    after[:, :end] |= fresh
    counts = new.sum(axis=1)
    rows = np.flatnonzero(counts)
    return Forward(
        count=count,
        rows=tuple(rows.tolist()),
        indptr=[0, *np.cumsum(counts[rows]).tolist()],
        offsets=stored.sum(axis=1)[rows].tolist(),
        take=None if new.all() else np.flatnonzero(new),
        after=Columns(after, end),
    )


def mask_of(visible: Any, columns: Columns, count: int) -> Bools:
    """The mask as `[rows, covered + count]`; None shows everything. ValueError for another size."""
    wanted = (len(columns.stored), columns.covered + count)
    if visible is None:
        return np.ones(wanted, np.bool_)
    mask: Bools = visible.cpu().numpy().astype(np.bool_, copy=False)
    if mask.shape != wanted:
        raise ValueError(f"attention_mask is {list(mask.shape)}, not {list(wanted)}: {MASK_RULE}")
    return mask


def widened(stored: Bools, width: int) -> Bools:
    """`stored` with columns of False behind it, up to `width`."""
    rows, has = stored.shape
    if has >= width:
        return stored
    return np.concatenate([stored, np.zeros((rows, width - has), np.bool_)], axis=1)
