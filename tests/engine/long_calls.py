"""Operations that are long at a tiny slice, and ways to let them go on slice by slice."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import NewCall, append, queries, rows

SLICE_MS = 0.001
"""Some hundred keys and rows are long then; a row over some keys is not."""
ROWS = 48


def long_prefill(name: str, new: bool = True, **fields: Any) -> NewCall:
    """Many rows over one sequence, appended first if `new`."""
    tensors = {"q": queries(3, ROWS)}
    if new:
        tensors |= {"k": rows(4, ROWS), "v": rows(5, ROWS)}
    given = {"layer": 0, "sequences": [name], "qo_indptr": [0, ROWS], "causal": new} | fields
    return NewCall("prefill", given, tensors)


def long_append(name: str) -> NewCall:
    return append(name, ROWS, seed=4)


async def finish(backend: FakeBackend, task: asyncio.Task[Any]) -> Any:
    """Open gates one by one until the task is over."""
    opened = 0
    while not task.done():
        steps = backend.steps or []
        if opened < len(steps):
            steps[opened].set()
            opened += 1
        await asyncio.sleep(0.0005)
    return opened
