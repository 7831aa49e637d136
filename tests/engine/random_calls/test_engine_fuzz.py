"""Hostile calls by the ten thousand to a live engine: no bug, no page lost, no number moved."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.engine.random_calls.hostile_calls import run

CASES = int(os.environ.get("FUZZ_CASES", "25000"))

pytestmark = pytest.mark.long


@pytest.mark.parametrize("part", range(2))
def test_an_engine_survives_what_callers_do(part: int) -> None:
    reply = run(CASES, secrets.randbits(40))
    assert reply["cases"] >= CASES, reply
    for wanted in ("200", "201", "204", "400", "404", "409", "413", "422", "499"):
        assert reply[wanted] > 0, (wanted, reply)
    assert reply["deaths"] > 10 and reply["conversations"] > 10, reply
