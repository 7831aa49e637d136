"""Work cancelled when a part of it cannot be undone, run alone, or met by the engine's end.

The scheduler runs without sockets, round by round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from config.settings import Settings
from kernels.backend import Done
from kernels.lanes.host_lanes import HostLanes
from service.core.prefix.keys import Prefix
from service.core.values import NewSpec
from service.engine.handlers import prefix, truncate
from service.engine.loop import job as jobs
from service.engine.loop import long_work
from service.engine.loop.job import NO_COST, Job, Slice, SlicedWork, Slices
from service.engine.loop.request import AnswerPlace, Request
from service.engine.loop.scheduler import Scheduler
from service.engine.store.pace import DevicePace
from service.engine.store.setup import make_info
from service.engine.store.store import Store
from service.engine.tiers.loads import waiting
from service.errors import NotReady
from service.metrics import Metrics
from service.operations.schema.spec import validate
from service.operations.table import BY_NAME
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import admit, decode, run_round


class Rounds:
    """A scheduler, and the jobs that it has answered."""

    def __init__(self) -> None:
        backend = FakeBackend()
        self.store = Store(backend, DevicePace(4e9, 2e10, 1.0), make_info(backend, Settings()))
        self.answered: list[Job] = []
        self.scheduler = Scheduler(
            self.store, Metrics(), self.answered.append, HostLanes(self.store.backend)
        )

    def job(self, name: str, tensors: Any = None, **fields: Any) -> Job:
        """An operation whose turn comes with the next round."""
        operation = BY_NAME[name]
        checked = validate(operation.fields, fields)
        request = Request(operation, checked, tensors or {}, AnswerPlace())
        now = time.monotonic()
        made = Job(request, None, now, now + 60)
        admit(self.scheduler, made)
        return made

    def finish(self) -> None:
        while self.scheduler.is_busy:
            run_round(self.scheduler)

    def begin(self, slices: Slices, must_finish: bool) -> Job:
        """Long work whose first slice runs."""
        made = self.job("info")
        self.scheduler.queue.pop()
        made.work = SlicedWork(slices, must_finish=lambda: must_finish)
        self.scheduler.long_work.begin(made)
        self.scheduler.long_work.run_slice()
        return made


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    yield Rounds()


def test_a_deletion_of_many_that_has_begun_runs_to_its_end_though_it_is_cancelled(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncate, "MADE_AT_ONCE", 1)
    monkeypatch.setattr(jobs, "TURN_S", 0.0)
    rounds.job("create_sequences", sequences=[{"id": f"s{number}"} for number in range(8)])
    rounds.finish()
    deletion = rounds.job("delete_sequences", prefix="s")
    while rounds.store.tree.num_sequences > 4:
        run_round(rounds.scheduler)
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
    eviction = rounds.job(name, **({"num_pages": 6} if name == "evict" else {}))
    while tree.cache.named.num_cached > 4:
        run_round(rounds.scheduler)
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

    failed = rounds.begin(failing(), must_finish=False)
    other = rounds.job("info")
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

    waited = rounds.begin(slices(), must_finish=True)
    rounds.scheduler.give_up(NotReady("it ends"))
    assert rounds.answered == [waited]
    assert isinstance(waited.error, NotReady) == is_endless
    assert not rounds.scheduler.is_busy


def test_operations_that_run_alone_after_a_failed_launch_are_charged(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds.job("create_sequences", sequences=[{"id": "a"}])
    rounds.finish()
    backend: Any = rounds.store.backend
    attend, charged = backend.attend, list[float]()

    def slow(attends: Any) -> Any:
        time.sleep(0.02)
        return attend(attends)

    monkeypatch.setattr(backend, "attend", slow)
    monkeypatch.setattr(rounds.scheduler.queue, "charge", lambda _, spent: charged.append(spent))
    backend.failures["attend"] = [RuntimeError("a fault of the driver")]
    call = decode("a")
    both = [rounds.job(call.name, call.tensors, **call.fields) for _ in range(2)]
    rounds.finish()
    assert [one.error for one in both] == [None, None]
    assert sum(spent >= 0.02 for spent in charged) == 2
