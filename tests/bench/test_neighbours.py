"""A neighbour's decodes beside attacks, in a short form; `python -m bench.neighbours` is the long
one.

On a quiet machine the maximum is far below 150 ms. Before requests were read in turn and turns went
by time used, each of these waits was between 1 and 20 s.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cases.attacks import ATTACKS, Attack
from bench.neighbours import Service, beside, running
from bench.provenance import ROOT

pytestmark = pytest.mark.timing

SECONDS = 1.0
MAX_MS = 900.0
"""What a machine that is busy with other tests may add is generous; a wait of old is longer yet."""
BEGINNINGS = ("S10", "S11 256", "S12 gathers")
CHOSEN = [one for one in ATTACKS if one.name.startswith(BEGINNINGS)]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("one engine", ROOT) as started:
        yield started


@pytest.mark.parametrize("attack", CHOSEN, ids=lambda one: one.name)
def test_a_neighbour_waits_for_no_burst_of_another_namespace(
    attack: Attack, service: Service
) -> None:
    row = beside(service, "session", attack, SECONDS)
    assert not row.failed, row.line()
    assert row.max_ms < MAX_MS, row.line()
    assert row.count > 50, "the victim was at it all the time"


def test_a_service_whose_log_nobody_reads_answers_on() -> None:
    (attack,) = (one for one in ATTACKS if one.reads_no_log)
    with running("one engine", ROOT, reads_log=False) as unread:
        row = beside(unread, "http", attack, 2 * SECONDS)
    assert not row.failed and row.max_ms < MAX_MS, row.line()
