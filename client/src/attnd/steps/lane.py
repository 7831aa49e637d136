"""`Lane`: an arena of one connection, and the steps that run in it one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic

from attnd.errors import AttndError, ServiceError
from attnd.road.connection import Connection
from attnd.road.pending import Pending, request_arena, wait_arena
from attnd.steps.layout import A
from attnd.steps.slots import Arena, Room, Slots
from attnd.steps.step import Run, Step


class Lane(Generic[A]):
    """For one thread. After an interrupted step, the lane's next use first waits for its end."""

    def __init__(
        self,
        connection: Connection,
        num_layers: int,
        timeout_s: float,
        make_arena: Callable[[Lane[A], int], Arena[A]],
    ) -> None:
        self.connection = connection
        self.room: Room[A] | None = None
        self._num_layers, self._timeout_s, self._make_arena = num_layers, timeout_s, make_arena
        self._runs: deque[Run[A]] = deque()
        self._requested: Pending | None = None
        self._has_cancelled = False
        """Whether steps were cancelled since the flags were cleared last."""

    @property
    def is_idle(self) -> bool:
        """Whether no slots of the arena are in use, and no step is open."""
        return not self._runs and (self.room is None or self.room.is_free)

    def ends(self) -> float:
        """End of the timeout for the engine, by `time.monotonic()`."""
        return time.monotonic() + self._timeout_s

    def open(self, size: int) -> Room[A]:
        """An arena of at least `size` bytes in place of the last one."""
        if self.room is not None:
            self.room.arena.close()
            self.room = None
        self.room = Room(self._make_arena(self, size), self._num_layers)
        return self.room

    def request_arena(self, size: int) -> dict[str, Any]:
        """An arena of at least `size` bytes, or the one there is with its flags cleared."""
        if self._requested is not None:  # an earlier wait was interrupted
            with suppress(ServiceError):
                wait_arena(self.connection, self._requested, self.ends())
        with self._whole():
            self._requested = request_arena(self.connection, size, self.ends())
        description = wait_arena(self.connection, self._requested, self.ends())
        self._requested = None
        return description

    def send(
        self, description: bytes, slots: Slots[A], layers: Sequence[int], deadline_us: int
    ) -> Step[A]:
        """Describes a step to the engine, without waiting for anything."""
        with self._whole():
            call = self.connection.send_step(description, deadline_us, self.ends())
            run = Run(call, slots, set(layers))
            self._runs.append(run)
        return Step(self, run, tuple(layers))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Ends the connection where the block is interrupted: the engine's state is unknown
        then."""
        try:
            yield
        except AttndError:
            raise
        except BaseException:
            self.connection.abandon("a step was interrupted while its frame was sent")
            raise

    def await_opening(self) -> None:
        """Waits until the engine has accepted or refused every open step."""
        for run in self._runs:
            with suppress(ServiceError):  # raised where the step is entered
                run.call.opened(self.ends())

    def begin_layer(self, layer: int) -> Callable[[], None]:
        """Begins a layer in host memory; returns a function that waits for it."""
        run = next((run for run in self._runs if run.is_attending), None)
        if run is None:
            raise RuntimeError("attend outside a step: enter one with `with session.step(...)`")
        call = run.call
        begun = call.begin_layer(layer, self.ends())
        return lambda: call.wait_layer(layer, begun, self.ends())

    def check(self) -> None:
        """Forgets steps that are over, and raises the first of their errors not raised before."""
        for run in [run for run in self._runs if run.is_abandoned and not run.is_settled]:
            self.drop(run)
        if self._has_cancelled:
            self._cancel(lambda run: run.is_settled)  # the first CANCEL may not have been sent
            self.recover()
        self.connection.is_open()  # reads frames that have arrived
        failed: AttndError | None = None
        while self._runs and self._runs[0].call.is_over:
            run = self._runs.popleft()
            if run.is_settled:
                continue
            run.is_settled = True
            try:
                run.call.result(self.ends())
            except AttndError as error:
                failed = failed or error
                self._has_cancelled = True
        if failed is not None:
            self._cancel(lambda run: not run.is_entered)
            self.recover()
            raise failed

    def drop(self, run: Run[A]) -> None:
        """Cancels a step, the steps behind it, and those before it that were not entered."""
        if run not in self._runs:
            return
        self._has_cancelled = True
        behind = list(self._runs)[self._runs.index(run) :]
        self._cancel(lambda one: one in behind or not one.is_entered)

    def _cancel(self, which: Callable[[Run[A]], bool]) -> None:
        for run in self._runs:
            if which(run):
                run.is_settled = True
                run.call.cancel()

    def recover(self) -> None:
        """Waits until cancelled steps are over, and has the flags cleared.

        An earlier step that is still being attended comes first: the lane's next use tries again.
        """
        if not self._has_cancelled or any(run.is_attending for run in self._runs):
            return
        if not self.connection.broken:
            for run in self._runs:
                with suppress(ServiceError):  # `check` and `wait` raise its error
                    run.call.result(self.ends())
            if self.room is not None:
                self.room.arena.settle()
                self.request_arena(self.room.arena.size)
        self._has_cancelled = False

    def close(self) -> None:
        if self.room is not None:
            self.room.arena.close()
