"""Workloads drawn at random: rows as in workloads.json, of sizes not tuned for."""

from __future__ import annotations

from typing import Final

import numpy as np

from bench.cases.kernel_plans import Row
from kernels.backend import NUMPY_DTYPES, DType

POOLS: Final[tuple[tuple[int, DType, int], ...]] = (
    *((128, "fp16", 16), (64, "fp16", 16), (128, "fp8_e4m3", 16)),
    *((192, "fp16", 32), (256, "fp16", 16), (128, "fp16", 5)),
)
"""head_dim, dtype and page size: each takes seconds to compile, so there are few."""
MOST_BYTES: Final = 2e9
MOST_FLOPS: Final = 2e12


def random_rows(count: int, rng: np.random.Generator) -> list[Row]:
    """Decodes, prefills and cascades of two levels, in turn."""
    return [_row(i, rng) for i in range(count)]


def _row(number: int, rng: np.random.Generator) -> Row:
    head_dim, dtype, page_size = POOLS[int(rng.integers(len(POOLS)))]
    kv_heads, group = int(rng.choice([1, 2, 4, 8, 16])), int(rng.integers(1, 17))
    kind = ("decode", "prefill", "cascade")[number % 3]
    batch = _log_uniform(rng, 1, 32 if kind == "prefill" else 256)
    token_bytes = 2 * kv_heads * head_dim * NUMPY_DTYPES[dtype].itemsize
    most = min(32768, MOST_BYTES / token_bytes / batch)
    row: Row = {
        "kind": kind,
        "batch": batch,
        "num_qo_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "kv_dtype": dtype,
        "at_least": None,
        "aim": None,
    }
    if kind == "cascade":
        shared = page_size * -(-_log_uniform(rng, 1024, 32768) // page_size)
        own = _log_uniform(rng, 32, min(2048, most))
        row["levels"] = [
            {"nodes": 1, "tokens_per_node": shared},
            {"nodes": batch, "tokens_per_node": own},
        ]
        tokens, rows, seen = shared + batch * own, batch, float(batch * (shared + own))
        text = f"{batch}x({shared}+{own})"
    else:
        top = _log_uniform(rng, 512, most)
        lens = rng.integers(max(1, top // int(rng.choice([1, 2, 16]))), top + 1, batch)
        row["kv_lens"] = lens.tolist()
        queries = np.ones_like(lens)
        if kind == "prefill":
            queries = np.minimum(lens, _log_uniform(rng, 16, 4096))
            pairs = (queries * (lens - (queries - 1) / 2)).sum() * 4 * kv_heads * group * head_dim
            queries = np.maximum(1, (queries * min(1.0, MOST_FLOPS / pairs)).astype(int))
            row |= {"qo_lens": queries.tolist(), "causal": True}
        tokens, rows = int(lens.sum()), int(queries.sum())
        seen = float((queries * (lens - (queries - 1) / 2)).sum())
        text = f"{batch}x{lens.min()}..{lens.max()}, rows {queries.min()}..{queries.max()}"
    row["bytes"] = tokens * token_bytes + 4 * rows * kv_heads * group * head_dim
    row["flops"] = 4 * seen * kv_heads * group * head_dim
    pool = f"{kv_heads * group}/{kv_heads} heads of {head_dim}, {dtype}, page {page_size}"
    row["name"] = f"{kind}/{text}; {pool}"
    return row


def _log_uniform(rng: np.random.Generator, least: float, most: float) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(max(least, most)))))
