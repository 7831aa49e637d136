"""Workers: tasks in several threads, their ends in order in the owner's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from service.tiers.worker import Worker


def test_ends_keep_the_order_of_tasks_that_finish_in_any() -> None:
    gates = [threading.Event() for _ in range(6)]
    ended: list[int] = []

    def task(number: int) -> Callable[[], None]:
        gates[number].wait(30.0)
        return partial(ended.append, number)

    woken = threading.Semaphore(0)
    worker = Worker("w", 2, woken.release, threads=3)
    for number in range(6):
        assert not worker.is_full
        worker.add(partial(task, number))
    assert worker.is_full
    for number in (2, 1):
        gates[number].set()
        assert woken.acquire(timeout=30.0)
    worker.take_done()
    assert ended == []
    gates[0].set()
    assert woken.acquire(timeout=30.0)
    worker.take_done()
    assert (ended, worker.count) == ([0, 1, 2], 3)
    for gate in gates:
        gate.set()
    assert worker.close(time.monotonic() + 30.0)
    worker.take_done()
    assert ended == list(range(6))


def test_a_fatal_failure_is_raised_in_the_owners_thread_and_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(error: Exception) -> Callable[[], None]:
        raise error

    worker = Worker("w", 4, lambda: None, fatal=KeyError)
    worker.add(partial(fails, ValueError("other")))
    worker.add(partial(fails, KeyError("fatal")))
    assert worker.close(time.monotonic() + 30.0)
    with pytest.raises(KeyError, match="fatal"):
        worker.take_done()
    assert "this is a bug" in caplog.text
    assert worker.count == 0


def test_a_task_that_is_polled_runs_in_the_owners_thread_once_it_is_ready() -> None:
    ended: list[str] = []
    ready = threading.Event()
    ran_in: list[str] = []

    def task() -> Callable[[], None]:
        ran_in.append(threading.current_thread().name)
        return partial(ended.append, "polled")

    woken = threading.Semaphore(0)
    worker = Worker("w", 2, woken.release)
    worker.add(task, ready.is_set)
    worker.add(lambda: partial(ended.append, "later"))
    assert woken.acquire(timeout=30.0)
    assert not worker.take_done()
    assert (ended, worker.is_polled, worker.count) == ([], True, 2)
    ready.set()
    assert worker.take_done(1)
    assert (ended, worker.is_polled) == (["polled"], False)
    assert worker.take_done()
    assert (ended, ran_in) == (["polled", "later"], [threading.current_thread().name])


def test_a_worker_that_is_closed_finishes_tasks_that_are_polled() -> None:
    ended: list[str] = []
    worker = Worker("w", 2, lambda: None)
    worker.add(lambda: partial(ended.append, "polled"), lambda: False)
    assert worker.close(time.monotonic() + 30.0)
    assert worker.take_done()
    assert ended == ["polled"]


def test_a_worker_with_a_task_that_does_not_end_is_closed_in_time() -> None:
    gate = threading.Event()
    worker = Worker("w", 2, lambda: None)
    worker.add(lambda: partial(bool, gate.wait(30.0)))
    assert not worker.close(time.monotonic() + 0.05)
    gate.set()
    assert worker.close(time.monotonic() + 30.0)
