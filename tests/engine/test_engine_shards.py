"""Engines that hold shards of sequences: their states, merged, are those of the whole sequence."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import oracle
import pytest
from engine_caller import Caller, queries, rows
from engine_model import CPU_GEOMETRY, SCALE, on_cpus

from kernels.states import merge_states

SIZE = CPU_GEOMETRY.page_size
EDGES = [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE, 4 * SIZE - 1, 5 * SIZE + 2]
    0,
    1,
    SIZE - 1,
    SIZE,
    SIZE + 1,
    2 * SIZE,
    2 * SIZE + 1,
    3 * SIZE,
    4 * SIZE - 1,
    5 * SIZE + 2,
]


async def deal(callers: list[Caller], *names: str) -> None:
    for rank, caller in enumerate(callers):
        shard = {"rank": rank, "ranks": len(callers)}
        new = [{"id": name, "shard": shard} for name in names]
        await caller.call("create_sequences", {"sequences": new})


async def ask(callers: list[Caller], name: str, fields: dict[str, Any], **tensors: Any) -> Any:
    """The same of every rank, and the states merged."""
    told = await asyncio.gather(*(caller.call(name, fields, **tensors) for caller in callers))
    if "o" not in told[0].tensors:
        return told
    o, lse = (np.stack([one.tensors[part] for one in told], 1) for part in ("o", "lse"))
    return merge_states(o, lse)


def wanted(k: Any, v: Any, q: Any, **how: Any) -> Any:
    seen = oracle.visible(len(q), len(k), **how)
    return oracle.attend(q, k, v, seen, sm_scale=SCALE)


def check(state: Any, expected: Any, case: str) -> None:
    np.testing.assert_allclose(state.o, expected[0], atol=2e-5, err_msg=case)
    np.testing.assert_allclose(state.lse, expected[1], atol=2e-5, err_msg=case)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("window", [-1, 0, 3, SIZE, 2 * SIZE + 1])
def test_shards_together_see_what_the_whole_sequence_is_at_every_page_boundary(
    ranks: int, window: int
) -> None:
    async def scenario(callers: list[Caller]) -> None:
        await deal(callers, "a")
        k, v = rows(1, 200, CPU_GEOMETRY), rows(2, 200, CPU_GEOMETRY)
        length = 0
        for step, count in enumerate(n for edge in EDGES for n in (edge, 1)):
            at = {"layer": 0, "sequences": ["a"], "offsets": [length], "window_left": window}
            new = slice(length, length + count)
            length += count
            q = queries(step, count, CPU_GEOMETRY)
            fields = at | {"qo_indptr": [0, count], "causal": step % 4 != 3}
            state = await ask(callers, "prefill", fields, q=q, k=k[new], v=v[new])
            how = {"causal": fields["causal"], "window_left": window}
            check(state, wanted(k[:length], v[:length], q, **how), f"{length} tokens, {fields}")
            if length:
                q = queries(step, 1, CPU_GEOMETRY)
                state = await ask(callers, "decode", at | {"offsets": [length]}, q=q)
                check(state, wanted(k[:length], v[:length], q, window_left=window), f"at {length}")

    on_cpus(ranks, scenario)
