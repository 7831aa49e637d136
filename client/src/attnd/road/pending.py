"""`Pending`: a reply that a thread waits for, from the frame that went out to the one that came."""

from __future__ import annotations

import _thread
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from attnd.road.areas import PlacedCall


@dataclass(slots=True, eq=False)
class Answer:
    """An ANSWER frame: `length` bytes of image at the answer's place, or in `inline`.

    `needed` is the capacity in bytes that the answer needs, 0 where it fitted. `seconds` has one
    entry for each of `frames.STAGES`. Not frozen: that costs a microsecond per call.
    """

    status: int
    length: int
    needed: int
    seconds: tuple[float, ...]
    inline: bytes | None


Reply = Answer | int | dict[str, Any]
"""The answer of a call or step, the number of a step whose layer is done, or a JSON message."""


class Pending:
    """A reply under way. The call's `place` stays taken until the engine has finished with it."""

    __slots__ = ("gate", "is_abandoned", "place", "reply")

    def __init__(self, place: PlacedCall | None) -> None:
        self.place = place
        self.is_abandoned = False
        self.reply: Reply | None = None
        self.gate: _thread.LockType | None = None

    def wake(self) -> None:
        """Wake the thread that waits while another one reads."""
        gate = self.gate
        if gate is not None:
            with suppress(RuntimeError):  # woken before
                gate.release()

    def release(self) -> None:
        """The engine has finished with the call's place, or never learned of the call."""
        place = self.place
        if place is not None:
            place.release()
            if self.is_abandoned:
                place.answer.free()
            self.place = None
