"""Answers that are still on their way from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Generic, TypeVar

from kernels.backend import AttentionState, Pending, StageSeconds

T = TypeVar("T")
Guard = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a failure of the device becomes `DeviceLost`."""


class Result(Generic[T]):
    """A `Pending` that waits for an event and then makes its value."""

    def __init__(
        self, guarded: Guard, event: Any, make: Callable[[], T], seconds: StageSeconds
    ) -> None:
        self._guarded, self._event, self._make, self._seconds = guarded, event, make, seconds

    @property
    def seconds(self) -> StageSeconds:
        return self._seconds

    def result(self) -> T:
        with self._guarded():
            start = perf_counter()
            self._event.synchronize()
            self._seconds.kernel += perf_counter() - start
            return self._make()


class First:
    """The only state of a list."""

    def __init__(self, states: Pending[list[AttentionState]]) -> None:
        self._states = states

    @property
    def seconds(self) -> StageSeconds:
        return self._states.seconds

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

    def result(self) -> list[AttentionState]:
        answers = [iter(part.result()) for part in self._parts]
        return [next(answers[int(masked)]) for masked in self._masked]
