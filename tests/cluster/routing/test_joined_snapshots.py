"""Snapshots of several engines as one."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.cluster.routing.joins import join_snapshots


def snapshot(states: list[int], step: int, total: int, namespaces: list[str], *rows: Any) -> Any:
    """With rows of (parent, pages, total, sequences, idle_s, state)."""
    names = ("free", "referenced", "pinned", "cached")
    counts = {name: states.count(state) for state, name in enumerate(names)}
    counts |= {"total": total, "evicted": 3}
    names = ("parents", "pages", "totals", "sequences", "idle_s", "states")
    dtypes = (np.int32, np.int32, np.int32, np.int32, np.float32, np.uint8)
    columns = zip(names, zip(*rows, strict=True), dtypes, strict=True) if rows else ()
    arrays = {f"tree_{name}": np.array(column, dtype) for name, column, dtype in columns}
    empty = {f"tree_{name}": np.zeros(0, dtype) for name, dtype in zip(names, dtypes, strict=True)}
    fields = counts | {"page_step": step, "namespaces": namespaces, "engines": []}
    return fields, {"page_states": np.array(states, np.uint8)} | (arrays or empty)


def test_pages_follow_each_other_and_trees_hang_below_their_namespaces() -> None:
    red = snapshot(
        [1, 0, 3], 1, 3, ["red", "blue"],
        *((-1, 0, 2, 1, 4.0, 0), (-1, 0, 1, 0, 9.0, 0), (0, 2, 2, 1, 4.0, 1), (1, 1, 1, 0, 9.0, 3)),
    )  # fmt: skip
    blue = snapshot(
        [1, 1], 1, 2, ["blue"],
        *((-1, 0, 2, 2, 1.0, 0), (0, 1, 2, 2, 1.0, 1), (1, 1, 1, 1, 1.0, 1)),
    )  # fmt: skip
    fields, arrays = join_snapshots(["a", "b", "c"], [red, snapshot([0], 1, 1, []), blue])
    assert {"free": 2, "total": 6, "evicted": 9, "page_step": 1}.items() <= fields.items()
    assert fields["namespaces"] == ["red", "blue"]
    assert fields["engines"] == [
        {"name": "a", "total": 3, "referenced": 1, "pinned": 0, "cached": 1},
        {"name": "b", "total": 1, "referenced": 0, "pinned": 0, "cached": 0},
        {"name": "c", "total": 2, "referenced": 2, "pinned": 0, "cached": 0},
    ]
    assert arrays["page_states"].tolist() == [1, 0, 3, 0, 1, 1]
    alone, _ = join_snapshots(["a"], [red])
    assert (alone["free"], alone["total"], alone["page_step"]) == (1, 3, 1)
    assert arrays["tree_parents"].tolist() == [-1, -1, 0, 1, 1, 4]
    assert arrays["tree_totals"].tolist() == [2, 3, 2, 1, 2, 1]
    assert arrays["tree_sequences"].tolist() == [1, 2, 1, 0, 2, 1]
    assert arrays["tree_idle_s"].tolist() == [4.0, 1.0, 4.0, 9.0, 1.0, 1.0]
    assert arrays["tree_states"].dtype == np.uint8 and arrays["tree_idle_s"].dtype == np.float32


def test_pools_with_different_page_steps_are_joined_at_the_larger_one() -> None:
    _, arrays = join_snapshots(
        ["a", "b"], [snapshot([1, 2, 3], 4, 12, []), snapshot([0, 1, 2, 3, 1, 2], 1, 6, [])]
    )
    assert arrays["page_states"].tolist() == [1, 2, 3, 0, 1]
    assert all(array.size == 0 for name, array in arrays.items() if name.startswith("tree"))
