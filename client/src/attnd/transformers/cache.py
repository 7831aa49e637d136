"""`AttndCache`: transformers' cache interface over sequences of attnd."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Self

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from attnd.client import Client
from attnd.errors import AttndError
from attnd.session import Session
from attnd.torch.session import TorchSession
from attnd.transformers.attention import LATEST, NAME, TAG
from attnd.transformers.batch import Batch, watch
from attnd.transformers.device import DeviceRoad
from attnd.transformers.geometry import Geometry, check_pool, geometry_of
from attnd.transformers.graphs import Decodes, replaying
from attnd.transformers.host import HostRoad
from attnd.transformers.longrope import keep_cache
from attnd.transformers.prefixes import share
from attnd.transformers.roads import Road, delete_behind, outside_graphs, uncompiled


class AttndCache(Cache):  # type: ignore[misc]  # transformers asks isinstance(..., Cache)
    """K and V of one batch, held by attnd: give it as `past_key_values` to a model or `generate`.

    Every row is one sequence; padding is not stored. `crop`, `reorder_cache` and their like cut
    and fork sequences. A forward that fails is undone before the next one. Close the cache, or
    use it with `with`: its sequences are deleted then, or when it is collected, or when the
    interpreter ends, or when its session is closed. In a process that was forked from the one that
    made the cache, none of these deletes them. One thread at a time.
    """

    def __init__(self, session: Session | Client, model: Any, *, dtype: str | None = None) -> None:
        """`dtype` is the pool's, if it differs from the model's: K and V are then rounded.

        Raises ValueError when the model asks for what attnd does not serve, or when the pool is not
        the model's; then with the command that starts the right service.
        """
        geometry = geometry_of(model, dtype)
        if model.config._attn_implementation != NAME:
            now = model.config._attn_implementation
            remedy = f'call model.set_attn_implementation("{NAME}") first'
            raise ValueError(f"the model's attn_implementation is {now!r}: {remedy}")
        watch(model)
        if geometry.rope_tokens is not None:
            keep_cache(uncompiled(model))
        several = len(session.info().groups or ()) > 1  # a step is through layers of one group
        road: Road[Any] = (
            DeviceRoad(session, geometry.windows, geometry.has_sinks)
            if isinstance(session, TorchSession) and may_step(session) and not several
            else HostRoad(session)
        )
        info = road.control.info()
        check_pool(geometry, info)
        self._set_up(road, geometry, info.page_size)

    def _set_up(
        self, road: Road[Any], geometry: Geometry, page_size: int, *, forked: bool = False
    ) -> None:
        # without data: they answer for transformers what kind of layers these are
        super().__init__(layers=[DynamicLayer() for _ in range(geometry.num_layers)])
        self._forked = forked
        self._decodes: Decodes | None = None
        self._geometry = geometry
        self._page_size = page_size
        self._given: int | None = None
        self.batch = Batch(road, geometry.num_layers)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(
            self, delete_behind, road.control, self.batch.names, self._pid
        )
        self._finalizer.atexit = False
        road.control.dependents.add(self.close)
        OPEN.add(self)

    @outside_graphs
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the new k and v, `[rows, num_kv_heads, columns, head_dim]`: attention comes next.

        They are the answer as well, without those before. Raises ValueError where they do not fit
        the pool, RuntimeError when the attention of the layer before was not attnd's.
        """
        if (missed := self._given) is not None:
            self._given = None
            raise RuntimeError(
                f"layer {missed} gave the cache k and v, and its attention was not attnd's: call "
                f'model.set_attn_implementation("{NAME}"); where that was done, the model computes '
                "this attention in its own code, and attnd cannot serve it"
            )
        shapes = self._geometry.shapes
        wanted = shapes[layer_idx] if layer_idx < len(shapes) else shapes[-1]
        for name, states in (("k", key_states), ("v", value_states)):
            found = (states.shape[1], states.shape[3])
            if found != wanted or layer_idx >= len(self):
                raise ValueError(
                    f"layer {layer_idx} gives {name} of {found[0]} heads x {found[1]}, the pool "
                    f"has {len(self)} layers of {wanted[0]} x {wanted[1]}: "
                    "attnd cannot serve this model"
                )
        self._given = layer_idx
        for states in (key_states, value_states):
            setattr(states, TAG, (self, layer_idx))
        LATEST.append(weakref.ref(self))
        return key_states, value_states

    def awaits(self, layer: int | None) -> bool:
        """Whether k and v of this layer were given, and its attention has not come yet."""
        return self._given is not None and layer in (None, self._given)

    def taken(self) -> Batch:
        """Attention takes up the k and v that were given last."""
        self._given = None
        return self.batch

    def __len__(self) -> int:
        return self._geometry.num_layers

    def __repr__(self) -> str:
        return f"AttndCache({len(self.sequences)} sequences, {self.get_seq_length()} columns)"

    @property
    def sequences(self) -> tuple[str, ...]:
        """The ids of the rows' sequences in the service."""
        return tuple(self.batch.names)

    @outside_graphs
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that forwards have covered, padding included; the same for every layer."""
        return self.batch.covered

    @outside_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def rope_tokens(self) -> int | None:
        return self._geometry.rope_tokens

    @property
    def batch_size(self) -> int:
        return len(self.batch.names) or -1

    @property
    def is_initialized(self) -> bool:
        return self.batch.columns is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: `-n` for n of them, as transformers' caches count."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): -n removes the last n columns")
        self.batch.settle()
        if self.batch.columns is not None:
            self.batch.cut(self.batch.columns.crop(-tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues row `beam_idx[i]`."""
        self.batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, as `generate` does for beams and return sequences."""
        self.batch.select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, by numbers or by a mask."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.batch.select(chosen.tolist())

    def share_prefix(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> int:
        """Compute common beginnings of the prompts of a batch once, and fork them for each.

        Give `generate` the same `input_ids` and `attention_mask` afterwards. Groups share as well:
        all a system prompt, some of them a document behind it. Less than a page is not shared.
        Answers how many tokens are not computed again. Raises RuntimeError when the cache is not
        empty.
        """
        self.batch.settle()
        if self.batch.columns is not None:
            raise RuntimeError("share_prefix comes first: the cache holds a batch already")
        shared = share(self, model, input_ids, attention_mask, self._page_size)
        self.batch.names += shared.sequences
        self.batch.columns = shared.columns
        return shared.saved

    @property
    def has_steps(self) -> bool:
        """Whether a `TorchSession` carries the forwards."""
        return isinstance(self.batch.road, DeviceRoad)

    def graphs(self, model: Any) -> AbstractContextManager[Decodes]:
        """`with cache.graphs(model):` decodes within are replayed as a CUDA graph, not run again.

        That spares the host's work for each operation of the model, which is most of a decode's
        time on a fast GPU. Needs a `TorchSession` (RuntimeError); the model must do the same
        operations in each decode, and the next decode overwrites its logits. Other calls of the
        model run normally. The graph is kept for the next use: `reset()` the cache for another
        batch.
        """
        if not isinstance(self.batch.road, DeviceRoad):
            raise RuntimeError(
                "graphs need an attnd.torch.TorchSession, on a GPU with its engine in another "
                "process: this cache has none"
            )
        model = uncompiled(model)  # the one whose `generate` this is
        if self._decodes is None or self._decodes.model is not model:
            self._decodes = Decodes(model, self.batch, self.batch.road)
        return replaying(self, self._decodes)

    def fork(self, rows: Sequence[int] | None = None) -> Self:
        """Another cache whose rows continue these rows (None: all), sharing their pages."""
        self.batch.settle()
        other = type(self).__new__(type(self))
        other._set_up(self.batch.road, self._geometry, self._page_size, forked=True)
        chosen = list(range(len(self.sequences)) if rows is None else rows)
        other.batch.names += self.batch.forks(chosen)
        if self.batch.columns is not None:
            other.batch.columns = self.batch.columns.select(chosen)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def reset(self) -> None:
        """Delete the sequences; the cache is as new."""
        self.batch.clear()

    def close(self) -> None:
        """Delete the sequences; the cache cannot be used any more."""
        if not self.batch.closed:
            is_ours = self._pid == os.getpid()
            try:
                if is_ours:
                    self.batch.clear()
            finally:
                self.batch.closed = True
                self._decodes = None
                if is_ours and not self._forked:  # forks use the memory of their cache
                    self.batch.road.release()
                self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


OPEN: Final[weakref.WeakSet[AttndCache]] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """At the interpreter's end, while sessions still work."""
    for cache in list(OPEN):
        with suppress(AttndError, RuntimeError, OSError):
            cache.close()


def may_step(session: TorchSession) -> bool:
    """Whether forwards may be steps. In the engine's own CUDA context a kernel that the model
    launches for the first time in an open step would wait for ever: layers are calls there."""
    return session.placement.kind != "same_process"
