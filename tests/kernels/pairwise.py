"""Few combinations of many factors, such that every two values of two factors meet once."""

from __future__ import annotations

import itertools
import random
from typing import Any


def cover(**factors: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Rows, a value per factor; each is the best of some random ones. The same on every run."""
    names, rng = list(factors), random.Random(0)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    rows = []
    while open_pairs:
        a, x, b, y = min(open_pairs)
        best: dict[str, int] = {}
        most: set[tuple[str, int, str, int]] = set()
        for _ in range(40):
            row = {name: rng.randrange(len(factors[name])) for name in names} | {a: x, b: y}
            pairs = {(m, row[m], n, row[n]) for m, n in itertools.combinations(names, 2)}
            if len(pairs & open_pairs) > len(most):
                best, most = row, pairs & open_pairs
        open_pairs -= most
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


def label(row: dict[str, Any]) -> str:
    """A row as a test id."""
    return "-".join(str(value).replace(" ", "") for value in row.values())
