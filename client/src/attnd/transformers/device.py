"""Forwards over device memory: one step of a `TorchSession` each."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

import torch

from attnd.errors import AttndError
from attnd.session import Session
from attnd.transformers.roads import Scoring, Step, lay, spread

if TYPE_CHECKING:
    from attnd.steps.slots import Slots
    from attnd.steps.step import Step as SessionStep
    from attnd.torch import TorchSession

    TorchSlots = Slots[torch.Tensor]
    TorchStep = SessionStep[torch.Tensor]


DEADLINE_S: Final = 600.0
"""Of a forward through all layers, which delays no other caller: its sequences are its own."""


class Running:
    """A step of the cache and the session's own, which is entered.

    `release` waits for its end and frees the memory of its slots; `failed` is then its error.
    """

    __slots__ = ("__weakref__", "entered", "failed", "step")

    def __init__(self, step: Step, entered: TorchStep) -> None:
        self.step = step
        self.entered: TorchStep | None = entered
        self.failed: AttndError | None = None

    @property
    def open(self) -> TorchStep:
        if self.entered is None:
            raise RuntimeError("the step was released before its end: this is a bug")
        return self.entered

    def release(self) -> None:
        """Wait until it is over."""
        entered, self.entered = self.entered, None
        try:
            if entered is not None:
                entered.wait()
        except AttndError as error:
            self.failed = error


class Recording:
    """Attends the layers of a decode like `step`, whatever its sequences, over `slots`.

    It waits for nothing on the host, so that a CUDA graph may be captured over it. A step must be
    open when it runs. `slots` None: their memory has been given back.
    """

    __slots__ = ("_road", "slots", "step")

    def __init__(self, road: DeviceRoad, step: Step, slots: TorchSlots) -> None:
        self._road = road
        self.step = step
        self.slots: TorchSlots | None = slots

    def attend(self, layer: int, qkv: tuple[torch.Tensor, ...], scoring: Scoring) -> torch.Tensor:
        if self.slots is None:
            raise RuntimeError("the memory of a recording was freed: this is a bug")
        self._road.check(layer, self.step.scoring, scoring)
        return spread(hand_over(self.slots, layer, qkv, self.step, scoring), self.step, qkv[0])


class DeviceRoad:
    """One step of the session a forward, described before its first layer runs.

    The step must say how every layer attends: scale and soft cap are the first layer's, `windows`
    the model's configuration's. A layer that does otherwise is refused.
    """

    def __init__(
        self, session: TorchSession, windows: tuple[int, ...], has_sinks: bool = False
    ) -> None:
        self._session = session
        self._windows, self._has_sinks = windows, has_sinks
        self._slots: TorchSlots | None = None
        self._ended: weakref.WeakSet[Running] = weakref.WeakSet()
        self._recordings: list[Recording] = []

    @property
    def control(self) -> Session:
        return self._session

    def begin(self, step: Step) -> Running:
        forward, scoring = step.forward, step.scoring
        described = self._session.step(
            step.sequences,
            self._slots_for(forward.tokens, step.num_qo_heads),
            qo_indptr=None if forward.is_decode else forward.indptr,
            offsets=forward.offsets,
            sm_scale=scoring.sm_scale,
            logits_soft_cap=scoring.logits_soft_cap,
            window_left=self._windows,
            deadline=DEADLINE_S,
        )
        return Running(step, described.__enter__())

    def attend(
        self, handle: Running, layer: int, qkv: tuple[torch.Tensor, ...], scoring: Scoring
    ) -> torch.Tensor:
        self.check(layer, handle.step.scoring, scoring)
        return hand_over(handle.open, layer, qkv, handle.step, scoring)

    def record(self, step: Step) -> Recording:
        """What attends decodes like this one in the same memory each time."""
        slots = self._slots_for(step.forward.tokens, step.num_qo_heads)
        self._recordings.append(Recording(self, step, slots))
        return self._recordings[-1]

    def replayed(self, handle: Running) -> None:
        """A recording has released the step's layers to the engine."""
        handle.open.release_to_engine()

    def check(self, layer: int, said: Scoring, scoring: Scoring) -> None:
        """ValueError when a layer's scoring differs from its step's."""
        described = Scoring(said.sm_scale, said.logits_soft_cap, self._windows[layer])
        if scoring != described:
            raise ValueError(
                f"layer {layer} attends with {scoring}, its step was described with {described}: "
                "use attnd.Session in place of TorchSession for this model"
            )

    def end(self, handle: Running) -> None:
        handle.open.__exit__(None, None, None)
        self._ended.add(handle)

    def undo(self, handle: Running) -> None:
        handle.open.abort()

    def wait(self, handle: Running) -> None:
        handle.release()
        if handle.failed is not None:
            raise handle.failed

    def release(self) -> None:
        """Free the slots, and everything that refers to them."""
        self._slots = None
        for recording in self._recordings:
            recording.slots = None
        self._recordings.clear()
        for running in list(self._ended):
            running.release()
        self._ended.clear()

    def _slots_for(self, tokens: int, num_qo_heads: int) -> TorchSlots:
        """Memory for the rows of a layer: the same in every step that fits into it."""
        slots = self._slots
        if slots is None or slots.rows < tokens or slots.num_qo_heads != num_qo_heads:
            slots = None
            self.release()
            self._slots = slots = self._session.slots(tokens, num_qo_heads, sinks=self._has_sinks)
        return slots


def hand_over(
    slots: TorchSlots | TorchStep,
    layer: int,
    qkv: tuple[torch.Tensor, ...],
    step: Step,
    scoring: Scoring,
) -> torch.Tensor:
    """Write a layer's q, k, v and sinks for a step's tokens; their o."""
    tokens = step.forward.tokens
    places = (slots.q(layer), slots.k(layer), slots.v(layer))
    for place, states in zip(places, qkv, strict=True):
        lay(place[:tokens], states, step.take)
    if scoring.sinks is not None:
        slots.sinks[layer].copy_(scoring.sinks)
    return slots.attend(layer)[:tokens]
