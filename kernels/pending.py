"""Work on a device: a handle until its result is ready, and the seconds it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True)
class StageSeconds:
    """Seconds a backend spent on one call; for `Server-Timing` and metrics."""

    plan: float = 0.0
    copy_in: float = 0.0
    kernel: float = 0.0
    copy_out: float = 0.0

    @classmethod
    def sum(cls, every: Sequence[StageSeconds]) -> StageSeconds:
        """The seconds of several calls together."""
        return cls(
            sum(one.plan for one in every),
            sum(one.copy_in for one in every),
            sum(one.kernel for one in every),
            sum(one.copy_out for one in every),
        )


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work handed to the device. `result()` waits, is called once, and may raise `DeviceLost`.

    Results belong to the caller. `done` is true once the device has finished; it
    never waits, and may raise `DeviceLost`.
    """

    @property
    def seconds(self) -> StageSeconds: ...

    @property
    def done(self) -> bool: ...

    def result(self) -> T_co: ...


@dataclass(slots=True)
class Done(Generic[T]):
    """A `Pending` that is already there."""

    value: T
    seconds: StageSeconds = field(default_factory=StageSeconds)

    @property
    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value


class Mixed(Generic[T]):
    """Answers of requests that ran apart, in the order asked.

    Request i was of `parts[part_of[i]]`.
    """

    def __init__(self, parts: Sequence[Pending[list[T]]], part_of: Sequence[int]) -> None:
        self._parts, self._part_of = parts, part_of

    @property
    def seconds(self) -> StageSeconds:
        return StageSeconds.sum([part.seconds for part in self._parts])

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def result(self) -> list[T]:
        answers = [iter(part.result()) for part in self._parts]
        return [next(answers[part]) for part in self._part_of]
