"""The next token from a row of logits."""

from __future__ import annotations

import torch

from examples.serve.answers import Sampling, TokenLogprob


def sample(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[int, TokenLogprob | None]:
    """A token of `logits [vocabulary]`, float32 on the CPU; with log-probabilities where asked.

    Log-probabilities are the model's own, before temperature and top_p.
    """
    token = choose(logits, sampling, generator)
    if sampling.top_logprobs is None:
        return token, None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(sampling.top_logprobs) if sampling.top_logprobs else None
    top = (
        () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )
    return token, TokenLogprob(token, float(logprobs[token]), top)


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= sampling.top_p] = 0  # the first one always stays
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))
