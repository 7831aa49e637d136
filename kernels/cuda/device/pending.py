"""Answers that are still on their way from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Mixed:
    """Answers of unmasked and masked requests, put back in the order asked."""

    def __init__(
        self, parts: Sequence[Pending[list[AttentionState]]], masked: Sequence[bool]
    ) -> None:
        self._parts, self._masked = parts, masked

    @property
    def seconds(self) -> StageSeconds:
        a, b = (part.seconds for part in self._parts)
        return StageSeconds(
            a.plan + b.plan, a.copy_in + b.copy_in, a.kernel + b.kernel, a.copy_out + b.copy_out
        )

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def result(self) -> list[AttentionState]:
        answers = [iter(part.result()) for part in self._parts]
        return [next(answers[int(masked)]) for masked in self._masked]
