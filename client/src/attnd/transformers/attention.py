"""The attention function and the masks that transformers asks for by the name of attnd.

Causal masks with padding are noted down, others refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.masking_utils import causal_mask_function

from attnd.transformers.geometry import window_left
from attnd.transformers.releases import CACHE
from attnd.transformers.roads import Scoring, outside_graphs

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


@outside_graphs
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


NAME: Final = "attnd"
"""Of this function: `attn_implementation="attnd"`."""
TAG: Final = "attnd"
"""The attribute by which K and V that a cache was given lead back to it."""
LATEST: Final[deque[Callable[[], Any]]] = deque(maxlen=1)
"""A weak reference to the cache that was given keys last, for the reason of a refusal."""

REFUSED: Final = {
    "position_bias": "a bias of positions",
    "output_attentions": "the weights of attention (leave it at False)",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks",
    "cu_seq_lens_q": "sequences packed into one row",
    "head_mask": "a mask of heads",
}
"""Keywords for variants of attention that attnd lacks."""

NO_CACHE: Final = (
    "attnd attends KV that an AttndCache holds, and these keys are of none: pass "
    f"{CACHE}=AttndCache(session, model) and use_cache=True to the model or to generate(); "
    "generate(guidance_scale=...) also runs the model without that cache: leave it out"
)


@outside_graphs
def attnd_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer: the cache's sequences get `key` and `value`, and `query` attends all they hold.

    `query [rows, num_qo_heads, columns, head_dim]`, `key, value [rows, num_kv_heads, columns,
    head_dim]` with the new columns only; `s_aux [num_qo_heads]` are attention sinks. Answers
    `[rows, columns, num_qo_heads, head_dim]`. Raises ValueError for what attnd does not compute,
    and whatever the session raises.
    """
    cache, layer = cache_of(module, key, value)
    batch = cache.taken()
    refuse_others({"is_causal": is_causal, **others}, module, dropout)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)):
        raise ValueError("attnd's attention has no gradients: run under torch.inference_mode()")
    mask = checked_mask(attention_mask, sliding_window)
    if getattr(module, "layer_idx", layer) != layer:
        raise ValueError(f"layer {module.layer_idx} attends the keys of layer {layer}: {REMEDY}")
    scoring = Scoring(scaling, softcap or 0.0, mask.window_left, s_aux)
    return batch.attend(layer, (query, key, value), mask.visible, scoring), None


def cache_of(module: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, int]:
    """The cache that gave a layer these keys and values, and the layer's number there."""
    for name, states in (("keys", key), ("values", value)):
        given = getattr(states, TAG, None)
        if given is not None:
            continue
        latest = LATEST[-1]() if LATEST else None
        if latest is None or not latest.awaits(getattr(module, "layer_idx", None)):
            raise ValueError(NO_CACHE)
        latest.taken()
        raise ValueError(
            f"{type(module).__name__} changes the {name} between its cache and its attention: "
            "attnd attends them as they were stored, so it cannot serve this model; use another "
            "attn_implementation"
        )
    found: tuple[Any, int] = getattr(key, TAG)
    return found


def checked_mask(mask: CausalMask | torch.Tensor | None, sliding_window: int | None) -> CausalMask:
    """The mask that `attnd_mask` made; ValueError for a model's or a caller's own."""
    if not isinstance(mask, CausalMask):
        what = "no mask" if mask is None else f"a mask of {mask.ndim} dimensions"
        raise ValueError(f"the layer is given {what}, not one that transformers makes: {REMEDY}")
    if mask.refusal:
        raise ValueError(mask.refusal)
    if sliding_window is not None and -1 != mask.window_left != window_left(sliding_window):
        raise ValueError(
            f"the layer's sliding_window is {sliding_window}, its mask's {mask.window_left + 1}"
        )
    return mask


def refuse_others(others: dict[str, Any], module: Any, dropout: float) -> None:
    """ValueError for a keyword that would change the numbers."""
    for name in others.keys() & REFUSED.keys():
        value = others[name]
        if value is not None and value is not False:
            raise ValueError(
                f"{name} asks for {REFUSED[name]}, which attnd's attention does not have"
            )
    if others["is_causal"] is False or not getattr(module, "is_causal", True):
        raise ValueError(f"the layer is not causal: {REMEDY}")
    if dropout:
        raise ValueError(f"dropout is {dropout}: attnd serves models in eval() mode")
