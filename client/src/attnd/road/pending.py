"""Replies that threads wait for: of calls, and of steps, which are described, accepted, released to
the engine layer by layer, and ended."""

from __future__ import annotations

import _thread
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnd.errors import ProtocolError, service_error
from attnd.road.areas import PlacedCall
from attnd.wire import frames, images
from attnd.wire.meta import Meta

if TYPE_CHECKING:
    from attnd.road.connection import Connection


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


class StepCall:
    """A step that was sent. Its one answer comes at its end."""

    def __init__(self, connection: Connection, number: int, over: Pending, opened: Pending) -> None:
        self._connection = connection
        self._number = number
        self._over, self._opened = over, opened

    @property
    def is_over(self) -> bool:
        """Whether the answer has been read."""
        return self._over.reply is not None or bool(self._connection.broken)

    @property
    def is_done(self) -> bool:
        """Whether it ended with all its layers done: its tokens are stored."""
        answer = self._over.reply
        return isinstance(answer, Answer) and 200 <= answer.status < 300

    def opened(self, ends: float) -> dict[str, Any]:
        """Wait until the engine accepts it; raises the `ServiceError` of a refusal."""
        content = self._connection.wait(self._opened, ends)
        if isinstance(content, dict):
            return content
        self.result(ends)
        return {}

    def begin_layer(self, layer: int, ends: float) -> Pending | None:
        """Have the engine attend at a layer; for `wait_layer`. None when the step is over."""
        if self._over.reply is not None:
            return None
        frame = frames.layer_frame(frames.READY, self._number, layer)
        return self._connection.begin(frame, frames.DONE, self._number, ends)

    def wait_layer(self, layer: int, begun: Pending | None, ends: float) -> None:
        """Wait for a layer that was begun."""
        if begun is not None and isinstance(self._connection.wait(begun, ends), int):
            return
        self.result(ends)
        raise ProtocolError(f"layer {layer} was released to the engine after the step's end")

    def cancel(self) -> None:
        """Have the engine abort the step, without waiting for it."""
        self._connection.cancel(self._number)

    def cancel_now(self) -> None:
        """`cancel` without waiting for a lock."""
        self._connection.cancel_now(self._number)

    def result(self, ends: float) -> None:
        """Wait until it is over; raises the `ServiceError` that it ended with."""
        answer = self._connection.wait(self._over, ends)
        if not isinstance(answer, Answer):
            raise RuntimeError(f"a step was answered by {answer!r}: this is a bug")
        if not 200 <= answer.status < 300:
            raise service_error(problem_of(answer), Meta())


def problem_of(answer: Answer) -> dict[str, Any]:
    """The problem document inside an answer's frame; raises `ProtocolError`."""
    try:
        return images.decode(np.frombuffer(answer.inline or b"", np.uint8), images.PROBLEM)[0]
    except ValueError as error:
        raise ProtocolError(f"the answer cannot be read: {error}") from error


def request_arena(connection: Connection, arena_bytes: int, ends: float) -> Pending:
    """Request a device arena, or the present one with its flags cleared; for `wait_arena`."""
    frame = frames.json_frame(frames.DEVICE, {"arena_bytes": arena_bytes})
    return connection.begin(frame, frames.DEVICE_ARENA, 0, ends)


def wait_arena(connection: Connection, requested: Pending, ends: float) -> dict[str, Any]:
    """Wait for the description of the requested arena; raises `ServiceError`."""
    description = connection.wait(requested, ends)
    if not isinstance(description, dict):
        raise RuntimeError(f"DEVICE was answered by {description!r}: this is a bug")
    if "problem" in description:
        raise service_error(description["problem"], Meta())
    return description
