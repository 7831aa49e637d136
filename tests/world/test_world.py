"""A few seeds of the world: the service agrees with the model, runs repeat, and bugs are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.search import PATCHES, applies

ROOT = Path(__file__).resolve().parents[2]


def world(*args: str) -> tuple[int, str]:
    """The exit status and output of `python -m tests.world`."""
    command = [sys.executable, "-m", "tests.world", *args]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("first", "seconds", "jobs"), [(0, 10, 1), pytest.param(10, 30, 2, marks=pytest.mark.long)]
)
def test_the_service_agrees_with_the_model(first: int, seconds: int, jobs: int) -> None:
    status, output = world("--first", str(first), "--budget-s", str(seconds), "--jobs", str(jobs))
    assert status == 0, output


@pytest.mark.parametrize("option", ["--world", "--bug"])
def test_an_unknown_name_is_refused_with_the_known_ones(option: str) -> None:
    status, output = world(option, "nowhere")
    assert status == 2 and "invalid choice: 'nowhere' (choose from" in output, output


def test_a_seed_repeats_exactly_in_each_world() -> None:
    first, second = (world("--seed", "3") for _ in range(2))
    assert first == second
    assert first[1].count("ok; digest") == 4


@pytest.mark.parametrize("bug", PATCHES)
def test_a_bug_can_still_be_put_back(bug: str) -> None:
    assert applies(bug)


@pytest.mark.long
@pytest.mark.parametrize("bug", ["a-cut-does-not-wait-for-launches"])
def test_a_bug_that_was_put_back_is_found(bug: str) -> None:
    status, output = world("--bug", bug, "--seeds", "100")
    assert status == 0, output
    assert "replay: python -m tests.world --world engine --seed" in output
