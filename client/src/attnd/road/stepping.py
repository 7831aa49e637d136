"""A step at the caller's end: described, accepted, handed over layer by layer, and over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnd.errors import ProtocolError, service_error
from attnd.results import Meta
from attnd.road import frames
from attnd.road.frames import Answer
from attnd.road.waiting import Waiting
from attnd.wire import images

if TYPE_CHECKING:
    from attnd.road.connection import Connection


class StepCall:
    """A step that has been sent; it has one answer, when it is over."""

    def __init__(self, connection: Connection, number: int, over: Waiting, opened: Waiting) -> None:
        self._connection = connection
        self._number = number
        self._over, self._opened = over, opened

    @property
    def is_over(self) -> bool:
        """Whether the answer has been read off the socket."""
        return self._over.answer is not None or bool(self._connection.broken)

    @property
    def is_done(self) -> bool:
        """Whether it ended with all its layers done: its tokens are stored."""
        answer = self._over.answer
        return isinstance(answer, Answer) and 200 <= answer.status < 300

    def opened(self, ends: float) -> dict[str, Any]:
        """Wait until the engine has accepted it; raises `ServiceError` when it refuses."""
        told = self._connection.wait(self._opened, ends)
        if isinstance(told, dict):
            return told
        self.result(ends)
        return {}

    def run_layer(self, layer: int, ends: float) -> None:
        """Have the engine attend at a layer, in host memory, and wait for it."""
        self.wait_layer(layer, self.begin_layer(layer, ends), ends)

    def begin_layer(self, layer: int, ends: float) -> Waiting | None:
        """Have the engine attend at a layer; for `wait_layer`."""
        if self._over.answer is not None:
            return None
        frame = frames.ready_frame(self._number, layer)
        return self._connection.begin(frame, frames.DONE, self._number, ends)

    def wait_layer(self, layer: int, begun: Waiting | None, ends: float) -> None:
        """Wait for a layer that was begun."""
        if begun is not None and isinstance(self._connection.wait(begun, ends), int):
            return
        self.result(ends)
        raise ProtocolError(f"layer {layer} was handed over after the step's end")

    def cancel(self) -> None:
        self._connection.cancel(self._number)

    def cancel_now(self) -> None:
        """`cancel` where it does not wait for anything."""
        self._connection.cancel_now(self._number)

    def result(self, ends: float) -> None:
        """Wait until it is over; raises the `ServiceError` that it ended with."""
        answer = self._connection.wait(self._over, ends)
        if not isinstance(answer, Answer):
            raise RuntimeError(f"a step was answered by {answer!r}: this is a bug")
        if not 200 <= answer.status < 300:
            raise service_error(problem_of(answer), Meta())


def problem_of(answer: Answer) -> dict[str, Any]:
    """The problem document inside an answer's frame."""
    try:
        return images.decode(np.frombuffer(bytearray(answer.inline or b""), np.uint8), "problem")[0]
    except ValueError as error:
        raise ProtocolError(f"the answer to a step cannot be read: {error}") from error


def ask_arena(connection: Connection, arena_bytes: int, ends: float) -> Waiting:
    """Ask for a device arena, or the one there is with its flags cleared; for `arena_told`."""
    frame = frames.json_frame(frames.DEVICE, {"arena_bytes": arena_bytes})
    return connection.begin(frame, frames.DEVICE_ARENA, 0, ends)


def arena_told(connection: Connection, asked: Waiting, ends: float) -> dict[str, Any]:
    """Wait for the arena that was asked for; raises `ServiceError`."""
    told = connection.wait(asked, ends)
    if not isinstance(told, dict):
        raise RuntimeError(f"DEVICE was answered by {told!r}: this is a bug")
    if "problem" in told:
        raise service_error(told["problem"], Meta())
    return told
