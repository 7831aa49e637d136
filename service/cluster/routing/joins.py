"""How the engines' replies to a broadcast become one, and what each engine is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

Fields = dict[str, Any]
Join = Callable[[Fields, Sequence[Fields]], Fields]
"""From the request's fields and the engines' replies."""


def join_sums(_: Fields, replies: Sequence[Fields]) -> Fields:
    """Numbers are added; no limit (None) on one engine is no limit."""
    joined: Fields = {}
    for name in replies[0]:
        values = [one[name] for one in replies]
        joined[name] = None if None in values else sum(values)
    return joined


def join_pools(_: Fields, replies: Sequence[Fields]) -> Fields:
    """Pages are added; the sharing ratio is weighted by the pages in use. A sequence is on one
    engine: that with the most room says how many tokens it can have."""
    apart = {"sharing_ratio", "integrity", "available_tokens"}
    joined = join_sums(_, [{name: one[name] for name in one.keys() - apart} for one in replies])
    weights = [one["referenced"] for one in replies]
    shared = sum(w * one["sharing_ratio"] for w, one in zip(weights, replies, strict=True))
    broken = [one["integrity"] for one in replies if one["integrity"] != "ok"]
    joined["sharing_ratio"] = shared / sum(weights) if sum(weights) else 1.0
    joined["integrity"] = "; ".join(broken) or "ok"
    joined["available_tokens"] = max(one["available_tokens"] for one in replies)
    return joined


def join_info(_: Fields, replies: Sequence[Fields]) -> Fields:
    """Sizes are added. `instance_id` changes whenever an engine restarts, comes or goes."""
    instances = sorted(one["instance_id"] for one in replies)
    digest = blake2b(" ".join(instances).encode(), digest_size=16).hexdigest()
    most = sum(one["limits"]["max_sequences"] for one in replies)
    every = [tier for one in replies for tier in one.get("tiers") or ()]
    tiers = [
        tier | {"total_bytes": sum(o["total_bytes"] for o in every if o["name"] == tier["name"])}
        for tier in replies[0].get("tiers") or ()
    ]
    are_invariant = all(one.get("numerics") == "invariant" for one in replies)
    return replies[0] | {
        "numerics": "invariant" if are_invariant else "fast",
        "instance_id": digest if len(replies) > 1 else instances[0],
        "num_pages": sum(one["num_pages"] for one in replies),
        "limits": replies[0]["limits"] | {"max_sequences": most},
        "tiers": tiers or None,
    }


def join_lists(request: Fields, replies: Sequence[Fields]) -> Fields:
    """A page of the list of all sequences, by id."""
    limit = request["limit"]
    views = {view["id"]: view for part in replies for view in part["sequences"]}
    every = [views[name] for name in sorted(views)]
    has_more = len(every) > limit or any(part["next"] is not None for part in replies)
    shown = every[:limit]
    return {"sequences": shown, "next": shown[-1]["id"] if shown and has_more else None}


def join_namespaces(_: Fields, replies: Sequence[Fields]) -> Fields:
    """Quotas and use are added."""
    numbers = [{name: one[name] for name in one.keys() - {"name"}} for one in replies]
    return {"name": replies[0]["name"]} | join_sums(_, numbers)


def join_names(_: Fields, replies: Sequence[Fields]) -> Fields:
    return {"namespaces": sorted({name for one in replies for name in one["namespaces"]})}


JOINS: Final[Mapping[str, Join]] = {
    "list_sequences": join_lists,
    "info": join_info,
    "pool": join_pools,
    "pin": lambda _, replies: max(replies, key=lambda one: int(one["num_pages"])),
    "unpin": lambda _, replies: {},
    "clear": join_sums,
    "get_namespace": join_namespaces,
    "set_namespace": join_namespaces,
    "list_namespaces": join_names,
}


def shares(name: str, request: Fields, count: int) -> list[Fields]:
    """The fields for each of `count` engines: quotas are divided, all else is the same."""
    parts = [dict(request) for _ in range(count)]
    if name == "set_namespace":
        for field in ("max_pages", "reserved_pages", "max_host_bytes", "max_disk_bytes"):
            if (total := request.get(field)) is not None:
                for index, part in enumerate(parts):
                    part[field] = total // count + (index < total % count)
    return parts


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
