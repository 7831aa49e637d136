"""Open steps on lanes that a test moves by hand: waiting, progress, and undo by aborts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernels.lanes.lane import Owner, StepWork
from service.core.values import NewSpec
from service.engine.handlers.steps import StepPlace
from service.engine.loop.job import Job
from service.engine.loop.session_lanes import SessionLanes
from service.engine.work.request import AnswerPlace, Request
from service.engine.work.work import Counts, OpenedStep
from service.errors import Forbidden
from service.operations.schema.spec import validate
from service.operations.step import STEP, StepFields
from service.road.engine_end.calls import STEP_ROUTE, ArenaRequest, Call
from service.road.engine_end.session import Session
from service.tenants import tenant_of
from tests.engine.fake_backend import GEOMETRY
from tests.engine.harness import get, truncate
from tests.engine.rounds import Rounds

SLOT = {"q": 4096, "k": 8192, "v": 12288, "o": 16384, "lse": 20480}


@dataclass(eq=False)
class HandRun:
    """Done when the test says so, or at the second release: a stream takes its time."""

    work: StepWork
    done: bool = False
    released: int = 0
    has_ready: bool = False

    def advance(self) -> int | None:
        raise AssertionError("no layer is ready")

    def layer(self, layer: int) -> None:
        raise ValueError("flags say so")

    def release(self) -> None:
        self.released += 1
        self.done = self.done or self.released > 1


@dataclass(eq=False)
class HandLane:
    arena_bytes: int = 2**16
    access: dict[str, Any] = field(default_factory=dict)
    runs: list[HandRun] = field(default_factory=list)
    freed: int = 0

    def begin(self, work: StepWork) -> HandRun:
        self.runs.append(HandRun(work))
        return self.runs[-1]

    def unblock_caller(self) -> None:
        self.freed += 1

    def clear(self) -> None: ...


class HandLanes:
    deep = 2
    polled = True

    def __init__(self) -> None:
        self.owners: list[Owner] = []

    def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> HandLane:
        self.owners.append(owner)
        return HandLane()

    def close(self, lane: object) -> None: ...

    def unpin(self, memory: memoryview) -> None: ...


class Rig(Rounds):
    """A scheduler over two sequences of four tokens, and its answers."""

    def __init__(self) -> None:
        super().__init__(HandLanes(), slice_s=0.02)
        self.store.tree.create([NewSpec("a"), NewSpec("b")])
        self.opened: list[dict[str, Any]] = []
        self.layers_done: list[int] = []

    def step(self, lane: HandLane, *names: str, **fields: Any) -> Job:
        layers = list(range(GEOMETRY.num_layers))
        given: dict[str, Any] = {"op": "decode", "layers": layers, "slots": [SLOT]}
        given |= {"sequences": list(names)} if names else {}
        heads = {"num_qo_heads": GEOMETRY.num_kv_heads, "dtype": "F32"}
        request = Request(STEP, validate(StepFields, given | heads | fields), {}, AnswerPlace())
        request.step = StepPlace(lane, self.opened.append, self.layers_done.append)
        job = self.admit(request)
        self.run()
        return job

    @property
    def lengths(self) -> list[int]:
        return [self.store.tree.describe(name).length for name in "ab"]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_step_is_accepted_at_once_and_answered_when_its_lane_is_through(rig: Rig) -> None:
    lane = HandLane()
    job = rig.step(lane, "a", "b")
    assert rig.opened == [{"levels": 1, "cascade": False}]
    assert (rig.answered, rig.lengths) == ([], [1, 1])
    lane.runs[0].done = True
    rig.run(3)
    assert rig.answered == [job] and job.error is None
    assert not rig.scheduler.is_busy
    appended = 2 * GEOMETRY.num_layers
    assert isinstance(job.work, OpenedStep)
    assert job.work.counts == Counts(appended, appended * GEOMETRY.token_bytes, 0, "flat")


def test_an_echo_is_waited_for_though_it_has_no_sequence(rig: Rig) -> None:
    lane = HandLane()
    job = rig.step(lane, op="echo")
    assert rig.scheduler.is_busy, "the lane is not polled"
    lane.runs[0].done = True
    rig.run(3)
    assert rig.answered == [job] and job.error is None
    assert not rig.scheduler.is_busy


def test_two_steps_may_be_on_a_lane_and_a_third_waits(rig: Rig) -> None:
    lane = HandLane()
    jobs = [rig.step(lane, "a") for _ in range(3)]
    assert (len(lane.runs), rig.lengths) == (2, [2, 0])
    lane.runs[0].done = True
    rig.run(3)
    assert (len(lane.runs), rig.lengths) == (3, [3, 0])
    for run in lane.runs:
        run.done = True
    rig.run(3)
    assert rig.answered == jobs


def test_another_lane_waits_for_the_sequences_and_works_on_others(rig: Rig) -> None:
    mine, theirs = HandLane(), HandLane()
    rig.step(mine, "a")
    held, free = rig.step(theirs, "a"), rig.step(theirs, "b")
    assert [run.work.rows for run in theirs.runs] == [1]
    cut = rig.ask(truncate("a", 0))
    rig.run()
    assert rig.answered == []
    theirs.runs[0].done = True
    rig.run(3)
    assert rig.answered == [free]
    mine.runs[0].done = True
    rig.run(3)
    assert len(theirs.runs) == 2, "the held step follows the first"
    theirs.runs[1].done = True
    rig.run(3)
    assert [one.error for one in rig.answered] == [None] * 4
    assert rig.answered[-2:] == [held, cut], "the truncation came after the held step"
    assert rig.lengths == [0, 1]


def test_a_deadline_aborts_the_step_and_those_behind_it_latest_first(rig: Rig) -> None:
    lane = HandLane()
    first, second = rig.step(lane, "a", "b"), rig.step(lane, "b")
    waiting = rig.ask(get("a"))
    rig.run()
    first.deadline = time.monotonic() - 1.0
    rig.run()
    assert rig.answered == [] and [run.released for run in lane.runs] == [1, 1]
    rig.run(3)
    codes = [type(one.error).__name__ for one in rig.answered]
    assert rig.answered == [second, first, waiting]
    assert codes == ["Cancelled", "DeadlineExceeded", "NoneType"]
    assert rig.lengths == [0, 0]
    rig.store.tree.check_integrity()


def test_the_caller_of_an_aborted_step_is_freed_until_it_starts_afresh(rig: Rig) -> None:
    lane = HandLane()
    job = rig.step(lane, "a")
    rig.scheduler.cancel(job)
    rig.run(3)
    assert type(job.error).__name__ == "Cancelled"
    time.sleep(0.01)
    rig.run()
    assert lane.freed > 0
    refused = rig.step(lane, "a")
    assert "DEVICE" in str(refused.error)
    rig.scheduler.steps.forget(lane)
    rig.step(lane, "a")
    assert (len(lane.runs), rig.lengths) == (2, [1, 0])


def test_a_step_whose_turn_has_not_come_is_taken_back_alone(rig: Rig) -> None:
    lane = HandLane()
    rig.step(lane, "a")
    waiting = rig.step(HandLane(), "a")
    rig.scheduler.cancel(waiting)
    assert rig.answered == [waiting] and rig.lengths == [1, 0]
    lane.runs[0].done = True
    rig.run(3)
    assert len(rig.answered) == 2


def test_a_step_that_its_lane_refuses_is_undone(rig: Rig) -> None:
    lane = HandLane()
    lane.begin = refuse  # type: ignore[method-assign, assignment]
    job = rig.step(lane, "a")
    assert job.error is not None and rig.lengths == [0, 0]


def refuse(work: StepWork) -> HandRun:
    from kernels.backend import Unsupported

    raise Unsupported("dtype", str(work.dtype), "another one")


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "lse", "flags"])
def test_places_outside_the_arena_are_refused(rig: Rig, name: str) -> None:
    far = {"slots": [SLOT | {name: 2**16}]} if name != "flags" else {"flags": 2**16}
    job = rig.step(HandLane(), "a", **far)
    assert "arena" in str(job.error) and rig.lengths == [0, 0]


def test_everything_is_given_up_undone(rig: Rig) -> None:
    lane = HandLane()
    jobs = [rig.step(lane, "a"), rig.step(lane, "a", "b")]
    rig.scheduler.give_up(RuntimeError("the end"))
    assert sorted(map(id, rig.answered)) == sorted(map(id, jobs))
    assert rig.lengths == [0, 0] and not rig.scheduler.is_busy


class PieceRun(HandRun):
    """Each ready layer takes the engine `pieces` pieces of 20 ms."""

    pieces = 3

    def __init__(self, work: StepWork) -> None:
        super().__init__(work)
        self.ready: list[int] = []
        self.left = self.pieces

    def layer(self, layer: int) -> None:
        self.ready.append(layer)
        self.has_ready = True

    def advance(self) -> int | None:
        time.sleep(0.02)
        self.left -= 1
        if self.left:
            return None
        self.left, layer = self.pieces, self.ready.pop(0)
        self.has_ready = bool(self.ready)
        return layer


class PieceLane(HandLane):
    def begin(self, work: StepWork) -> HandRun:
        self.runs.append(PieceRun(work))
        return self.runs[-1]


def test_layers_that_the_engine_runs_take_a_piece_a_round_and_are_charged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(rig.scheduler.queue, "charge", lambda _, spent: charged.append(spent))
    job = rig.step(PieceLane(), "a")
    for layer in (0, 1):
        rig.scheduler.steps.layer(job, layer)
    del charged[:]
    for number in range(1, 2 * PieceRun.pieces + 1):
        rig.run(1)
        assert len(charged) == number and charged[-1] >= 0.02
        assert rig.layers_done == [0, 1][: number // PieceRun.pieces]
    assert not rig.scheduler.steps.num_ready


def test_a_layer_that_fails_aborts_its_step_alone(rig: Rig) -> None:
    lane, other = PieceLane(), PieceLane()
    jobs = rig.step(lane, "a"), rig.step(other, "b")
    for job in jobs:
        rig.scheduler.steps.layer(job, 0)

    def fail() -> None:
        raise RuntimeError("on purpose")

    setattr(lane.runs[0], "advance", fail)  # noqa: B010
    rig.run(2 * PieceRun.pieces)
    assert [type(job.error).__name__ for job in rig.answered] == ["Internal"]
    assert rig.layers_done == [0] and rig.lengths == [0, 1]


class FakeSession:
    """As much of a session as its lane needs."""

    def __init__(self) -> None:
        self.arena = SimpleNamespace(memory=memoryview(bytearray(2**16)), size=2**16)
        self.num_devices = 1
        self.pid, self.live, self.closed, self.ended = 1, dict[int, Call](), False, ""
        self.uid, self.tenants = 1000, {0: tenant_of("team", ["read"])}
        self.sent: list[bytes] = []
        self.send = self.sent.append


@pytest.mark.parametrize("scopes", [["read"], ["append"], ["read", "append"]], ids=str)
def test_a_step_stays_in_its_keys_namespace_and_scopes(rig: Rig, scopes: list[Any]) -> None:
    made = HandLanes()
    looked_after = list[Session]()
    lanes = SessionLanes(made, rig.scheduler.steps, rig.store.info, looked_after.append)
    session: Any = FakeSession()
    lanes.request_arena(ArenaRequest(session, 2**16))
    assert len(session.sent) == 1
    assert [(owner.namespace, owner.uid) for owner in made.owners] == [("team", 1000)]
    fields = {"op": "decode", "sequences": ["a"], "layers": [0], "slots": [SLOT], "num_qo_heads": 2}
    tenant = tenant_of("team", scopes)

    def read(**more: Any) -> Any:
        described = memoryview(json.dumps(fields | more).encode())
        nowhere = memoryview(b"")
        call = Call(session, 1, STEP_ROUTE, 1.0, described, nowhere, b"", tenant, (0, 0, 0, 0))
        return lanes.read(STEP, call)

    if "read" in scopes:
        assert read(append=False).fields.ids == ("team/a",)
    if scopes == ["read", "append"]:
        request = read()
        assert request.fields.ids == ("team/a",)
        request.step.send_opened({})
        request.step.send_done(0)
        assert len(session.sent) == len(looked_after) == 3, "its socket can take a part of each"
    else:
        with pytest.raises(Forbidden):
            read()


def test_arenas_that_take_long_to_open_are_opened_over_rounds(rig: Rig) -> None:
    class SlowLanes(HandLanes):
        def open(self, arena: memoryview, arena_bytes: int, owner: Owner) -> HandLane:
            time.sleep(0.003)
            super().open(arena, arena_bytes, owner)
            return HandLane(0)

    made, count = SlowLanes(), 12
    lanes = SessionLanes(made, rig.scheduler.steps, rig.store.info, lambda _: None)
    greedy, other = FakeSession(), FakeSession()
    greedy.num_devices = count
    for session in [greedy] * count + [other]:
        lanes.request_arena(ArenaRequest(cast(Session, session), 2**16))
    rounds = 0
    while lanes.is_behind:
        rounds, before = rounds + 1, len(made.owners)
        lanes.serve()
        assert 0 < len(made.owners) - before <= 2
        assert other.sent or rounds < 3
    assert rounds > 3
    assert (len(greedy.sent), greedy.num_devices, len(other.sent)) == (count, 0, 1)
