"""The next tokens from logits. In vLLM and SGLang: the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from examples.serve.answers import Sampling, TokenLogprob

COLDEST: Final = 1e-4
"""A lower temperature is none: the quotients would overflow."""

Chosen = tuple[int, TokenLogprob | None]


def sample(
    logits: torch.Tensor, wanted: Sequence[tuple[Sampling, torch.Generator | None]]
) -> list[Chosen]:
    """A token for each row of `logits [rows, vocabulary]`; with log-probabilities where asked.

    Only rows that need more than their largest logit leave the model's device.
    """
    best = logits.argmax(-1).tolist()
    return [
        (token, None)
        if sampling.temperature == 0 and sampling.top_logprobs is None
        else draw(row.float().cpu(), sampling, generator)
        for token, row, (sampling, generator) in zip(best, logits, wanted, strict=True)
    ]


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> Chosen:
    """A token of `logits [vocabulary]`, float32 on the CPU.

    Log-probabilities are the model's own, before temperature, top_k and top_p.
    """
    token = choose(logits, sampling, generator)
    if sampling.top_logprobs is None:
        return token, None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(sampling.top_logprobs)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return token, TokenLogprob(token, float(logprobs[token]), top)


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= sampling.top_p] = 0  # the first one stays, however small top_p is
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))
