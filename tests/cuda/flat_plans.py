"""Plans of one query row per sequence, for what needs no device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernels.backend import Level, Plan


def flat_level(kv_lens: list[int], page_size: int, causal: bool = False) -> Level:
    """One query row per sequence, pages numbered in order."""
    pages = [-(-n // page_size) for n in kv_lens]
    return Level(
        qo_indptr=np.arange(len(kv_lens) + 1, dtype=np.int32),
        kv_indptr=np.cumsum([0, *pages]).astype(np.int32),
        kv_indices=np.arange(sum(pages), dtype=np.int32),
        kv_last_page_len=np.array([(n - 1) % page_size + 1 if n else 0 for n in kv_lens], np.int32),
        kv_start=np.zeros(len(kv_lens), np.int32),
        causal=causal,
    )


def decode_plan(kv_lens: list[int], page_size: int = 16) -> Plan:
    return Plan((flat_level(kv_lens, page_size),), np.array(kv_lens, np.int32) - 1)


def shared_pages(plan: Plan, count: int) -> Plan:
    """The plan in which every sequence has the first sequence's first `count` pages."""
    (level,) = plan.levels
    pages = level.kv_indices.copy()
    for begin in level.kv_indptr[1:-1]:
        pages[begin : begin + count] = pages[:count]
    return replace(plan, levels=(replace(level, kv_indices=pages),))
