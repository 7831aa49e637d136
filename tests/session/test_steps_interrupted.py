"""Steps that are interrupted anywhere: their sequences are free, and the next step works at once.

For numpy arrays and torch tensors alike, on engines in host memory.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attnd import AttndError, NewSequence, OutOfPages, Session, TimedOut
from attnd.torch import TorchSession

from tests.session.stepping import HEADS, LAYERS, Served, serve

ERRORS = [KeyboardInterrupt, TimeoutError, asyncio.CancelledError, TimedOut, MemoryError]
LENGTH = 20
AT_ONCE_S = 10.0
"""Far below the 60 s for which a call would wait for a step that was not rolled back."""


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("cpu", tmp_path_factory.mktemp("second")) as running:
        yield running


@pytest.fixture
def other(served: Served) -> Iterator[Session]:
    """A second caller, who holds sequence a with `LENGTH` tokens at every layer."""
    with Session(served.path) as session:
        session.create_sequences([NewSequence("a"), NewSequence("b")])
        for layer in range(LAYERS):
            k = np.ones((2 * LENGTH, 2, 64), np.float32)
            session.append(layer, ["a", "b"], k, k, append_indptr=[0, LENGTH, 2 * LENGTH])
        yield session
        session.delete_sequences(prefix="")
        reply = session.pool()
        assert reply.integrity == "ok" and reply.free == reply.total, reply


@pytest.fixture(params=["numpy", "torch"])
def stepped(request: pytest.FixtureRequest, served: Served) -> Iterator[Any]:
    made = Session(served.path, timeout=20.0) if request.param == "numpy" else served.session()
    with made as session:
        yield session


def connections(session: Any) -> list[Any]:
    """The connections that its steps use."""
    return [lane.connection for lane in session._stepper().lanes]


class Interrupting:
    """A connection's poll that raises `error` in its waits number `at`, counted from 0."""

    def __init__(self, poll: Any, error: type[BaseException], at: set[int]) -> None:
        self.poll_of, self.error, self.at, self.waits = poll, error, at, 0

    def poll(self, timeout_ms: float) -> Any:
        if timeout_ms > 0:
            self.waits += 1
            if self.waits - 1 in self.at:
                raise self.error("interrupted")
        return self.poll_of.poll(timeout_ms)


def interrupted(connection: Any, error: type[BaseException], at: set[int], work: Any) -> int:
    """Does `work` with these waits interrupted; how many waits there were."""
    poll = connection._poll
    connection._poll = watched = Interrupting(poll, error, at)
    try:
        work()
    except (error, AttndError):
        pass
    finally:
        connection._poll = poll
    return watched.waits


def decode(session: Any, slots: Any, name: str = "a", wait: bool = True) -> None:
    with session.step([name], slots) as step:
        for layer in range(LAYERS):
            for array in (step.q(layer), step.k(layer), step.v(layer)):
                array[:] = 1.0
            step.attend(layer)
    if wait:
        step.wait()


def expect_free(session: Any, slots: Any, other: Session) -> None:
    """Another caller may cut a at once, and the next step of the session works at once."""
    other.with_options(deadline=AT_ONCE_S).truncate("a", LENGTH)
    began = time.monotonic()
    decode(session, slots)
    assert time.monotonic() - began < AT_ONCE_S
    assert other.get_sequence("a").length == LENGTH + 1
    other.truncate("a", LENGTH)


@pytest.mark.parametrize("error", ERRORS)
def test_an_interrupt_at_any_wait_of_a_step_leaves_its_sequence_free(
    stepped: Any, other: Session, error: type[BaseException]
) -> None:
    slots = stepped.slots(1, HEADS)
    connection = connections(stepped)[0]
    total = interrupted(connection, error, set(), lambda: decode(stepped, slots))
    assert total >= LAYERS + 1
    other.truncate("a", LENGTH)
    for at in range(total):
        interrupted(connection, error, {at}, lambda: decode(stepped, slots))
        expect_free(stepped, slots, other)


def test_interrupts_while_a_step_is_aborted_leave_its_sequence_free_too(
    stepped: Any, other: Session
) -> None:
    slots = stepped.slots(1, HEADS)
    connection = connections(stepped)[0]
    for first in range(LAYERS + 1):
        for more in ({1}, {1, 2}, {2}, {1, 2, 3, 4}):
            at = {first, *(first + one for one in more)}
            interrupted(connection, KeyboardInterrupt, at, lambda: decode(stepped, slots))
            expect_free(stepped, slots, other)


