"""A Llama-architecture model with seeded random weights for an example, and a batch of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED: Final = 20
PAGE_SIZE: Final = 16
TORCH: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its work: every prompt is `shared` tokens and one of `suffixes`."""

    model: dict[str, Any]
    shared: int
    suffixes: tuple[int, ...]
    new_tokens: int = 32
    reference: str = "eager"  # the attention whose tokens are expected


SIZES: Final = {
    "small": Size(
        {
            "vocab_size": 1024,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "initializer_range": 0.08,  # attention far from uniform, logits apart
        },
        shared=200,  # not a multiple of the page: forks copy the rows of the last one
        suffixes=(3, 16, 1, 24, 7, 11, 2, 30),
    ),
    "1b": Size(
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "initializer_range": 0.04,
            "tie_word_embeddings": True,
        },
        shared=0,
        suffixes=tuple(2048 - 4 * i for i in range(32)),
        new_tokens=64,
        reference="sdpa",  # eager's scores of long prompts take more memory than a GPU has
    ),
}


def build_model(size: Size, dtype: str, shared: int) -> Any:
    """Random weights on this machine's device; in the pool's dtype where that is a GPU."""
    config = LlamaConfig(
        **size.model,
        max_position_embeddings=shared + max(size.suffixes) + size.new_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(config)
    return model.eval().to(TORCH[dtype] if DEVICE == "cuda" else torch.float32)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts `[rows, columns]` padded on the left, and how many pages all their tokens take."""

    ids: torch.Tensor
    mask: torch.Tensor
    new_tokens: int
    pages: int

    @property
    def rows(self) -> int:
        return len(self.ids)


def make_batch(size: Size, shared: int) -> Batch:
    vocabulary = size.model["vocab_size"]
    start = torch.randint(1, vocabulary, (shared,)).tolist()
    ends = [torch.randint(1, vocabulary, (count,)).tolist() for count in size.suffixes]
    longest = max(size.suffixes)
    pads = [longest - len(end) for end in ends]
    ids = [[0] * pad + start + end for pad, end in zip(pads, ends, strict=True)]
    mask = [[0] * pad + [1] * (shared + longest - pad) for pad in pads]
    tokens = shared + longest + size.new_tokens
    return Batch(
        torch.tensor(ids, device=DEVICE),
        torch.tensor(mask, device=DEVICE),
        size.new_tokens,
        pages=(len(ends) + 1) * math.ceil(tokens / PAGE_SIZE),
    )
