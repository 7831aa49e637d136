"""Hostile callers by the thousand: no frame crashes a session, is answered twice, or leaks."""

from __future__ import annotations

import os

import pytest

from tests.road.random_frames.frame_fuzz import conversation
from tests.road.random_frames.session_fuzz import run

CASES = int(os.environ.get("FUZZ_CASES", "12000"))


@pytest.mark.parametrize("seed", (0, 20_000))
def test_sessions_survive_what_callers_send(seed: int) -> None:
    reply = run(CASES, seed)
    assert reply["answers"] > 4_000 and reply["refused"] > 40, reply


def test_sessions_over_tcp_survive_what_callers_send() -> None:
    reply = run(2_000, 77_000, is_remote=True)
    assert reply["answers"] > 600 and reply["refused"] > 10, reply


def test_a_conversation_is_the_same_for_the_same_seed() -> None:
    assert conversation(5) == conversation(5)
    assert conversation(5) != conversation(6)
