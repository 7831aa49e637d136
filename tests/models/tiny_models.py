"""Tiny models of transformers with seeded random weights, for a pool of the tests' shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from attnd.transformers.releases import CACHE
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.client.running_service import POOL

VOCABULARY: Final = 128
LAYERS, KV_HEADS, HEAD_DIM = (
    int(POOL[name]) for name in ("num-layers", "num-kv-heads", "head-dim")
)
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3 * KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # attention far from uniform, logits apart
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NEOX_SIZES: Final[dict[str, Any]] = {
    **{name: value for name, value in SIZES.items() if name not in ("head_dim",)},
    "hidden_size": KV_HEADS * HEAD_DIM,
    "num_attention_heads": KV_HEADS,
}


def with_sinks(model: Any) -> Any:
    """The model with sinks about as large as its scores."""
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(1.0, 2.0)
    return model


MODELS: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2, a window in one layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "mistral, a window in all layers": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, sliding_window=9)
    ),
    "gemma2, a window in every other layer, a soft cap, a scale of its own": lambda: (
        Gemma2ForCausalLM(
            Gemma2Config(
                **SIZES, sliding_window=7, attn_logit_softcapping=5.0, query_pre_attn_scalar=100
            )
        )
    ),
    "gpt-oss, sinks, a window in every other layer": lambda: with_sinks(
        GptOssForCausalLM(
            GptOssConfig(
                **SIZES,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=7,
                num_local_experts=2,
                num_experts_per_tok=1,
            )
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX_SIZES)),
}


def tiny(name: str = "llama") -> Any:
    """The model by name, always with the same weights, served by attnd."""
    return seeded(MODELS[name])


def seeded(make: Callable[[], Any]) -> Any:
    """A new model, always with the same weights, served by attnd."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make().eval()
    model.set_attn_implementation("attnd")
    return model


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """A batch padded on the left, `[rows, columns]`."""

    ids: torch.Tensor
    mask: torch.Tensor


def padded(rows: Sequence[Sequence[int]]) -> Prompts:
    width = max(map(len, rows))
    return Prompts(
        torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    )


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()
    return tokens


def prompts(*lengths: int, prefix: int = 0) -> Prompts:
    """Random prompts; all begin with the same `prefix` tokens."""
    start = random_tokens(prefix, 99)
    return padded([start + random_tokens(length, seed) for seed, length in enumerate(lengths)])


GREEDY: Final[dict[str, Any]] = {
    "max_new_tokens": 10,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def over(cache: Any) -> dict[str, Any]:
    """The argument by which a model or `generate` takes a cache."""
    return {CACHE: cache}


def generated(model: Any, batch: Prompts, cache: Any = None, **options: Any) -> Any:
    """What `generate` answers; without a cache of attnd, with eager attention and its own."""
    model.set_attn_implementation("eager" if cache is None else "attnd")
    given = {} if cache is None else over(cache)
    try:
        return model.generate(
            batch.ids, attention_mask=batch.mask, **{**GREEDY, **given, **options}
        )
    finally:
        model.set_attn_implementation("attnd")


def assert_same(got: Any, wanted: Any) -> None:
    """Equal tokens, and logits equal but for the last bits of fp32."""
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for step, (ours, theirs) in enumerate(zip(got.logits, wanted.logits, strict=True)):
        error = (ours - theirs).abs().max().item()
        assert error < 1e-3, f"step {step}: logits are {error:.1e} apart"
