"""What merges and last writes find a row's sink by."""

from __future__ import annotations

import numpy as np

from kernels.cuda.merge.variants import sinks_inverse


def test_the_inverse_of_a_number_of_sinks_divides_every_row() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 5, 7, 8, 12, 40, 128, 255, 1_000_003, 2**31 - 1):
        inverse = sinks_inverse(count)
        assert inverse < 2**64
        edges = (0, 1, count - 1, count, count + 1, 2**31 - 1)
        for row in (*edges, *rng.integers(0, 2**31, 1000).tolist()):
            assert row - (2 * row * inverse >> 64) * count == row % count, (row, count)