def test_an_entry_that_times_out_behind_another_caller_is_taken_back(
    served: Served, other: Session
) -> None:
    with TorchSession(served.path, timeout=0.4) as session:
        slots = session.slots(1, HEADS)
        theirs = other.slots(1, HEADS)
        with other.step(["a"], theirs) as held:
            with pytest.raises(TimedOut):
                session.step(["a"], slots).__enter__()
            decode(session, slots, "b")  # works at once, while a is still the other's
            for layer in range(LAYERS):
                held.attend(layer)
        held.wait()
        other.truncate("a", LENGTH)
        expect_free(session, slots, other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_signal_while_a_step_waits_for_its_sequence_takes_it_back(
    stepped: Any, other: Session, error: type[BaseException]
) -> None:
    def ring(number: int, frame: object) -> None:
        raise error("the alarm")

    slots, theirs = stepped.slots(1, HEADS), other.slots(1, HEADS)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with other.step(["a"], theirs) as held:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(error):
                stepped.step(["a"], slots).__enter__()
            decode(stepped, slots, "b")
            for layer in range(LAYERS):
                held.attend(layer)
        held.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    other.truncate("a", LENGTH)
    expect_free(stepped, slots, other)


def test_steps_described_behind_an_interrupted_one_go_with_it(stepped: Any, other: Session) -> None:
    slots = stepped.slots(1, HEADS)
    connection = connections(stepped)[0]

    def two() -> None:
        step = stepped.step(["a"], slots)
        stepped.step(["a"], slots)
        step.__enter__()

    interrupted(connection, KeyboardInterrupt, {0}, two)
    expect_free(stepped, slots, other)


def test_a_step_inside_another_can_be_interrupted_and_the_other_continues(
    stepped: Any, other: Session
) -> None:
    slots = stepped.slots(1, HEADS)
    connection = connections(stepped)[0]
    with stepped.step(["a"], slots) as outer:
        outer.attend(0)
        inner = stepped.step(["b"], slots)
        interrupted(connection, KeyboardInterrupt, {0}, inner.__enter__)
        for layer in range(1, LAYERS):
            outer.attend(layer)
    outer.wait()
    assert other.get_sequence("a").length == LENGTH + 1
    other.truncate("a", LENGTH)
    expect_free(stepped, slots, other)


def test_an_interrupted_layer_does_not_count_as_released(stepped: Any, other: Session) -> None:
    slots = stepped.slots(1, HEADS)
    connection = connections(stepped)[0]
    with pytest.raises((RuntimeError, AttndError)), stepped.step(["a"], slots) as step:
        for layer in range(LAYERS):
            interrupted(connection, KeyboardInterrupt, {0}, lambda at=layer: step.attend(at))
    expect_free(stepped, slots, other)


def test_a_connection_that_broke_is_replaced_for_steps_with_arrays(
    served: Served, other: Session
) -> None:
    with Session(served.path) as session:
        slots = session.slots(1, HEADS)
        decode(session, slots)
        connections(session)[0]._socket.shutdown(2)
        with pytest.raises(AttndError):
            decode(session, slots)
        again = session.slots(1, HEADS)
        decode(session, again)
        with pytest.raises(ValueError, match="make new ones"):
            session.step(["a"], slots)
    other.truncate("a", LENGTH)


def test_a_deleted_step_that_was_not_entered_is_undone(stepped: Any, other: Session) -> None:
    slots = stepped.slots(1, HEADS)
    stepped.step(["a"], slots)
    decode(stepped, slots)
    expect_length(other, LENGTH + 1)


def test_a_deleted_entered_step_is_undone(stepped: Any, other: Session) -> None:
    slots = stepped.slots(1, HEADS)
    stepped.step(["a"], slots).__enter__().attend(0)
    decode(stepped, slots)
    expect_length(other, LENGTH + 1)


def expect_length(other: Session, length: int) -> None:
    assert other.get_sequence("a").length == length
    other.truncate("a", LENGTH)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sockets, amid their making
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_random_moments_leaves_sequences_free_and_the_session_working(
    stepped: Any, other: Session
) -> None:
    def ring(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    generator = np.random.default_rng(7)
    before = signal.signal(signal.SIGALRM, ring)
    caught = broken = 0
    ends = time.monotonic() + 90
    try:
        while caught + broken < 80:
            assert time.monotonic() < ends, (caught, broken)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, 4e-3))
                    slots = stepped.slots(1, HEADS)
                    while True:
                        decode(stepped, slots, wait=False)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught += 1
            except OutOfPages:  # after some thousand decodes
                other.with_options(deadline=5.0).truncate("a", LENGTH)
            except (AttndError, ValueError):  # inside a frame: the session connects again
                broken += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert broken <= caught
    other.with_options(deadline=5.0).truncate("a", LENGTH)
    expect_free(stepped, stepped.slots(1, HEADS), other)
