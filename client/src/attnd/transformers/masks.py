"""The masks that transformers asks for: causal ones with padding are noted down, others refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.masking_utils import causal_mask_function

MaskFunction = Callable[[Any, Any, Any, Any], Any]

REMEDY: Final = "attnd serves causal attention with padding, and a sliding window where it has one"


@dataclass(frozen=True, slots=True)
class CausalMask:
    """A causal mask as a model hands it to its layers.

    `visible [rows, columns]` is False where the batch is padded; None when it is not padded at all.
    A query sees its own key and `window_left` before it; -1: all of them.
    """

    visible: torch.Tensor | None
    window_left: int
    refusal: str = ""
    """Why no layer can attend with it: a model may make masks that none of its layers uses."""


def attnd_mask(
    *,
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **sizes: Any,
) -> CausalMask:
    """What transformers calls once a forward for each kind of mask, in place of making one.

    A mask that is not causal is refused where a layer attends with it: packed sequences, blocks, a
    model's own rules.
    """
    refusal = ""
    if use_vmap or not allow_is_causal_skip or not is_causal(mask_function, local_size):
        refusal = f"the model asks for a mask of its own making: {REMEDY}"
        if local_size == 0:
            refusal = f"the layer's sliding_window is 0, in which no key is visible: {REMEDY}"
    elif attention_mask is not None and attention_mask.ndim != 2:
        refusal = f"attention_mask has {attention_mask.ndim} dimensions, not 2: {REMEDY}"
    return CausalMask(attention_mask, -1 if local_size is None else local_size - 1, refusal)


def is_causal(function: MaskFunction, window: int | None) -> bool:
    """Whether a mask function is the causal one, or the causal one with a window.

    A window is a closure of transformers': it is asked about the keys at the window's edges.
    """
    if window is None:
        return function is causal_mask_function
    query = torch.full((4,), window + 1, device="cpu")
    edges = query + torch.tensor([1, 0, 1 - window, -window], device="cpu")
    row = torch.zeros_like(query)
    return bool(function(row, row, query, edges).tolist() == [False, True, True, False])
