"""Answers that are still on their way from the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Generic, TypeVar

from kernels.backend import AttentionState, Pending, StageSeconds
from kernels.cuda.device.transfer import passed

T = TypeVar("T")
Guard = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a failure of the device becomes `DeviceLost`."""


class Result(Generic[T]):
    """A `Pending` that waits for an event and then makes its value.

    Its kernel seconds are those from launch until the event was seen to have passed.
    """

    def __init__(
        self, guarded: Guard, event: Any, make: Callable[[], T], seconds: StageSeconds
    ) -> None:
        self._guarded, self._event, self._make, self._seconds = guarded, event, make, seconds
        self._launched = perf_counter()
        self._done = False

    @property
    def seconds(self) -> StageSeconds:
        return self._seconds

    @property
    def done(self) -> bool:
        if not self._done:
            with self._guarded():
                if passed(self._event):
                    self._note()
        return self._done

    def result(self) -> T:
        with self._guarded():
            if not self._done:
                self._event.synchronize()
                self._note()
            start = perf_counter()
            value = self._make()
            self._seconds.copy_out += perf_counter() - start
            return value

    def _note(self) -> None:
        self._done = True
        self._seconds.kernel += perf_counter() - self._launched


class First:
    """The only state of a list."""

    def __init__(self, states: Pending[list[AttentionState]]) -> None:
        self._states = states

    @property
    def seconds(self) -> StageSeconds:
        return self._states.seconds

    @property
    def done(self) -> bool:
        return self._states.done

    def result(self) -> AttentionState:
        return self._states.result()[0]
