"""A hundred thousand images of hostile callers: each is read rightly or refused, nothing else."""

from __future__ import annotations

import os
import secrets

import pytest
from image_fuzz import run

CASES = int(os.environ.get("FUZZ_CASES", "25000"))

LONG = pytest.mark.long


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=LONG) for part in (1, 2, 3))])
def test_hostile_images_are_read_or_refused(part: int) -> None:
    seed = secrets.randbits(40)
    print(f"seed {seed}")
    outcomes = run(CASES, seed)
    assert outcomes["right"] > 1_000, outcomes
    assert outcomes["MalformedBody"] > 1_000, outcomes
    assert outcomes["InvalidRequest"] > 1_000, outcomes
