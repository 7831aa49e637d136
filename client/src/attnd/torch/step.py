"""`Step`: one decode or prefill through many layers, from its description to its end."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from attnd.errors import AttndError, ServiceError
from attnd.road.stepping import StepCall
from attnd.torch.slots import Slots


class Owner(Protocol):
    """What a step needs of its session."""

    def ends(self) -> float:
        """When waiting for the engine is given up, by `time.monotonic()`."""
        ...

    def enter(self, step: Step) -> None:
        """From now on `attend` is this step's."""
        ...

    def recover(self) -> None:
        """After an abort: wait for the stream, and have the flags cleared."""
        ...

    def check(self) -> None:
        """Raises what a step ended with that nobody has been told of."""
        ...


class Step:
    """Made by `TorchSession.step`; use it with `with`, in the order of making.

    Entering waits until the engine has accepted the step, and raises its refusal. Leaving waits for
    nothing; with an exception, or before every layer was handed over, it aborts the step.
    """

    def __init__(self, owner: Owner, call: StepCall, slots: Slots, layers: tuple[int, ...]) -> None:
        self._owner, self._call = owner, call
        self.slots = slots
        self.layers = layers
        self._opened: dict[str, Any] = {}
        self._left: set[int] = set(layers)
        self.told = False
        """Whether the step's end has been raised or waited for."""

    @property
    def call(self) -> StepCall:
        return self._call

    @property
    def levels(self) -> int:
        """Cascade levels, once entered; 1 is flat."""
        return int(self._opened.get("levels", 1))

    @property
    def cascade(self) -> bool:
        """Whether KV that sequences share is read once for all of them, once entered."""
        return bool(self._opened.get("cascade", False))

    def q(self, layer: int) -> torch.Tensor:
        return self.slots.q(layer)

    def k(self, layer: int) -> torch.Tensor:
        return self.slots.k(layer)

    def v(self, layer: int) -> torch.Tensor:
        return self.slots.v(layer)

    def o(self, layer: int) -> torch.Tensor:
        return self.slots.o(layer)

    def lse(self, layer: int) -> torch.Tensor:
        return self.slots.lse(layer)

    def attend(self, layer: int) -> torch.Tensor:
        """As `Slots.attend`, for a layer of this step."""
        self._left.discard(layer)
        return self.slots.attend(layer)

    def handed_over(self) -> None:
        """All layers were handed over without `attend`: a CUDA graph captured over the slots was
        launched."""
        self._left.clear()

    def __enter__(self) -> Self:
        try:
            self._opened = self._call.opened(self._owner.ends())
        except BaseException:
            self.told = True
            raise
        self._owner.enter(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.abort()
        elif self._left:
            self.abort()
            raise not_handed_over(self._left)

    def wait(self) -> None:
        """Wait until the engine is done with it; raises what it ended with (`DeadlineExceeded`)."""
        try:
            self._call.result(self._owner.ends())
        except AttndError:
            if not self.told:
                self.told = True
                self._owner.recover()
            raise
        self.told = True

    def abort(self) -> None:
        """As if it had never been; returns when the engine has undone it, and those behind it."""
        self._call.cancel()
        self.told = True
        with suppress(ServiceError):  # it may have ended by itself meanwhile
            self._call.result(self._owner.ends())
        self._owner.recover()


def not_handed_over(layers: set[int]) -> RuntimeError:
    """The error of a step that was left before these layers."""
    return RuntimeError(
        f"layers {sorted(layers)} of the step were not handed over, so it was aborted: attend "
        "every layer, or say handed_over() where a graph does"
    )
