"""Turns of long work: what a namespace's pieces cost is counted, however they end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from service.engine.loop.job import Job
from service.engine.loop.long_work import LongWork
from service.engine.work.request import AnswerPlace, Request
from service.engine.work.work import WAIT, SlicedWork, Slices, empty_slice
from service.metrics import Metrics
from service.operations.table import BY_NAME
from service.tenants import OPEN
from tests.engine.rounds import Rounds

PIECE_S = 5e-4
ROUNDS = 40


def job_of(namespace: str, work: SlicedWork, deadline: float = float("inf")) -> Job:
    tenant = replace(OPEN, namespace=namespace)
    request = Request(BY_NAME["pool"], None, {}, AnswerPlace(), tenant)
    return Job(request, None, 0.0, deadline, work=work)


def one_piece(error: Exception | None = None) -> Slices:
    time.sleep(PIECE_S)
    if error is not None:
        raise error
    yield from ()


def undo() -> None:
    time.sleep(PIECE_S)


ENDS: dict[str, Callable[[], Job]] = {
    "done": lambda: job_of("greedy", SlicedWork(one_piece())),
    "failed": lambda: job_of("greedy", SlicedWork(one_piece(OSError("failed")))),
    "late, and undone": lambda: job_of("greedy", SlicedWork(one_piece(), undo), deadline=0.0),
}


@pytest.mark.parametrize("end", ENDS)
def test_work_that_ends_with_its_first_piece_has_no_turns_before_others(end: str) -> None:
    """Else jobs that come again and again keep one waiting that only looks whether it is done."""
    looks = list[float]()

    def waiting() -> Slices:
        while True:
            looks.append(time.monotonic())
            yield replace(empty_slice(), kind=WAIT)

    long = LongWork(Rounds().store, Metrics(), lambda *_: None, lambda *_: None)
    long.begin(job_of("patient", SlicedWork(waiting())))
    for _ in range(ROUNDS):
        long.begin(ENDS[end]())
        long.begin(ENDS[end]())  # the other namespace's line is never empty
        long.run_slice()
    assert len(looks) >= ROUNDS / 4
