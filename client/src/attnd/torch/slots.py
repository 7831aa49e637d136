"""Slots: where the tensors of a step's layers lie, and how a layer is handed over from there."""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple, Protocol

import torch

from attnd.road.arena import ALIGNMENT, Slot

NAMES: Final = ("q", "k", "v", "o", "lse")


class Tensors(NamedTuple):
    """A layer's q and o `[rows, num_qo_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]`,
    and lse `[rows, num_qo_heads]` in float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor


class Arena(Protocol):
    """Where slots lie."""

    def hand_over(self, layer: int) -> None:
        """To the engine and back, in the order of the current stream."""
        ...


class Slots:
    """Made by `TorchSession.slots`. Addresses are the same in every step, whatever its sequences:
    a CUDA graph may be captured over them. Layer l uses the tensors of layer `l % rotation`.
    """

    def __init__(
        self,
        place: Slot,
        tensors: tuple[Tensors, ...],
        inputs: tuple[torch.Tensor, ...],
        arena: Arena,
        places: tuple[dict[str, int], ...],
    ) -> None:
        self._place = place  # the arena's bytes are free again when this is gone
        self._tensors = tensors
        self._inputs = inputs
        self.arena = arena
        self.places = places
        """Offsets in the arena, as the step's description has them."""

    @property
    def rows(self) -> int:
        return self._tensors[0].q.shape[0]

    @property
    def num_qo_heads(self) -> int:
        return self._tensors[0].q.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors[0].q.dtype

    def inputs(self, layer: int) -> torch.Tensor:
        """q, k and v as one stretch of bits, int32."""
        return self._inputs[layer % len(self._inputs)]

    def q(self, layer: int) -> torch.Tensor:
        """Queries, to be written before `attend`."""
        return self._tensors[layer % len(self._tensors)].q

    def k(self, layer: int) -> torch.Tensor:
        """Keys of the new tokens, to be written before `attend` in steps that append."""
        return self._tensors[layer % len(self._tensors)].k

    def v(self, layer: int) -> torch.Tensor:
        """Values of the new tokens."""
        return self._tensors[layer % len(self._tensors)].v

    def o(self, layer: int) -> torch.Tensor:
        """Output, there after `attend` in the order of the current stream."""
        return self._tensors[layer % len(self._tensors)].o

    def lse(self, layer: int) -> torch.Tensor:
        """Log-sum-exp in the step's base."""
        return self._tensors[layer % len(self._tensors)].lse

    def attend(self, layer: int) -> torch.Tensor:
        """Hand the layer over: what torch's current stream is given next finds `o`, and the host
        does not wait for it on CUDA. May be captured in a CUDA graph. Returns `o(layer)`."""
        self.arena.hand_over(layer)
        return self._tensors[layer % len(self._tensors)].o


class Shapes(NamedTuple):
    """What a slot holds."""

    rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def each(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """dtype and shape of every tensor, in the order of `NAMES`."""
        query = (self.rows, self.num_qo_heads, self.head_dim)
        stored = (self.rows, self.num_kv_heads, self.head_dim)
        shapes = (query, stored, stored, query)
        return *((self.dtype, shape) for shape in shapes), (torch.float32, query[:2])

    def layout(self, rotation: int) -> tuple[tuple[dict[str, int], ...], int]:
        """Where everything lies in a stretch of memory, and how long that is."""
        places, end = [], 0
        for _ in range(rotation):
            place = {}
            for name, (dtype, shape) in zip(NAMES, self.each, strict=True):
                place[name] = end
                end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            places.append(place)
        return tuple(places), end

    @torch.inference_mode(False)  # made within it, they could be written to only there
    def tensors(self, memory: torch.Tensor, place: dict[str, int]) -> Tensors:
        """The tensors at `place` of the arena's bytes."""
        made = []
        for name, (dtype, shape) in zip(NAMES, self.each, strict=True):
            begin = place[name]
            part = memory[begin : begin + prod(shape) * dtype.itemsize]
            made.append(part.view(dtype).view(shape))
        return Tensors(*made)
