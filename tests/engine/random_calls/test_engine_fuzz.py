"""Hostile calls by the ten thousand to a live engine: no bug, no page lost, no number moved."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.engine.random_calls.hostile_calls import run

CASES = int(os.environ.get("FUZZ_CASES", "25000"))


@pytest.mark.parametrize("cases", [1200, pytest.param(CASES, marks=pytest.mark.long)])
def test_an_engine_survives_what_callers_do(cases: int) -> None:
    reply = run(cases, secrets.randbits(40))
    assert reply["cases"] >= cases, reply
    for wanted in ("200", "400", "404", "422"):
        assert reply[wanted] > 0, (wanted, reply)
    if cases >= 25_000:
        rare = ("201", "204", "409", "413", "499", "deaths", "conversations")
        assert all(reply[wanted] > 5 for wanted in rare), reply
