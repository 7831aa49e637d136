"""The layout of a step's arrays in an arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Generic, NamedTuple, TypeVar

from attnd.wire.slots import ALIGNMENT

A = TypeVar("A")
"""The array type: numpy's or torch's."""

NAMES: Final = ("q", "k", "v", "o", "lse")
Place = dict[str, int]
"""Offsets in the arena by name, as a step's description has them."""


class Tensors(NamedTuple, Generic[A]):
    """A layer's q and o `[rows, num_qo_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]`,
    and lse `[rows, num_qo_heads]` in float32."""

    q: A
    k: A
    v: A
    o: A
    lse: A


class OfLayers(Generic[A]):
    """The arrays of a step's layers, by the name of each."""

    tensors: Callable[[int], Tensors[A]]

    def q(self, layer: int) -> A:
        """Queries, to be written before `attend`."""
        return self.tensors(layer).q

    def k(self, layer: int) -> A:
        """Keys of the new tokens, to be written before `attend` in steps that append."""
        return self.tensors(layer).k

    def v(self, layer: int) -> A:
        """Values of the new tokens."""
        return self.tensors(layer).v

    def o(self, layer: int) -> A:
        """Output, valid after `attend` in the order of torch's current stream."""
        return self.tensors(layer).o

    def lse(self, layer: int) -> A:
        """Log-sum-exp in the step's base."""
        return self.tensors(layer).lse


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The element types of an array library, by the names of the wire and of the pool."""

    wire: Mapping[Any, str]
    pool: Mapping[str, Any]
    bf16: Any
    float32: Any
    boolean: Any
    uint8: Any
    read: Callable[[Any], Any]
    """An element type from any of the library's names for it."""

    def chosen(self, dtype: Any, pool: str) -> Any:
        """`dtype`, or the pool's where it is None; bf16 for fp8. Raises ValueError."""
        found = self.pool.get(pool, self.bf16) if dtype is None else self.read(dtype)
        if found not in self.wire:
            known = ", ".join(str(one) for one in self.wire)
            raise ValueError(f"dtype is {dtype}: slots take {known}")
        return found


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes and dtypes of a slot."""

    rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    float32: Any
    others: Mapping[str, tuple[Any, tuple[int, ...]]]
    """dtype and shape of the arrays that all layers share: sinks, a mask."""

    @property
    def each(self) -> tuple[tuple[Any, tuple[int, ...]], ...]:
        """dtype and shape of every array, in the order of `NAMES`."""
        query = (self.rows, self.num_qo_heads, self.head_dim)
        stored = (self.rows, self.num_kv_heads, self.head_dim)
        shapes = (query, stored, stored, query)
        return *((self.dtype, shape) for shape in shapes), (self.float32, query[:2])

    def layout(self, rotation: int) -> tuple[tuple[Place, ...], Place, int]:
        """Places of `rotation` slots and of the other arrays in a stretch of memory, and its length
        in bytes."""
        each = dict(zip(NAMES, self.each, strict=True))
        places, end = [], 0
        for arrays in (*[each] * rotation, self.others):
            place = {}
            for name, (dtype, shape) in arrays.items():
                place[name] = end
                end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            places.append(place)
        return tuple(places[:-1]), places[-1], end
