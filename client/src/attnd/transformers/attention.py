"""The attention function that transformers' models call by the name of attnd."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from attnd.transformers.geometry import window_left
from attnd.transformers.masks import REMEDY, CausalMask
from attnd.transformers.roads import Scoring

NAME: Final = "attnd"
"""Of this function: `attn_implementation="attnd"`."""
TAG: Final = "attnd"
"""The attribute by which K and V that a cache was given lead back to it."""
LATEST: Final[deque[Callable[[], Any]]] = deque(maxlen=1)
"""A weak reference to the cache that was given keys last, for the reason of a refusal."""

REFUSED: Final = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
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
    "past_key_values=AttndCache(session, model) and use_cache=True to the model or to generate()"
)


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer: the cache's sequences get `key` and `value`, and `query` attends all they hold.

    `query [rows, num_qo_heads, columns, head_dim]`, `key, value [rows, num_kv_heads, columns,
    head_dim]` with the new columns only; answers `[rows, columns, num_qo_heads, head_dim]`. Raises
    ValueError for what attnd does not compute, and whatever the session raises.
    """
    cache, layer = cache_of(module, key, value)
    batch = cache.taken()
    refuse_others({"is_causal": is_causal, **others}, module, dropout)
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError("attnd's attention has no gradients: run under torch.inference_mode()")
    mask = checked_mask(attention_mask, sliding_window)
    if getattr(module, "layer_idx", layer) != layer:
        raise ValueError(f"layer {module.layer_idx} attends the keys of layer {layer}: {REMEDY}")
    scoring = Scoring(scaling, softcap or 0.0, mask.window_left)
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
