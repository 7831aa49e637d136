"""Which tokens of a whole sequence a shard holds."""

from __future__ import annotations

import pytest

from service.core.shards.layout import Shard


@pytest.mark.parametrize("ranks", range(1, 5))
def test_the_least_whole_sequence_for_full_pages_of_a_shard(ranks: int) -> None:
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        assert shard.whole_for(0, 4) == 0
        for pages in range(1, 6):
            whole = shard.whole_for(pages, 4)
            assert shard.held(whole, 4) == 4 * pages
            assert shard.held(whole - 1, 4) < 4 * pages
