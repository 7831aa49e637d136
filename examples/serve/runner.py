"""Runs a transformers model: ragged batches in, logits out. Attention and KV are attnd's.

In vLLM this is the model runner with its attention backend and block tables, in SGLang the model
runner with its radix attention. Here a forward is one step of a `TorchSession`, and the runner
knows sequences by their ids: it stores no KV and counts no pages.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from attnd import Session
from attnd.calls.control import NewSequence
from attnd.calls.prefix import Prefix
from attnd.errors import AttndError
from attnd.torch import TorchSession
from attnd.transformers.geometry import geometry_of
from transformers import AttentionInterface, AttentionMaskInterface

NAME: Final = "attnd_serve"
TTL_S: Final = 600.0
"""After which attnd deletes the idle sequences of a process that was killed."""


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of a sequence that holds `stored` tokens."""

    sequence: str
    tokens: Sequence[int]
    stored: int


class Runner:
    """One model and one session; for one thread.

    `connect` opens a session: again after attnd was restarted. `max_tokens` is the largest batch.
    """

    def __init__(self, model: Any, connect: Callable[[], TorchSession], max_tokens: int) -> None:
        self.model, self._connect, self._max_tokens = model, connect, max_tokens
        config = model.config.get_text_config(decoder=True)
        self._heads = config.num_attention_heads
        self._windows = geometry_of(model).windows
        self._cap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        self._scale = scale_of(model)
        self._step: Any = None
        self._ids = f"serve-{uuid.uuid4().hex[:12]}-"
        self._numbers = itertools.count()
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda **_: None)
        model.set_attn_implementation(NAME)
        self._session: TorchSession | None = None
        self.reconnect()

    def reconnect(self) -> None:
        """Open a new session. No sequence is left."""
        if self._session is not None:
            before, self._session = self._session, None
            with contextlib.suppress(AttndError, OSError):
                before.close()
        opened = self._connect()
        self._slots = opened.slots(self._max_tokens, self._heads)
        self._session = opened
        self.calls.delete_sequences(prefix=self._ids)

    @property
    def session(self) -> TorchSession:
        if self._session is None:
            raise ConnectionError("there is no session with attnd")
        return self._session

    @property
    def calls(self) -> Session:
        """Everything but steps."""
        return self.session.session

    def close(self) -> None:
        """Delete the sequences, and end the session."""
        with contextlib.suppress(AttndError, OSError):
            self.calls.delete_sequences(prefix=self._ids)
            self.session.close()

    def _new_id(self) -> str:
        return f"{self._ids}{next(self._numbers)}"

    def create(self, tokens: Sequence[int]) -> tuple[str, int]:
        """A sequence that begins with the cached part of `tokens`: its id, and how many these are.

        The last token is never taken from the cache: its logits are needed.
        """
        prefix = Prefix(token_ids=tokens[:-1])
        made = self.calls.create_sequence(self._new_id(), prefix=prefix, ttl_s=TTL_S)
        return made.id, made.cached_len or 0

    def fork(self, sequence: str, length: int, count: int) -> list[str]:
        """Sequences that share the first `length` tokens."""
        new = [
            NewSequence(self._new_id(), parent=sequence, length=length, ttl_s=TTL_S)
            for _ in range(count)
        ]
        return [made.id for made in self.calls.create_sequences(new)]

    def commit(self, sequence: str, tokens: Sequence[int], committed: int) -> int:
        """Cache the full pages of these tokens; `committed` are cached already."""
        prefix = Prefix(token_ids=tokens[committed:])
        return self.calls.commit(sequence, prefix, offset=committed).committed_len

    def delete(self, sequences: Sequence[str]) -> None:
        self.calls.delete_sequences(list(sequences))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits `[rows, vocabulary]` after each row's last token, float32 on the CPU.

        Raises OutOfPages and other errors of attnd; then nothing was stored.
        """
        counts = [len(row.tokens) for row in rows]
        ends = torch.tensor(counts).cumsum(0)
        tokens = [token for row in rows for token in row.tokens]
        positions = [row.stored + i for row in rows for i in range(len(row.tokens))]
        device = self.model.device
        with self.session.step(
            [row.sequence for row in rows],
            self._slots,
            qo_indptr=None if max(counts) == 1 else [0, *ends.tolist()],
            sm_scale=self._scale,
            logits_soft_cap=self._cap,
            window_left=self._windows,
        ) as step:
            self._step = step
            logits = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                logits_to_keep=(ends - 1).to(device),
            ).logits[0]
        step.wait()
        return logits.float().cpu()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention of one layer: `query [1, num_qo_heads, tokens, head_dim]`."""
        layer, count = module.layer_idx, query.shape[2]
        for place, states in zip(
            (self._step.q, self._step.k, self._step.v), (query, key, value), strict=True
        ):
            place(layer)[:count].copy_(states[0].transpose(0, 1))
        return self._step.attend(layer)[:count].unsqueeze(0), None


def scale_of(model: Any) -> float | None:
    """The scale of a model's logits; None: head_dim ** -0.5."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            return float(module.scaling)
    return None
