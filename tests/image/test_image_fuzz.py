"""Images of hostile callers by the ten thousand: each is read rightly or refused, nothing else."""

from __future__ import annotations

import os
import secrets

import pytest
from image_fuzz import run

CASES = int(os.environ.get("FUZZ_CASES", "60000"))


@pytest.mark.parametrize("cases", [8_000, pytest.param(CASES, marks=pytest.mark.long)])
def test_hostile_images_are_read_or_refused(cases: int) -> None:
    seed = secrets.randbits(40)
    print(f"seed {seed}")
    outcomes = run(cases, seed)
    assert outcomes["right"] > 300, outcomes
    assert outcomes["MalformedBody"] > 300, outcomes
    assert outcomes["InvalidRequest"] > 300, outcomes
