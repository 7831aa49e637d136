"""Plans, positions and slots of the rows of workloads.json, as host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.backend import DType, Int32, Level, Plan, PoolGeometry, Scoring
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.kv.ragged import ragged_plan
from kernels.cuda.kv.view import KvView

COLD_BYTES: Final = 400_000_000
"""Bytes that consecutive calls read at least: several times the L2 cache."""
SEED: Final = 7
Row = dict[str, Any]
Pages = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of pages that rows `first:stop` share, from position `start` of their sequences."""

    first: int
    stop: int
    pages: Pages
    keys: int
    start: int


def rotation(num_bytes: int) -> int:
    """Copies of a working set that together exceed the cache."""
    return min(32, max(1, ceil(COLD_BYTES / num_bytes)))


def int32(values: Any) -> Int32:
    return np.ascontiguousarray(values, dtype=np.int32)


def level_of(nodes: Sequence[Node], page_size: int, causal: bool = False) -> Level:
    """A level from its nodes, in row order."""
    return Level(
        qo_indptr=int32([0, *(node.stop for node in nodes)]),
        kv_indptr=int32(np.cumsum([0, *(len(node.pages) for node in nodes)])),
        kv_indices=int32(np.concatenate([node.pages for node in nodes])),
        kv_last_page_len=int32([(node.keys - 1) % page_size + 1 for node in nodes]),
        kv_start=int32([node.start for node in nodes]),
        causal=causal,
    )


def row_levels(row: Row) -> tuple[list[list[Node]], Int32, int]:
    """(nodes per level, positions, pages used) of a decode, cascade or prefill row."""
    size = row["page_size"]
    if row["kind"] == "cascade":
        batch, causal_rows = row["batch"], None
        counts = [[level["tokens_per_node"]] * level["nodes"] for level in row["levels"]]
    else:
        batch = len(row["kv_lens"])
        causal_rows = row.get("qo_lens", [1] * batch)
        counts = [row["kv_lens"]]
    total = sum(ceil(keys / size) for level in counts for keys in level)
    ids = np.random.default_rng(SEED).permutation(total)
    levels, used, start = [], 0, 0
    bounds = np.cumsum([0, *causal_rows]) if causal_rows else np.arange(batch + 1)
    for keys_of in counts:
        step = (len(bounds) - 1) // len(keys_of)
        nodes = []
        for index, keys in enumerate(keys_of):
            pages = ids[used : used + ceil(keys / size)]
            used += len(pages)
            first, stop = int(bounds[index * step]), int(bounds[(index + 1) * step])
            nodes.append(Node(first, stop, pages, keys, start))
        levels.append(nodes)
        start += keys_of[0]
    if causal_rows:
        positions = np.concatenate(
            [np.arange(k - q, k) for q, k in zip(causal_rows, row["kv_lens"], strict=True)]
        )
    else:
        positions = np.full(batch, start - 1)
    return levels, int32(positions), total


def flat_plan(levels: Sequence[Sequence[Node]], positions: Int32, page_size: int) -> Plan:
    """The same attention with no sharing: every row its own run over all its nodes' pages."""
    nodes = []
    for r in range(len(positions)):
        mine = [n for level in levels for n in level if n.first <= r < n.stop]
        pages = np.concatenate([n.pages for n in mine])
        nodes.append(Node(r, r + 1, pages, sum(n.keys for n in mine), 0))
    return Plan((level_of(nodes, page_size),), positions)


def geometry_of(row: Row, pages: int, layers: int) -> PoolGeometry:
    """A pool of a row's format."""
    return PoolGeometry(
        num_layers=layers,
        num_pages=pages,
        page_size=row["page_size"],
        num_kv_heads=row["num_kv_heads"],
        head_dim=row["head_dim"],
        layout=row.get("layout", "NHD"),
        dtype=row["kv_dtype"],
    )


def pool_plan(row: Row, flat: bool = False) -> tuple[PoolGeometry, Plan]:
    """Decode, cascade or paged prefill: the pool, with a layer for each call, and the plan."""
    levels, positions, pages = row_levels(row)
    size = row["page_size"]
    geometry = geometry_of(row, pages, rotation(row["bytes"]))
    if flat:
        return geometry, flat_plan(levels, positions, size)
    causal = bool(row.get("causal", False))
    return geometry, Plan(tuple(level_of(nodes, size, causal) for nodes in levels), positions)


def ragged_row_plan(row: Row) -> tuple[int, Plan]:
    """Ragged prefill: the number of keys, and the plan."""
    queries, keys = (int32(np.cumsum([0, *row[name]])) for name in ("qo_lens", "kv_lens"))
    return int(keys[-1]), ragged_plan(queries, keys, True)


def config_of(row: Row, kv: KvView) -> AttentionConfig:
    """The attention of a row over K and V."""
    compute: DType = "fp16" if row["kv_dtype"].startswith("fp8") else row["kv_dtype"]
    return AttentionConfig(
        kv, row["num_qo_heads"], compute, Scoring(row["head_dim"] ** -0.5), False
    )


def append_slots(row: Row) -> tuple[PoolGeometry, Int32]:
    """The pool that an append row writes to, and the slot of each of its rows."""
    count, size = row["rows"], row["page_size"]
    pages = ceil(count / size)
    ids = np.random.default_rng(SEED).permutation(pages)
    slots = (ids[:, None] * size + np.arange(size)).ravel()[:count]
    return geometry_of(row, pages, rotation(row["bytes"])), int32(slots)


def merge_indptr(row: Row) -> tuple[PoolGeometry, Int32]:
    """The smallest pool with a merge row's head_dim, and where each list begins."""
    pool = row | {"page_size": 16, "num_kv_heads": 1, "kv_dtype": "fp16"}
    return geometry_of(pool, 1, 1), int32(np.arange(row["rows"] + 1) * row["states"])
