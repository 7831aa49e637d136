"""`Road`: how a forward reaches the service, over any kind of session, and how its sequences go."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from attnd.client import Client
from attnd.errors import AttndError, UnknownSequence
from attnd.session import Session
from attnd.transformers.columns import Forward

Handle = TypeVar("Handle")
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """What a model under `torch.compile` calls between its graphs: a graph would fix lengths."""
    kept: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` wrapped; any other as it is."""
    return getattr(model, "_orig_mod", model)


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's attention, in the service's words; `sm_scale` None is head_dim ** -0.5.

    Equal ones may have other sinks, `[num_qo_heads]` or None.
    """

    sm_scale: float | None
    logits_soft_cap: float
    window_left: int
    sinks: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward through all layers: `sequences` get the tokens of `forward.rows`.

    `take` is `forward.take` on the model's device.
    """

    sequences: list[str]
    forward: Forward
    take: torch.Tensor | None
    num_qo_heads: int
    scoring: Scoring


class Road(Protocol[Handle]):
    """Carries steps to the service. q, k, v are a model's, `[rows, heads, columns, head_dim]`."""

    @property
    def control(self) -> Session | Client:
        """For everything but attention."""

    def begin(self, step: Step) -> Handle:
        """Before the step's first layer, whose scoring is the step's."""

    def attend(
        self, handle: Handle, layer: int, qkv: tuple[torch.Tensor, ...], scoring: Scoring
    ) -> torch.Tensor:
        """Append k and v of a layer and attend; o of the step's tokens `[tokens, heads, dim]`."""

    def end(self, handle: Handle) -> None:
        """After the last layer."""

    def undo(self, handle: Handle) -> None:
        """Undo the appends of the layers so far."""

    def wait(self, handle: Handle) -> None:
        """Wait until the engine has finished an ended step; raises its error, which undoes it."""

    def release(self) -> None:
        """Give shared memory back until the next step."""


def lay(
    into: torch.Tensor, states: torch.Tensor, take: torch.Tensor | None, begin: int = 0
) -> None:
    """Tokens of a model's `states [rows, heads, columns, head_dim]` as `[tokens, heads, head_dim]`.

    `into` has room for some of them, from token `begin` on.
    """
    by_column = states.transpose(1, 2)
    if take is None and into.numel() == states.numel():
        into.view(by_column.shape).copy_(by_column)
        return
    end = begin + len(into)
    flat = by_column.flatten(0, 1)
    into.copy_(
        flat[begin:end] if take is None else flat.index_select(0, take[begin:end].to(flat.device))
    )


def spread(o: torch.Tensor, step: Step, like: torch.Tensor) -> torch.Tensor:
    """o of the step's tokens as the model wants it, `[rows, columns, heads, head_dim]`.

    Columns without a token, padding, are 0. `like` is the model's q.
    """
    rows, heads, columns, dim = like.shape
    o = o.to(like.device, like.dtype)
    if step.take is None:
        return o.view(rows, columns, heads, dim)
    spread = torch.zeros((rows * columns, heads, dim), dtype=like.dtype, device=like.device)
    return spread.index_copy_(0, step.take.to(like.device), o).view(rows, columns, heads, dim)


def delete(control: Session | Client, names: Sequence[str]) -> None:
    """Delete these sequences; a missing one (lost with its engine, say) is no error."""
    for name in names:
        with contextlib.suppress(UnknownSequence):
            control.delete_sequence(name)


def delete_behind(control: Session | Client, names: Sequence[str], pid: int) -> None:
    """Delete the sequences of a cache that was collected in process `pid`, which made it.

    The collector runs in the midst of anything, a call of this very session included, so a thread
    does it, for which the session waits when it is closed. Errors are ignored.
    """
    if names and pid == os.getpid():
        thread = threading.Thread(target=delete_quietly, args=(control, list(names)), daemon=True)
        thread.start()
        control.dependents.add(thread.join)


def delete_quietly(control: Session | Client, names: Sequence[str]) -> None:
    with contextlib.suppress(AttndError, RuntimeError, OSError):
        delete(control._for_thread(), names)
