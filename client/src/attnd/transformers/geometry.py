"""The pool that a model's configuration needs, and the models that cannot be served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from attnd.results import Info
from attnd.transformers.longrope import rope_tokens_of

DTYPES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What q, k, v and o may be, by the pool's name for it."""
PAGE_SIZE: Final = 16
"""Tokens of a page, as by the service's default."""
KINDS: Final = ("full_attention", "sliding_attention")
"""`layer_types` that are causal attention over the layer's own keys, with a window or without."""
FEATURES: Final = {
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that attend another layer's keys",
    "kv_sharing_modes": "layers that attend another layer's keys",
    "kv_lora_rank": "latent KV",
}
"""Entries of a configuration for features that attnd lacks, with their names."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one shape of K and V and one window, as a group of the pool."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def settings(self) -> dict[str, object]:
        """As an entry of the service's `pool.groups`."""
        fields = {"layers": list(self.layers), "num_kv_heads": self.num_kv_heads}
        window = {} if self.window is None else {"window": self.window}
        return fields | {"head_dim": self.head_dim} | window


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pool that a model needs, and how its layers attend.

    `groups`: the pool's groups of layers; empty: all are one. `windows` has each layer's
    `window_left`, -1 where it is off. `sm_scale` None is head_dim ** -0.5. `has_sinks`: layers have
    attention sinks. `rope_tokens`: a runner whose forwards mix sequences must keep all of them that
    short, or their K depends on each other; None: any length.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int, ...]
    has_sinks: bool = False
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    rope_tokens: int | None = None
    groups: tuple[Group, ...] = ()

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """KV heads and head_dim of each layer."""
        found = [(self.num_kv_heads, self.head_dim)] * self.num_layers
        for group in self.groups:
            for layer in group.layers:
                found[layer] = (group.num_kv_heads, group.head_dim)
        return found

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def scoring(self) -> dict[str, Any]:
        """Options of a session's `step` through all layers."""
        return {
            "sm_scale": self.sm_scale,
            "logits_soft_cap": self.logits_soft_cap,
            "window_left": self.windows,
        }

    def check_layer(self, options: Mapping[str, Any]) -> None:
        """ValueError where the options that a model gives its attention function are not those of
        `scoring`."""
        default = self.head_dim**-0.5
        found = options.get("scaling") or default, options.get("softcap") or 0.0
        wanted = self.sm_scale or default, self.logits_soft_cap
        if found != wanted:
            raise ValueError(
                "a layer attends with scale {} and soft cap {}, its step with {} and {}: attnd "
                "cannot serve this model in one step for all layers".format(*found, *wanted)
            )

    def settings(self) -> dict[str, object]:
        """The service's settings by name, as its command line takes them."""
        if self.groups:
            groups = json.dumps([group.settings for group in self.groups])
            return {"pool.groups": groups, "pool.dtype": self.dtype}
        return {
            "pool.num-layers": self.num_layers,
            "pool.num-kv-heads": self.num_kv_heads,
            "pool.head-dim": self.head_dim,
            "pool.dtype": self.dtype,
        }

    def command(self) -> str:
        """How to start a service with such a pool."""
        given = self.settings().items()
        arguments = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in given)
        return f"attnd serve {arguments}"


def pool_settings(
    model: Any, dtype: str | None = None, *, tokens: int | None = None, groups: bool = False
) -> dict[str, object]:
    """The settings of a service for this model: `{"pool.num-layers": 32, ...}`.

    `dtype` is the pool's when it is not to be the model's own. The pool holds `tokens` tokens;
    None: as many as the service's settings say. With `groups` layers with a window are groups of
    their own, which return pages that no later token sees; a model whose layers have heads of
    several sizes has groups in any case. Such a pool has no tiers, and forwards through it are
    calls for each layer. Raises ValueError for a model that attnd cannot serve.
    """
    geometry = geometry_of(model, dtype, groups=groups)
    settings = geometry.settings()
    if tokens is not None:
        pages = -(-tokens // PAGE_SIZE)
        settings |= {"pool.page-size": PAGE_SIZE, "pool.num-pages": pages}
    return settings


def geometry_of(model: Any, dtype: str | None = None, *, groups: bool = False) -> Geometry:
    """The geometry in the model's configuration; ValueError for features that attnd lacks.

    `dtype` and `groups` are as in `pool_settings`.
    """
    config = model.config.get_text_config(decoder=True)
    check_served(model.config, config)
    check_attention(model, config)
    if model.dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise ValueError(f"the model is {model.dtype}: attnd takes {known}; convert it with .to()")
    heads = config.num_attention_heads
    every = getattr(config, "per_layer_config", None)  # where layers differ in it
    first = every[0] if every else config
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // heads
    scales = (
        float(module.scaling)
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    )
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    windows = tuple(windows_of(config))
    shapes = shapes_of(model, [(kv_heads, head_dim)] * len(windows))
    found = groups_of(shapes, windows)
    return Geometry(
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype or DTYPES[model.dtype],
        windows=windows,
        groups=found if len(set(shapes)) > 1 or (groups and len(found) > 1) else (),
        has_sinks=any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters()),
        sm_scale=next(scales, None),
        logits_soft_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        rope_tokens=rope_tokens_of(model, config),
    )


