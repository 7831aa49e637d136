"""A hundred thousand hostile calls to a live engine: no bug, no page lost, no number moved."""

from __future__ import annotations

import secrets

import pytest

from tests.engine.random_calls.hostile_calls import run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("part", range(4))
def test_an_engine_survives_what_callers_do(part: int) -> None:
    told = run(25_000, secrets.randbits(40))
    assert told["cases"] >= 25_000, told
    for wanted in ("200", "201", "204", "400", "404", "409", "413", "422", "499"):
        assert told[wanted] > 0, (wanted, told)
    assert told["deaths"] > 10 and told["conversations"] > 10, told
