"""Engines stop and are emptied, doors are killed: nothing is lost. Longer: `stress.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.stress import play, served

SECONDS = 12.0
LONGEST_STALL_S = 4.0


@pytest.mark.parametrize("num_engines", [2, 3])
def test_nothing_is_lost_unknown_or_there_twice_while_no_engine_dies(num_engines: int) -> None:
    with served(num_engines) as service:
        outcomes = asyncio.run(play(service, SECONDS, num_engines, LONGEST_STALL_S))
    print(dict(outcomes))
    assert outcomes["ok"] > 50
    assert all(outcomes[what] for what in ("doors killed", "drains", "stalls", "rows"))
