"""Slots: the arrays of a step's layers, in an arena shared with the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any, Final, Generic, Protocol, TypeVar

from attnd.road.arena import Slot
from attnd.road.arena import Slots as FreeSlots
from attnd.steps.layout import NAMES, A, OfLayers, Place, Shapes, Tensors
from attnd.wire.slots import ALIGNMENT

PAGE: Final = 4096
FLAG_BYTES: Final = 8
"""Of a layer: ready and done, 32 bits each."""
UNWRITTEN: Final = {"sinks": -inf, "mask": True, "packed_mask": 0xFF}
"""The arrays that all layers share, before the caller writes to them: without effect."""
Made = TypeVar("Made", covariant=True)


class Arena(Protocol[Made]):
    """Memory shared with the engine, from `flags` to `size`."""

    @property
    def flags(self) -> int: ...

    @property
    def size(self) -> int: ...

    def hand_over(self, layer: int) -> None:
        """Releases a layer to the engine and waits for it, in the order of the caller's work."""

    def settle(self) -> None:
        """Waits for the caller's outstanding work."""

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...], owner: object) -> Made:
        """An array over the arena, which keeps `owner` alive."""

    def close(self) -> None:
        """Ends the threads of the arena."""


class Slots(OfLayers[A]):
    """Made by `slots` of a session. Addresses are the same in every step, whatever its sequences:
    a CUDA graph may be captured over them. Layer l uses the arrays of layer `l % rotation`.
    """

    def __init__(
        self,
        place: Slot,
        tensors: tuple[Tensors[A], ...],
        arena: Arena[A],
        at: tuple[Place, ...],
        others: Mapping[str, tuple[int, A]],
    ) -> None:
        self._place = place  # the arena's bytes are freed with this
        self._tensors = tensors
        self._first: Any = tensors[0].q
        self.arena = arena
        self.places = at
        """Offsets in the arena, as the step's description has them."""
        self._others_at = {name: place for name, (place, _) in others.items()}
        self._others = {name: array for name, (_, array) in others.items()}
        self._is_rehearsal = False

    @property
    def sinks(self) -> A:
        """A sink for each layer of the pool and head, float32 `[num_layers, num_qo_heads]`: -inf,
        which is none, until it is written. They are read at each layer's `attend`.
        """
        return self._other("sinks")

    @property
    def mask(self) -> A:
        """The mask of steps with `mask=True`, flat, all visible at first: bool `[rows^2]`, or bits
        of uint8. For each sequence in turn, element `[i, j]` of its `[its rows, its rows]` says
        whether its row i sees its row j; bits are in little order, and each sequence begins at a
        whole byte. It is read at the step's first `attend`.
        """
        return self._other("mask")

    def _other(self, name: str) -> A:
        found = self._others.get(name, self._others.get(f"packed_{name}"))
        if found is None:
            raise ValueError(f"these slots have no {name}: make them with slots(..., {name}=True)")
        return found

    def others_for(self, masked: bool) -> dict[str, int]:
        """Offsets of the arrays that a step reads beside its layers', with or without the mask."""
        if masked:
            self._other("mask")
        return {n: at for n, at in self._others_at.items() if masked or n == "sinks"}

    @property
    def rows(self) -> int:
        return int(self._first.shape[0])

    @property
    def num_qo_heads(self) -> int:
        return int(self._first.shape[1])

    @property
    def dtype(self) -> Any:
        return self._first.dtype

    def tensors(self, layer: int) -> Tensors[A]:
        return self._tensors[layer % len(self._tensors)]

    def attend(self, layer: int) -> A:
        """Release the layer to the engine. Later work of torch's current stream finds `o`; on CUDA
        the host does not wait. May be captured in a CUDA graph. Returns `o(layer)`."""
        self._check_gradients(layer)
        if not self._is_rehearsal:
            self.arena.hand_over(layer)
        return self.o(layer)

    def _check_gradients(self, layer: int) -> None:
        """ValueError, once, for tensors that were written with gradients, which would grow their
        graph in every step."""
        q, k, v, *_ = self.tensors(layer)
        written: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": self._others.get("sinks")}
        for name, array in written.items():
            if getattr(array, "requires_grad", False):
                array.detach_()
                raise ValueError(
                    f"{name} was written with a gradient, which attnd's attention does not have: "
                    "write it under torch.no_grad() or torch.inference_mode()"
                )

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within it `attend` returns `o(layer)` as it is: without a step, the engine would never
        reply. Warms up what is captured in a CUDA graph afterwards."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False


class Room(Generic[A]):
    """Free and taken stretches of an arena."""

    def __init__(self, arena: Arena[A], num_layers: int) -> None:
        self.arena = arena
        head = -(-(FLAG_BYTES * num_layers + ALIGNMENT) // PAGE) * PAGE
        self._begin = arena.flags + head  # behind the flags and the spare number
        self.spare = self._begin - ALIGNMENT
        """Offset of an unused number, on which an echo works."""
        self._free = FreeSlots(arena.size - self._begin)
        self._taken: weakref.WeakSet[Slot] = weakref.WeakSet()

    @property
    def is_free(self) -> bool:
        """Whether no slots of it, nor arrays of them, are in use."""
        return len(self._taken) == 0

    @property
    def size(self) -> int:
        return self._free.size

    def slots(self, shapes: Shapes, rotation: int) -> Slots[A] | None:
        """Slots for these shapes; None when there is no room for them."""
        places, others_at, size = shapes.layout(rotation)
        taken = self._free.take(size)
        if taken is None:
            return None
        self._taken.add(taken)
        begin = self._begin + taken.offset
        at = tuple({name: begin + offset for name, offset in place.items()} for place in places)
        tensors = tuple(
            Tensors(
                *(
                    self.arena.array(place[name], dtype, shape, taken)
                    for name, (dtype, shape) in zip(NAMES, shapes.each, strict=True)
                )
            )
            for place in at
        )
        others = {}
        for name, (dtype, shape) in shapes.others.items():
            offset = begin + others_at[name]
            values: Any = self.arena.array(offset, dtype, shape, taken)
            values[...] = UNWRITTEN[name]
            others[name] = offset, values
        return Slots(taken, tensors, self.arena, at, others)
