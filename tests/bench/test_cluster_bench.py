"""The cluster's bench: rounds become medians, what others disturb is done again, wakes are told."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from bench import processes
from bench.calibrate import SMALL_CALLS, wakes_s
from bench.cluster import Arm, compared, pages_for
from bench.processes import TRIES, Processes, Watched, undisturbed
from bench.replay import summary
from bench.simulation.tables import cluster_table
from bench.simulation.trace import made_up, num_distinct

NOBODY = Processes([[], [], []])


def told(per_s: float, hit_rate: float = 0.5) -> dict[str, Any]:
    """What one round of an arm came to."""
    return summary([0.1] * 10, 10 / per_s, hit_rate, 80) | {
        "small_per_s": 2000.0,
        "others": 0.01,
        "cpu_s": [1.0, 2.0, 3.0],
    }


def rows() -> list[dict[str, Any]]:
    arms = [Arm(name, [], 4) for name in ("one", "separate", "cluster")]
    for at, arm in enumerate(arms):
        arm.rounds += [told(per_s + at) for per_s in (10.0, 40.0, 20.0)]
    arms[2].rounds = [one | {"hit_rate": 0.45} for one in arms[2].rounds]
    return [arm.row() for arm in arms]


def test_a_row_is_the_median_of_its_rounds_and_how_far_they_lie_apart() -> None:
    one = rows()[0]
    assert one["requests_per_s"] == 20.0
    assert one["spread"]["requests_per_s"] == pytest.approx(1.5)
    assert one["spread"]["hit_rate"] == 0.0
    assert len(one["rounds"]) == 3


def test_the_cluster_is_held_to_separate_services_and_to_one() -> None:
    found = compared(rows(), [(1.0, 1.2), (2.0, 2.1), (1.0, 1.3)])
    assert found["throughput_of_separate"] == pytest.approx(22 / 21, abs=1e-3)
    assert found["hit_rate_of_one"] == 0.9
    assert found["added_ms"] == pytest.approx(0.2)
    assert found["call_ms"] == [1.0, 1.3]
    about = {"machine": "M", "date": "2026-01-01", "command": "C", "requests": 10}
    sizes = {"pages_each": 1000, "share": 0.3}
    assert "| the cluster | 22 ± 68% |" in cluster_table(about | sizes | found | {"rows": rows()})


def test_what_others_disturb_is_done_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "machine_s", count().__next__)
    done: list[int] = []
    result, seen = undisturbed(NOBODY, lambda: done.append(1))
    assert len(done) == TRIES and seen.is_disturbed
    monkeypatch.setattr(processes, "machine_s", lambda: 1.0)
    result, seen = undisturbed(NOBODY, lambda: len(done))
    assert result == TRIES and not seen.is_disturbed and seen.others == 0.0


def test_what_waking_up_takes_is_told_by_calls_for_which_a_process_slept_less() -> None:
    alone = Watched(1.0, (3.0, 3.0, 3.0), (SMALL_CALLS, 2 * SMALL_CALLS, SMALL_CALLS), 0.0)
    many = Watched(1.0, (1.5, 2.7, 3.3), (0, SMALL_CALLS, SMALL_CALLS - 10), 0.0)
    found = wakes_s(alone, many)
    assert found == pytest.approx([1.5 / SMALL_CALLS, 0.3 / SMALL_CALLS, 0.0])


def test_pools_hold_a_share_of_the_distinct_pages_and_the_longest_prompts() -> None:
    trace = made_up(400)
    assert pages_for(trace, 0.8, 2) == int(0.8 * num_distinct(trace)) // 2
    longest = max(len(one.blocks) for one in trace)
    assert pages_for(trace, 0.01, 2) > 4 * longest
