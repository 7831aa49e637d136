"""Hostile callers by the thousand: no frame crashes a session, is answered twice, or leaks."""

from __future__ import annotations

import pytest

from tests.road.frame_fuzz import conversation
from tests.road.fuzz import run


@pytest.mark.parametrize("seed", range(0, 40_000, 10_000))
def test_sessions_survive_what_callers_send(seed: int) -> None:
    told = run(25_000, seed)
    assert told["answers"] > 10_000 and told["refused"] > 100, told


def test_sessions_over_tcp_survive_what_callers_send() -> None:
    told = run(3_000, 77_000, is_remote=True)
    assert told["answers"] > 1_000 and told["refused"] > 10, told


def test_a_conversation_is_the_same_for_the_same_seed() -> None:
    assert conversation(5) == conversation(5)
    assert conversation(5) != conversation(6)
