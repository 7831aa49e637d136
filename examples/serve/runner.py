"""Runs a transformers model: ragged batches in, logits out. Attention and KV are attnd's.

In vLLM this is the model runner with its attention backend and block tables, in SGLang the model
runner with its radix attention. Here a forward is one step of a `TorchSession`, and the runner
knows sequences by their ids: it stores no KV and counts no pages. On a GPU forwards are recorded as
CUDA graphs, one for each padded number of tokens: a graph does not fix attention, so
decodes and prompts share them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from attnd import AttndError, NewSequence, Prefix
from attnd.torch import TorchSession
from attnd.transformers import check_pool, geometry_of, salt_of
from torch import Tensor
from transformers import AttentionInterface

LOG: Final = logging.getLogger("serve")
TTL_S: Final = 600.0
"""After which attnd deletes the idle sequences of a process that was killed."""


UNRECORDED: Final = (
    "forwards are not recorded ({}), and beside an engine in this process others may wait for "
    "ever: run `attnd serve`, and name it by --attnd"
)


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of a sequence that holds `stored` tokens."""

    sequence: str
    tokens: Sequence[int]
    stored: int


class Runner:
    """One model and one session; for one thread.

    `connect` opens a session: again after its engine was restarted. A batch has `max_rows` rows and
    `max_tokens` tokens at most. `salt` keeps the model's KV apart from that of others that share
    the attnd; None: a digest of the model. Raises RuntimeError where forwards that are not recorded
    could wait for ever.
    """

    def __init__(
        self,
        model: Any,
        connect: Callable[[], TorchSession],
        max_rows: int,
        max_tokens: int,
        salt: str | None = None,
    ) -> None:
        self.model, self._connect = model, connect
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._geometry = geometry_of(model)
        self._salt = salt or salt_of(model)
        self._no_mask = torch.zeros((1, 1, 1, 1), device=model.device)
        self._recordings: dict[int, tuple[tuple[Tensor, ...], Tensor, Any]] = {}
        """By tokens: tensors to fill (tokens, positions, rows whose logits are kept), the logits
        that a replay writes, and the graph."""
        self._ids = f"serve-{uuid.uuid4().hex[:12]}-"
        self._new_ids = map(f"{self._ids}{{}}".format, itertools.count())
        AttentionInterface.register(self._ids, self._attend)
        model.set_attn_implementation(self._ids)
        self._begin()

    def change(self, change: Callable[[], None], salt: str | None = None) -> None:
        """Change the model in place, by training or another adapter. No sequence is left, and KV of
        the model as it was is not found again. With a `salt` of its own, the caller gives the
        next one."""
        try:
            change()
        finally:
            self._salt = salt or salt_of(self.model)
            self.reconnect()

    def reconnect(self) -> None:
        """Open a new session. No sequence is left."""
        self.session.close()
        self._begin()

    def _begin(self) -> None:
        self.session = self._connect().with_options(cache_salt=self._salt)
        check_pool(self._geometry, self.session.info())
        heads, sinks = self._geometry.num_qo_heads, self._geometry.has_sinks
        self._slots = self.session.slots(self.max_tokens, heads, sinks=sinks)
        self.session.delete_sequences(prefix=self._ids)
        try:
            self._record()
        except RuntimeError as error:
            if self.session.placement.kind == "same_process":
                self.close()
                raise RuntimeError(UNRECORDED.format(error)) from error
            LOG.warning("forwards are not recorded, so they run as they are: %s", error)

    def close(self) -> None:
        """Delete the sequences and end the session, unless attnd is away or it is closed."""
        with contextlib.suppress(AttndError, RuntimeError):
            self.session.delete_sequences(prefix=self._ids)
        self.session.close()

    def create(self, tokens: Sequence[int]) -> tuple[str, int]:
        """A sequence that begins with the cached part of `tokens`: its id, and how many these are.

        The last token is never taken from the cache: its logits are needed.
        """
        known = Prefix(tokens[:-1])
        made = self.session.create_sequence(next(self._new_ids), prefix=known, ttl_s=TTL_S)
        return made.id, made.cached_len or 0

    def fork(self, sequence: str, length: int, count: int) -> list[str]:
        """Sequences that share the first `length` tokens."""
        ids = list(itertools.islice(self._new_ids, count))
        new = [NewSequence(one, sequence, length, ttl_s=TTL_S) for one in ids]
        self.session.create_sequences(new)
        return ids

    def commit(self, sequence: str, tokens: Sequence[int], committed: int) -> int:
        """Cache the full pages of these tokens; `committed` are cached already."""
        new = Prefix(tokens[committed:])
        return self.session.commit(sequence, new, offset=committed).committed_len

    def delete(self, sequences: Sequence[str]) -> None:
        self.session.delete_sequences(list(sequences))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Logits `[rows, vocabulary]` after each row's last token, on the model's device.

        Raises OutOfPages and other errors of attnd; then nothing was stored. The next forward
        overwrites the logits.
        """
        counts = [len(row.tokens) for row in rows]
        ends = list(itertools.accumulate(counts))
        given = (
            torch.tensor([token for row in rows for token in row.tokens]),
            torch.tensor([row.stored + i for row in rows for i in range(len(row.tokens))]),
            torch.tensor(ends) - 1,
        )
        size = min((size for size in self._recordings if size >= ends[-1]), default=None)
        ids, sums = [row.sequence for row in rows], None if max(counts) == 1 else [0, *ends]
        with self.session.step(ids, self._slots, qo_indptr=sums, **self._geometry.scoring) as step:
            if size is None:
                logits = self._model(tuple(one.to(self.model.device) for one in given))
            else:
                inputs, logits, graph = self._recordings[size]
                for place, values in zip(inputs, given, strict=True):
                    place[: len(values)].copy_(values, non_blocking=True)
                graph.replay()
            step.release_to_engine()
        step.wait()
        return logits[: len(rows)]

    def _model(self, inputs: tuple[Tensor, ...]) -> Tensor:
        tokens, positions, kept = inputs
        logits: Tensor = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,  # else transformers makes one, and asks the GPU for it
            use_cache=False,
            logits_to_keep=kept,
        ).logits[0]
        return logits

    @torch.inference_mode()
    def _record(self) -> None:
        """On a GPU: record forwards of every size, over the slots of this session."""
        device = self.model.device
        self._recordings.clear()
        if device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for size in recorded_sizes(self.max_tokens):
            counts = (size, size, min(size, self.max_rows))
            inputs = tuple(torch.zeros(n, dtype=torch.int64, device=device) for n in counts)
            with self._slots.rehearsal():
                self._model(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._model(inputs)
            self._recordings[size] = inputs, logits, graph

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """The attention of one layer: `q [1, num_qo_heads, tokens, head_dim]`."""
        layer, count, slots = module.layer_idx, q.shape[2], self._slots
        self._geometry.check_layer(options)
        for place, states in zip((slots.q, slots.k, slots.v), (q, k, v), strict=True):
            place(layer)[:count].copy_(states[0].transpose(0, 1))
        if (sinks := options.get("s_aux")) is not None:
            slots.sinks[layer].copy_(sinks)
        return slots.attend(layer)[:count].unsqueeze(0), None


def recorded_sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`; the largest first: the others fit its memory."""
    powers = [2**i for i in range(most.bit_length())]
    sizes = {most, *powers, *(power * 3 // 2 for power in powers)}
    return sorted((size for size in sizes if size <= most), reverse=True)
