"""Small decoders for examples/serve, their own answers, and requests to its scheduler."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.serve.answers import Delta, Sampling
from examples.serve.scheduler import Scheduler

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}


def llama(seed: int, **config: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | config)).eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` of transformers itself continues a prompt with."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@dataclass
class Asked:
    """One request: its tokens when it is over, or its error."""

    over: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    request: Any = None

    def emit(self, delta: Delta) -> None:
        self.error = self.error or delta.error
        if delta.finish or delta.error:
            self.over.set()

    def tokens(self) -> list[int]:
        assert self.over.wait(60), "the answer has not ended"
        assert self.error is None
        answer: list[int] = self.request.answers[0].tokens
        return answer[len(self.request.prompt) :]


def ask(scheduler: Scheduler, prompt: list[int], max_tokens: int, **options: Any) -> Asked:
    asked, sampling = Asked(), Sampling(max_tokens, **{"temperature": 0, **options})
    asked.request = scheduler.submit(prompt, sampling, 1, asked.emit)
    return asked


class NoText:
    """A tokenizer that needs no vocabulary."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(32 + token) for token in tokens)
