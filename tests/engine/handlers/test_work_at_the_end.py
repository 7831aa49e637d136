"""Work cancelled when a part of it cannot be undone, run alone, or met by the engine's end.

The scheduler runs without sockets, round by round.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kernels.backend import Done
from service.core.keys import Prefix
from service.core.values import NewSpec
from service.engine.handlers import prefix, truncate
from service.engine.loop import long_work
from service.engine.loop.job import Job
from service.engine.tiers.loads import waiting
from service.engine.work import work as jobs
from service.engine.work.work import NO_COST, Slice, SlicedWork, Slices
from service.errors import NotReady
from tests.engine.harness import NewCall, creation, decode
from tests.engine.rounds import Rounds


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def begin(rounds: Rounds, slices: Slices, must_finish: bool = False) -> Job:
    """Long work whose first slice runs."""
    made = rounds.ask(NewCall("info"))
    rounds.scheduler.queue.pop()
    made.work = SlicedWork(slices, must_finish=lambda: must_finish)
    rounds.scheduler.long_work.begin(made)
    rounds.scheduler.long_work.run_slice()
    return made


def test_a_deletion_of_many_that_has_begun_runs_to_its_end_though_it_is_cancelled(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncate, "MAX_DELETED", 1)
    monkeypatch.setattr(truncate, "FREED_AT_ONCE", 1)
    monkeypatch.setattr(jobs, "TURN_S", 0.0)
    rounds.ask(creation(*({"id": f"s{number}"} for number in range(8))))
    rounds.finish()
    deletion = rounds.ask(NewCall("delete_sequences", {"prefix": "s"}))
    while rounds.store.tree.num_sequences > 4:
        rounds.run()
    rounds.scheduler.cancel(deletion)
    rounds.finish()
    assert deletion.error is None and rounds.store.tree.num_sequences == 0
    assert bytes(deletion.request.place.image or b"").count(b'num_deleted\\":8') == 1


@pytest.mark.parametrize("name", ["evict", "clear"])
def test_an_eviction_of_many_that_has_begun_runs_to_its_end_though_it_is_cancelled(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(prefix, "EVICTED_AT_ONCE", 1)
    monkeypatch.setattr(jobs, "TURN_S", 0.0)
    tree, page = rounds.store.tree, rounds.store.geometry.page_size
    tree.create([NewSpec("a")])
    for layer in range(rounds.store.geometry.num_layers):
        tree.extend(layer, ["a"], np.array([6 * page], np.int32))
    tree.commits.commit("a", Prefix(np.arange(6 * page, dtype=np.uint32)))
    tree.free(["a"])
    eviction = rounds.ask(NewCall(name, {"num_pages": 6} if name == "evict" else {}))
    while tree.cache.named.num_cached > 4:
        rounds.run()
    rounds.scheduler.cancel(eviction)
    rounds.finish()
    assert eviction.error is None and tree.cache.named.num_cached == 0


def test_a_slice_that_fails_as_the_engine_ends_is_the_error_of_its_operation_alone(
    rounds: Rounds,
) -> None:
    class Failed(Done[None]):
        done = False  # type: ignore[assignment]

        def result(self) -> None:
            raise RuntimeError("a fault of the device")

    def failing() -> Slices:
        yield Slice(lambda: Failed(None), "turn", NO_COST)

    def long() -> Slices:
        yield waiting()
        yield waiting()

    failed = begin(rounds, failing())
    other = rounds.ask(NewCall("info"))
    rounds.scheduler.queue.pop()
    other.work = SlicedWork(long())
    rounds.scheduler.long_work.begin(other)
    rounds.scheduler.give_up(NotReady("it ends"))
    assert rounds.answered == [failed, other]
    assert [type(one.error).__name__ for one in rounds.answered] == ["Internal", "NotReady"]


@pytest.mark.parametrize("is_endless", [False, True])
def test_work_that_cannot_be_undone_and_waits_is_waited_for_briefly_as_the_engine_ends(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, is_endless: bool
) -> None:
    monkeypatch.setattr(long_work, "LAST_WAIT_S", 0.05)
    advanced: list[int] = []

    class Loading:
        def advance(self) -> None:
            advanced.append(0)

    rounds.store.loading = Loading()  # type: ignore[assignment]

    def slices() -> Slices:
        while is_endless or len(advanced) < 3:
            yield waiting()

    waited = begin(rounds, slices(), must_finish=True)
    rounds.scheduler.give_up(NotReady("it ends"))
    assert rounds.answered == [waited]
    assert isinstance(waited.error, NotReady) == is_endless
    assert not rounds.scheduler.is_busy


def test_operations_that_run_alone_after_a_failed_launch_are_charged(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only while a launch runs, and each launch takes a second."""
    now, charged = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rounds.ask(creation({"id": "a"}))
    rounds.finish()
    backend = rounds.backend
    attend = backend.attend

    def slow(attends: Any) -> Any:
        now[0] += 1.0
        return attend(attends)

    monkeypatch.setattr(backend, "attend", slow)
    monkeypatch.setattr(rounds.scheduler.queue, "charge", lambda _, spent: charged.append(spent))
    backend.failures["attend"] = [RuntimeError("a fault of the driver")]
    both = [rounds.ask(decode("a")) for _ in range(2)]
    rounds.finish()
    assert [one.error for one in both] == [None, None]
    assert sorted(charged)[-2:] == [1.0, 1.0] and sum(charged) == 2.0