def check_served(config: Any, decoder: Any) -> None:
    """ValueError with the first thing in a configuration that attnd's attention has not."""
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config, "is_encoder_decoder", True, "encoder-decoder models")
    for name, meaning in FEATURES.items():
        value = getattr(decoder, name, None)
        if any(value) if isinstance(value, list | tuple) else value:
            raise refusal(decoder, name, value, meaning)
    if not getattr(decoder, "is_causal", True):
        raise refusal(decoder, "is_causal", False, "attention that is not causal")
    for kind in getattr(decoder, "layer_types", None) or ():
        if kind not in KINDS:
            raise refusal(decoder, "layer_types", kind, f"layers but {' and '.join(KINDS)}")


def check_attention(model: Any, decoder: Any) -> None:
    """ValueError for a model whose attention attnd cannot replace."""
    what = type(model).__name__
    if getattr(decoder, "num_attention_heads", None) is None:
        raise ValueError(
            f"{type(decoder).__name__} has no num_attention_heads: {what} keeps no keys and values "
            "for attnd to serve; use the model without an AttndCache"
        )
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise ValueError(
            f"{what} computes attention in its own code, without transformers' AttentionInterface, "
            "and set_attn_implementation does nothing: attnd cannot serve this model"
        )


def refusal(config: Any, name: str, value: object, meaning: str) -> ValueError:
    return ValueError(
        f"{type(config).__name__}.{name} is {value!r}: attnd does not serve {meaning}; "
        "use another attn_implementation for this model"
    )


def shapes_of(model: Any, default: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """KV heads and head_dim of each layer, where its attention has them; else the configuration's.

    Raises ValueError for a layer whose v has heads of another size than k.
    """
    found = list(default)
    for module in model.modules():
        layer, dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
        key, value = (getattr(module, name, None) for name in ("k_proj", "v_proj"))
        wide = getattr(key, "out_features", None)
        if not (isinstance(layer, int) and isinstance(dim, int)) or wide is None:
            continue
        if value is not None and getattr(value, "out_features", wide) != wide:
            sizes = f"{wide} values of k and {value.out_features} of v"
            raise ValueError(f"layer {layer} has {sizes}: attnd does not serve this model")
        if layer < len(found) and wide % dim == 0:
            found[layer] = (wide // dim, dim)
    return found


def groups_of(shapes: list[tuple[int, int]], windows: tuple[int, ...]) -> tuple[Group, ...]:
    """Groups of layers of one shape and window; one without a window, where there is none.

    That one is the group with the widest window: it keeps all pages, and its calls the window.
    """
    kinds: dict[tuple[tuple[int, int], int], list[int]] = {}
    for layer, kind in enumerate(zip(shapes, windows, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    full = max(kinds, key=lambda kind: float("inf") if kind[1] < 0 else kind[1])
    return tuple(
        Group(tuple(layers), *shape, None if (shape, window) == full or window < 0 else window + 1)
        for (shape, window), layers in kinds.items()
    )


def windows_of(config: Any) -> list[int]:
    """Each layer's `window_left`; transformers' sliding window counts the query's own key too."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or None  # some models' 0 means none
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"]
        kinds *= config.num_hidden_layers
    return [window_left(window if kind == "sliding_attention" else None) for kind in kinds]


def window_left(sliding_window: int | None) -> int:
    """attnd's name for a window that transformers counts with the query's own key in it."""
    return -1 if not sliding_window else sliding_window - 1


def check_pool(geometry: Geometry, info: Info) -> None:
    """ValueError with the command line of the right service when the pool is another model's."""
    if geometry.groups or info.groups:
        check_groups(geometry, info)
        return
    given = (info.num_layers, info.num_kv_heads, info.head_dim, info.dtype)
    wanted = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.dtype)
    if given == wanted:
        return
    shape = "{} layers x {} KV heads x {} in {}"
    error = f"the service's pool is {shape.format(*given)}, the model needs {shape.format(*wanted)}"
    if given[:3] == wanted[:3]:
        error += f"; give dtype={info.dtype!r} to have K and V rounded to the pool's"
    raise ValueError(f"{error}: start a service for it with\n  {geometry.command()}")


def check_groups(geometry: Geometry, info: Info) -> None:
    """ValueError where a layer of the pool is not as the model's: in shape, dtype or window."""
    wanted = [
        (*shape, geometry.dtype, window)
        for shape, window in zip(geometry.shapes, geometry.windows, strict=True)
    ]
    one = (info.num_kv_heads, info.head_dim, info.dtype, -1)
    given = dict.fromkeys(range(info.num_layers), one)
    for group in info.groups or ():
        shape = (group["num_kv_heads"], group["head_dim"], group["dtype"])
        given |= dict.fromkeys(group["layers"], (*shape, window_left(group["window"])))
    count = min(len(wanted), len(given))
    wrong = [
        layer
        for layer in range(count)
        if wanted[layer][:3] != given[layer][:3] or given[layer][3] not in (-1, wanted[layer][3])
    ]
    if not wrong and len(wanted) == len(given):
        return
    error = f"the service's pool has {len(given)} layers, the model {len(wanted)}"
    if wrong:
        layer = wrong[0]
        error = (
            f"layer {layer} of the service's pool is {given[layer]}, the model's {wanted[layer]} "
            "(KV heads, head_dim, dtype, window_left)"
        )
    raise ValueError(f"{error}: start a service for it with\n  {geometry.command()}")
