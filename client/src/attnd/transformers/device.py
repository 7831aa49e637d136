"""Forwards over device memory: one step of a `TorchSession` each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from attnd.session import Session
from attnd.transformers.roads import Scoring, Step, lay, spread

if TYPE_CHECKING:
    from attnd.torch import Slots, TorchSession
    from attnd.torch import Step as TorchStep


DEADLINE_S: Final = 600.0
"""Of a forward through all layers: its sequences are its own, and nobody else waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A step of the cache and the session's own, which is entered."""

    step: Step
    entered: TorchStep


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Attention of a decode's layers over `slots`."""

    attend: Callable[[int, tuple[torch.Tensor, ...], Scoring], torch.Tensor]
    slots: Slots


class DeviceRoad:
    """One step of the session a forward, described before its first layer runs.

    The step must say how every layer attends: scale and soft cap are the first layer's, `windows`
    the model's configuration's. A layer that does otherwise is refused.
    """

    def __init__(self, session: TorchSession, windows: tuple[int, ...]) -> None:
        self._session = session
        self._windows = windows
        self._slots: Slots | None = None

    @property
    def control(self) -> Session:
        return self._session.session

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
        self._check(layer, handle.step.scoring, scoring)
        return hand_over(handle.entered, layer, qkv, handle.step)

    def record(self, step: Step) -> Recording:
        """Attends the layers of a decode like this one, whatever its sequences.

        It waits for nothing on the host and uses the same memory each time, so that a CUDA graph
        may be captured over it. A step must be open when it runs.
        """
        slots = self._slots_for(step.forward.tokens, step.num_qo_heads)

        def attend(layer: int, qkv: tuple[torch.Tensor, ...], scoring: Scoring) -> torch.Tensor:
            self._check(layer, step.scoring, scoring)
            return spread(hand_over(slots, layer, qkv, step), step, qkv[0])

        return Recording(attend, slots)

    def holds(self, recording: Recording) -> bool:
        """Whether the memory of a recording is still that of the steps."""
        return recording.slots is self._slots

    def replayed(self, handle: Running) -> None:
        """A recording's layers have been handed over in the step's place."""
        handle.entered.handed_over()

    def _check(self, layer: int, said: Scoring, scoring: Scoring) -> None:
        """ValueError when a layer attends otherwise than its step says."""
        described = Scoring(said.sm_scale, said.logits_soft_cap, self._windows[layer])
        if scoring != described:
            raise ValueError(
                f"layer {layer} attends with {scoring}, its step was described with {described}: "
                "use attnd.Session in place of TorchSession for this model"
            )

    def end(self, handle: Running) -> None:
        handle.entered.__exit__(None, None, None)

    def undo(self, handle: Running) -> None:
        handle.entered.abort()

    def wait(self, handle: Running) -> None:
        handle.entered.wait()

    def release(self) -> None:
        self._slots = None

    def _slots_for(self, tokens: int, num_qo_heads: int) -> Slots:
        """Where the rows of a layer lie: the same memory in every step that it has room for."""
        slots = self._slots
        if slots is None or slots.rows < tokens or slots.num_qo_heads != num_qo_heads:
            self._slots = slots = None  # its memory is needed for the new ones
            self._slots = slots = self._session.slots(tokens, num_qo_heads)
        return slots


def hand_over(
    slots: Slots | TorchStep, layer: int, qkv: tuple[torch.Tensor, ...], step: Step
) -> torch.Tensor:
    """Write a layer's q, k and v for a step's tokens; their o."""
    tokens = step.forward.tokens
    places = (slots.q(layer), slots.k(layer), slots.v(layer))
    for place, states in zip(places, qkv, strict=True):
        lay(place[:tokens], states, step.take)
    return slots.attend(layer)[:tokens]
