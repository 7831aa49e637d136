"""Forwards of a whole model: one that fails after its last layer's attention is undone too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from attnd.transformers.batch import Batch

WATCHED: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()


def watch(model: Any) -> None:
    """Notify batches of the begin and end of the model's calls over their caches."""
    if isinstance(model, torch.nn.Module) and model not in WATCHED:
        WATCHED.add(model)
        model.register_forward_pre_hook(began, with_kwargs=True)
        model.register_forward_hook(ended, with_kwargs=True, always_call=True)


def began(model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Raises ValueError where a call passes a cache with use_cache=False."""
    for batch in batches(args, inputs):
        if inputs.get("use_cache") is False:
            raise ValueError(
                "use_cache is False and past_key_values an AttndCache, which stores every token: "
                "leave use_cache at True"
            )
        batch.enter(model)


def ended(model: Any, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
    """`output` is None where the forward raised."""
    for batch in batches(args, inputs):
        batch.leave(model, failed=output is None)


def batches(args: tuple[Any, ...], inputs: dict[str, Any]) -> Iterator[Batch]:
    """Of the caches among a call's arguments."""
    for given in (*args, *inputs.values()):
        batch = getattr(given, "batch", None)
        if isinstance(batch, Batch):
            yield batch
