"""`Meta` of an answer: its request id, and the seconds of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Timings(Mapping[str, float]):
    """Seconds by stage. `read` makes them from `given`, the answer's own form, when they are asked
    for."""

    __slots__ = ("given", "read")

    def __init__(self, read: Callable[[Any], dict[str, float]], given: object) -> None:
        self.read, self.given = read, given

    def __getitem__(self, stage: str) -> float:
        return self.read(self.given)[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read(self.given))

    def __len__(self) -> int:
        return len(self.read(self.given))

    def __repr__(self) -> str:
        return repr(self.read(self.given))


@dataclass(frozen=True, slots=True)
class Meta:
    """The request id of an answer, and `timings`, seconds per stage (`Server-Timing`)."""

    request_id: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)
    retry_after_s: float | None = None


NO_META = Meta()
