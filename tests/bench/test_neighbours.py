"""A victim's decodes beside attacks of another namespace: a short form of bench.neighbours.

On a quiet machine the maximum is far below 150 ms. Without fair turns each of these waits was
between 1 and 20 s.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cases.attacks import ATTACKS, Attack
from bench.neighbours import Service, beside, running
from bench.report.provenance import ROOT

pytestmark = pytest.mark.timing

SECONDS = 1.0
MAX_MS = 900.0
"""Generous for a machine that is busy with other tests; an unfair wait is still longer."""
BEGINNINGS = ("S10", "S11 256", "S12 gathers")
CHOSEN = [one for one in ATTACKS if one.name.startswith(BEGINNINGS)]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("one engine", ROOT) as started:
        yield started


@pytest.mark.parametrize("attack", CHOSEN, ids=lambda one: one.name)
def test_a_namespace_does_not_wait_for_bursts_of_another_one(
    attack: Attack, service: Service
) -> None:
    row = beside(service, "session", attack, SECONDS)
    assert not row.failed, row
    assert row.max_ms < MAX_MS, row
    assert row.count > 50, "the victim decoded all the time"


def test_a_service_without_a_reader_of_its_log_keeps_answering() -> None:
    (attack,) = (one for one in ATTACKS if one.reads_no_log)
    with running("one engine", ROOT, attack) as unread:
        row = beside(unread, "http", attack, 2 * SECONDS)
    assert not row.failed and row.max_ms < MAX_MS, row
