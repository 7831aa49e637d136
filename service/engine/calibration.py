"""Measures attention before the engine is ready, so that its first slices have the right length.

The first guess of a processor's pace may be ten times too fast, and all that wait together share a
launch. Its results are discarded.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kernels.backend import NUMPY_DTYPES, Attend, Level, Plan, Scoring
from service.engine.loop.job import Cost
from service.engine.selftest import GROUP_SIZE, tensor_dtype
from service.engine.store.store import Store

ROWS: Final = 32
GUESSED_S: Final = 0.0005
"""Length of one measurement by the first guess."""
MEASUREMENTS: Final = 4
"""The fastest counts: the first prepares, and other programs may disturb some."""
ENOUGH_S: Final = 0.05
"""After this time the second measurement is the last."""
SLOWEST: Final = 16.0
"""Largest factor between the measurement and the first guess that is believed, on a busy host."""


def calibrate(store: Store) -> None:
    """Sets the pace of attention by decodes of `ROWS` rows over the pool's first pages."""
    geometry, pace = store.geometry, store.pace
    heads, dim = geometry.num_kv_heads * GROUP_SIZE, geometry.head_dim
    token = Cost(geometry.token_bytes, 4.0 * heads * dim)
    num_tokens = GUESSED_S / pace.seconds("attend", token)
    num_pages = max(1, int(num_tokens / ROWS / geometry.page_size))
    attend = Attend(
        layer=0,
        q=np.zeros((ROWS, heads, dim), NUMPY_DTYPES[tensor_dtype(geometry)]),
        plan=decode_plan(num_pages, geometry.page_size, geometry.num_pages),
        scoring=Scoring(dim**-0.5),
    )
    tokens = ROWS * num_pages * geometry.page_size
    cost = Cost(token.num_bytes * tokens, token.flops * tokens)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < MEASUREMENTS and sum(seconds) < ENOUGH_S):
        started = time.monotonic()
        store.backend.attend([attend]).result()
        seconds.append(time.monotonic() - started)
    pace.start_from("attend", min(max(min(seconds) / pace.seconds("attend", cost), 1.0), SLOWEST))


def decode_plan(num_pages: int, page_size: int, distinct: int) -> Plan:
    """`ROWS` rows that attend `num_pages` full pages each, of `distinct` pages in the pool."""
    rows = np.arange(ROWS + 1, dtype=np.int32)
    pages = np.arange(ROWS * num_pages, dtype=np.int32) % np.int32(distinct)
    full = np.full(ROWS, page_size, np.int32)
    level = Level(rows, rows * np.int32(num_pages), pages, full, np.zeros_like(full), False)
    return Plan((level,), full * np.int32(num_pages) - np.int32(1))
