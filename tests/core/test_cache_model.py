"""After any history a prefix cache has the pages of a plain model."""

from __future__ import annotations

import pytest
from cache_model import run


@pytest.mark.long
@pytest.mark.timeout(600)  # ten seconds of CPU time, more on a busy machine
def test_any_history_leaves_what_pages_in_a_dict_would_be() -> None:
    over = run(30_000, seed=2026, check_every=100)
    assert over.hits > 300, "hardly anything was found again"
    for kind in ("evicted", "moved", "left to forks", "outlived", "out of pages", "die", "resets"):
        assert over.counts[kind] > 5, f"{kind}: {over.counts[kind]} times only"


@pytest.mark.parametrize("seed", range(2))
def test_books_are_right_after_every_single_operation(seed: int) -> None:
    run(600, seed, check_every=1)
