"""Work on a device: a handle until its result is ready, and the seconds it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True)
class StageSeconds:
    """Seconds a backend spent on one call; for `Server-Timing` and metrics."""

    plan: float = 0.0
    copy_in: float = 0.0
    kernel: float = 0.0
    copy_out: float = 0.0


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
