"""`Waiting`: a call on its way, from the frame that went out to the answer that came."""

from __future__ import annotations

import _thread
from contextlib import suppress
from typing import Any

from attnd.road.areas import Laid
from attnd.road.frames import Answer


class Waiting:
    """A call without its answer. What is `laid` stays taken until the engine is done with it."""

    __slots__ = ("answer", "gate", "given_up", "laid")

    def __init__(self, laid: Laid | None) -> None:
        self.laid = laid
        self.given_up = False
        self.answer: Answer | int | dict[str, Any] | None = None
        self.gate: _thread.LockType | None = None

    def wake(self) -> None:
        gate = self.gate
        if gate is not None:
            with suppress(RuntimeError):  # it was woken before
                gate.release()

    def settle(self) -> None:
        """The engine is done with what was laid, or never got to know of it."""
        laid = self.laid
        if laid is not None:
            laid.release()
            if self.given_up:
                laid.place.free()
            self.laid = None
