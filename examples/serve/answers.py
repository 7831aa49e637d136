"""A request and its answers, as the scheduler sees them.

In vLLM these are `Request` and `SamplingParams`, in SGLang `Req`; both also list the pages there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from examples.serve.text import TextStream


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0: the most likely; `top_k` 0: of all; `top_logprobs`
    None: no report."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of the chosen token, and the most likely ones in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one answer grew by; `finish` says why it is over, `error` why it failed."""

    index: int
    text: str = ""
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Literal["stop", "length"] | None = None
    error: str | None = None

    def __add__(self, later: Delta) -> Delta:
        text, tokens = self.text + later.text, self.tokens + later.tokens
        return Delta(self.index, text, tokens, self.logprobs + later.logprobs, later.finish)


@dataclass(eq=False, slots=True)
class Request:
    """`emit` is called in the scheduler's thread; `cached_tokens` are of the prompt, in attnd."""

    prompt: list[int]
    sampling: Sampling
    emit: Callable[[Delta], None]
    answers: list[Answer] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(eq=False, slots=True)
class Answer:
    """Prompt and answer are `tokens`; KV of the first `stored` is in the sequence of attnd."""

    request: Request
    index: int
    tokens: list[int]
    text: TextStream
    generator: torch.Generator | None
    sequence: str | None = None
    stored: int = 0
    committed: int = 0

    @property
    def missing(self) -> int:
        """Tokens without KV: one in a decode, more in a prefill."""
        return len(self.tokens) - self.stored

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def forget(self) -> None:
        """Its sequence is deleted or lost."""
        self.sequence, self.stored, self.committed = None, 0, 0
