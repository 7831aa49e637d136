"""`Step`: one decode or prefill through many layers, from its description to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self

from attnd.errors import ServiceError
from attnd.road.pending import StepCall
from attnd.steps.layout import A, OfLayers
from attnd.steps.slots import Slots

if TYPE_CHECKING:
    from attnd.steps.lane import Lane


@dataclass(slots=True, eq=False)
class Run(Generic[A]):
    """A step at its lane, from its description until its result was read."""

    call: StepCall
    slots: Slots[A]
    left: set[int]
    """Layers that were not released to the engine yet."""
    is_entered: bool = False
    is_settled: bool = False
    """Whether its end was raised, waited for, or caused by the caller."""
    is_abandoned: bool = False
    """Whether the caller deleted it before its last layer."""

    @property
    def is_attending(self) -> bool:
        return self.is_entered and bool(self.left) and not self.is_settled


class Step(OfLayers[A]):
    """Made by `step` of a session; use it with `with`, in the order of making.

    Entering waits until the engine has accepted the step, and raises its refusal. Where entering
    is interrupted or times out, the step is aborted. Leaving waits for nothing; with an exception,
    or before every layer was released to the engine, it aborts the step.
    """

    def __init__(self, owner: Lane[A], run: Run[A], layers: tuple[int, ...]) -> None:
        self._owner, self._run = owner, run
        self.slots = run.slots
        self.tensors = self.slots.tensors
        self.layers = layers
        self._opened: dict[str, Any] = {}

    def __del__(self) -> None:
        # The collector may call this anywhere: the lane's next use makes sure of it.
        run = getattr(self, "_run", None)
        if run is not None and run.left and not run.is_settled:
            run.is_abandoned = True
            run.call.cancel_now()

    @property
    def call(self) -> StepCall:
        return self._run.call

    @property
    def levels(self) -> int:
        """Cascade levels, once entered; 1 is flat."""
        return int(self._opened.get("levels", 1))

    @property
    def cascade(self) -> bool:
        """Whether KV that sequences share is read once for all of them, once entered."""
        return bool(self._opened.get("cascade", False))

    @property
    def known_len(self) -> tuple[int, ...]:
        """Tokens of each sequence whose ids are known, once entered; empty without token ids."""
        return tuple(self._opened.get("known_len", ()))

    @property
    def committed_len(self) -> tuple[int, ...]:
        """Tokens in committed pages of each when the step was accepted; empty without token ids."""
        return tuple(self._opened.get("committed_len", ()))

    @property
    def sinks(self) -> A:
        return self.slots.sinks

    @property
    def mask(self) -> A:
        return self.slots.mask

    def attend(self, layer: int) -> A:
        """As `Slots.attend`, for a layer of this step; raises ValueError for any other, and the
        second time."""
        if layer not in self._run.left:  # the stream would wait for the layer's end forever
            raise ValueError(
                f"layer {layer} was attended before, or is none of the step's: left are "
                f"{sorted(self._run.left)}"
            )
        o = self.slots.attend(layer)
        self._run.left.discard(layer)
        return o

    def release_to_engine(self) -> None:
        """All layers were released without `attend`: a CUDA graph captured over the slots was
        launched."""
        self._run.left.clear()

    def __enter__(self) -> Self:
        try:
            opened = self._run.call.opened(self._owner.ends())
            if self._run.is_settled:  # cancelled meanwhile, with a step before it
                self._run.call.result(self._owner.ends())
            self._opened, self._run.is_entered = opened, True
        except ServiceError:  # refused: the step is over, and changed nothing
            self._run.is_settled = True
            raise
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if exc is not None:
            self.abort()
        elif self._run.left:
            left = set(self._run.left)
            self.abort()
            raise RuntimeError(
                f"layers {sorted(left)} of the step were not released to the engine, so it was "
                "aborted: attend every layer, or call release_to_engine() after a graph's launch"
            )

    def wait(self) -> None:
        """Wait until the engine has finished it; raises its error (such as `DeadlineExceeded`).

        A wait that is interrupted or times out leaves the step as it is: wait again, or `abort`.
        """
        try:
            self._run.call.result(self._owner.ends())
        except ServiceError:
            if not self._run.is_settled:
                self._owner.drop(self._run)
                self._owner.recover()
            raise
        self._run.is_settled = True

    def abort(self) -> None:
        """Undo the step, and those behind it; returns when the engine has done so.

        Where this is interrupted, the session's next step finishes it.
        """
        self._owner.drop(self._run)
        self._owner.recover()
