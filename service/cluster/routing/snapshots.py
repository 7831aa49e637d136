"""Joins the snapshots of several engines: all their pages, and one tree of prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

Fields = dict[str, Any]
Arrays = Mapping[str, Array]
TREE: Final = "tree_"
PER_ENGINE: Final = ("total", "referenced", "pinned", "cached")


def join_snapshots(
    engine_names: Sequence[str], snapshots: Sequence[tuple[Fields, Arrays]]
) -> tuple[Fields, dict[str, Array]]:
    """Joins one snapshot per engine, in the order of `engine_names`.

    Counts are added, pages come engine by engine, trees are joined below their namespaces.
    """
    step = max(fields["page_step"] for fields, _ in snapshots)
    names = list(dict.fromkeys(name for fields, _ in snapshots for name in fields["namespaces"]))
    counts = snapshots[0][0].keys() - {"page_step", "namespaces", "engines"}
    counted: Fields = {name: sum(fields[name] for fields, _ in snapshots) for name in counts}
    states = [every_nth(fields, arrays["page_states"], step) for fields, arrays in snapshots]
    engines = [
        {"name": name} | {count: fields[count] for count in PER_ENGINE}
        for name, (fields, _) in zip(engine_names, snapshots, strict=True)
    ]
    return (
        counted | {"page_step": step, "namespaces": names, "engines": engines},
        {"page_states": np.concatenate(states)} | tree(snapshots, names),
    )


def every_nth(fields: Fields, states: Array, step: int) -> Array:
    """The states of pages 0, `step`, 2 * `step`, ..., as far as the snapshot has them."""
    found: Array = states[np.arange(0, fields["total"], step) // fields["page_step"]]
    return found


def tree(snapshots: Sequence[tuple[Fields, Arrays]], names: Sequence[str]) -> dict[str, Array]:
    """Rows of the namespaces, then the other rows engine by engine."""
    first = snapshots[0][1]
    columns = {name: [heads(name, snapshots, names)] for name in first if name.startswith(TREE)}
    num_rows = len(names)
    for fields, arrays in snapshots:
        own = len(fields["namespaces"])
        rows = arrays["tree_parents"].size
        places = [names.index(name) for name in fields["namespaces"]]
        at = np.array([*places, *range(num_rows, num_rows + rows - own)], np.int32)
        for name, column in columns.items():
            below = arrays[name][own:]
            column.append(at[below] if name == "tree_parents" else below)
        num_rows += rows - own
    return {name: np.concatenate(column) for name, column in columns.items()}


def heads(name: str, snapshots: Sequence[tuple[Fields, Arrays]], names: Sequence[str]) -> Array:
    """One column of the namespaces' rows."""
    dtype = snapshots[0][1][name].dtype
    if name == "tree_parents":
        return np.full(len(names), -1, dtype)
    found = np.full(len(names), np.inf if name == "tree_idle_s" else 0).astype(dtype)
    for fields, arrays in snapshots:
        for row, namespace in enumerate(fields["namespaces"]):
            at, value = names.index(namespace), arrays[name][row]
            found[at] = min(found[at], value) if name == "tree_idle_s" else found[at] + value
    return found
