"""Ragged attention of some rows at a time, by the positions they have, is that of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from pooled import indptr, int32, normal

from kernels.backend import PoolGeometry, RaggedAttend, Scoring

GEOMETRY = PoolGeometry(1, 2, 16, 2, 64, "NHD", "fp16")


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_with_their_positions_make_the_whole(backend, rng, causal, window) -> None:
    pool = backend(GEOMETRY)
    q, k, v = (normal(rng, (rows, 2, 64), "fp16") for rows in (24, 40, 40))
    whole = RaggedAttend(
        q, k, v, indptr([24]), indptr([40]), causal, Scoring(0.125, window_left=window)
    )
    want = pool.attend_ragged(whole).result()
    positions = whole.row_positions
    assert positions.tolist() == list(range(16, 40))
    for first, last in ((0, 7), (7, 8), (8, 24)):
        part = RaggedAttend(
            q[first:last],
            k,
            v,
            indptr([last - first]),
            indptr([40]),
            causal,
            whole.scoring,
            positions=positions[first:last],
        )
        got = pool.attend_ragged(part).result()
        np.testing.assert_allclose(
            got.o.astype(np.float32), want.o[first:last].astype(np.float32), atol=2e-3
        )
        np.testing.assert_allclose(got.lse, want.lse[first:last], atol=1e-3)


def test_positions_for_other_rows_than_q_has_are_refused(backend, rng) -> None:
    q, k, v = (normal(rng, (3, 2, 64), "fp16") for _ in range(3))
    ends = indptr([3])
    with pytest.raises(ValueError, match="positions"):
        backend(GEOMETRY).attend_ragged(
            RaggedAttend(q, k, v, ends, ends, True, Scoring(1.0), positions=int32([0, 1]))
        )
