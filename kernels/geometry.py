"""The page pool's shape and storage, and the dtypes of pools and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np

Layout = Literal["NHD", "HND"]
Kind = Literal["attention", "latent"]
DType = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]

NUMPY_DTYPES: Final[dict[DType, np.dtype[Any]]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
TENSOR_DTYPES: Final[tuple[DType, ...]] = ("fp32", "fp16", "bf16")
"""Dtypes of q, k, v in requests, and of o in results."""
DIGESTED: Final = 2**17
"""Least bytes of a page under one digest, where it has them: the fewer, the more digests there are
to handle; the more, the longer one takes, whose blocks follow each other."""


POISON: Final = 0xFF
"""A byte that makes a NaN in every storage format."""
TOKENS_PER_PAGE: Final = (8, 16, 32, 64)
"""Tokens per page that a group other than the leading one can have."""
WEIGHED_TOKENS: Final = 32768
"""Length of the sequence for which the bytes of pages are weighed."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a model whose K and V have one shape, and whose tokens share pages.

    `layers` are the model's numbers, ascending. q and k have `head_dim` values a head, v and o
    `v_head_dim`. A row of a group with `window` w sees its own key and the w - 1 before it. A
    `latent` group has one kv head and stores one row of `head_dim` values per token: K is the row,
    V its first `v_head_dim` values.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: DType
    window: int | None = None
    kind: Kind = "attention"

    @property
    def window_left(self) -> int:
        """The window as `Scoring.window_left` counts it."""
        return -1 if self.window is None else self.window - 1

    @property
    def stored_dims(self) -> tuple[int, int]:
        """Stored values of a head's K and V; V of a latent group is in K."""
        return self.head_dim, 0 if self.kind == "latent" else self.v_head_dim

    @property
    def row_elements(self) -> tuple[int, int]:
        """Stored elements of a token's K and V in one layer."""
        keys, values = self.stored_dims
        return self.num_kv_heads * keys, self.num_kv_heads * values

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return sum(self.row_elements) * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that the group uses."""
        return len(self.layers) * self.layer_bytes


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Shape and storage of the page pool.

    A page id names a page of one group of layers (`layer_groups`; without any, all layers are one
    group with the fields below). A page in one layer is a block: `[2, page_size, num_kv_heads,
    head_dim]` (NHD) or `[2, num_kv_heads, page_size, head_dim]` (HND), K first, V with its own
    `v_head_dim`. Real value = stored value * scale (fp8 only).

    The blocks of one group's layers are apart: `[num_layers, num_pages]`. With several groups, a
    page's blocks are together, `[num_pages, blocks of a page]`, and padded to the same bytes for
    all groups; any page can be any group's. The fields below are then those of the leading group,
    the first one without a window.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: Layout = "NHD"
    dtype: DType = "fp16"
    k_scale: float = 1.0
    v_scale: float = 1.0
    layer_groups: tuple[LayerGroup, ...] = ()
    groups: tuple[LayerGroup, ...] = field(init=False, repr=False, compare=False)
    places: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """Each layer's group, and its place among the layers of that group."""
    leading: int = field(init=False, repr=False, compare=False)
    """Index of the first group without a window, which has the pool's page size."""

    def __post_init__(self) -> None:
        layers = tuple(range(self.num_layers))
        shape = (self.num_kv_heads, self.head_dim, self.head_dim, self.page_size, self.dtype)
        groups = self.layer_groups or (LayerGroup(layers, *shape),)
        found = sorted(
            (layer, g, at) for g, one in enumerate(groups) for at, layer in enumerate(one.layers)
        )
        if [layer for layer, _, _ in found] != list(layers):
            raise ValueError(f"layer_groups: must have each of the layers 0..{layers[-1]} once")
        windows = [one.window for one in groups]
        if None not in windows:
            raise ValueError("layer_groups: one group must have no window")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "places", tuple((g, at) for _, g, at in found))
        object.__setattr__(self, "leading", windows.index(None))

    @classmethod
    def of_groups(
        cls,
        groups: tuple[LayerGroup, ...],
        num_pages: int,
        layout: Layout = "NHD",
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> PoolGeometry:
        """A pool of `groups`."""
        first = next((one for one in groups if one.window is None), groups[0])
        return cls(
            sum(len(one.layers) for one in groups),
            num_pages,
            first.page_size,
            first.num_kv_heads,
            first.head_dim,
            layout,
            first.dtype,
            *scales,
            groups,
        )

    def group_of(self, layer: int) -> LayerGroup:
        """The group of a layer."""
        return self.groups[self.places[layer][0]]

    def scales_of(self, dtype: DType) -> tuple[float, float]:
        """(k_scale, v_scale) of values stored as `dtype`: the pool's for fp8, else (1, 1)."""
        return (self.k_scale, self.v_scale) if dtype.startswith("fp8") else (1.0, 1.0)

    @property
    def scales(self) -> tuple[float, float]:
        """(k_scale, v_scale) of fp8 pools; (1, 1) of others."""
        return self.scales_of(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer of the leading group."""
        return self.groups[self.leading].token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer of the leading group."""
        return self.groups[self.leading].layer_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page in all layers of its group, and what pads it."""
        return payload_bytes(self.groups)

    @property
    def num_pieces(self) -> int:
        """Places in memory that a page has: one for each layer, or one in all."""
        return self.num_layers if len(self.groups) == 1 else 1

    @property
    def piece_bytes(self) -> int:
        """Bytes of a page that are together."""
        return self.payload_bytes // self.num_pieces

    @property
    def segment_pieces(self) -> int:
        """Pieces of a page that have one digest."""
        return min(self.num_pieces, -(-DIGESTED // self.piece_bytes))

    def block_steps(self, group: LayerGroup) -> tuple[int, int]:
        """Blocks from a page to the next one, and from a layer of the group to its next one."""
        if len(self.groups) == 1:
            return 1, self.num_pages
        return self.payload_bytes // group.layer_bytes, 1

    def alone(self, group: LayerGroup) -> PoolGeometry:
        """The pages and the shape of a group, whose layers have their places as numbers; nothing of
        where they are."""
        scales = (self.k_scale, self.v_scale)
        own = replace(group, layers=tuple(range(len(group.layers))), window=None)
        return PoolGeometry.of_groups((own,), self.num_pages, self.layout, scales)

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer's tensor in a pool of one group."""
        inner = (self.page_size, self.num_kv_heads)
        inner = inner if self.layout == "NHD" else inner[::-1]
        return (self.num_pages, 2, *inner, self.head_dim)


def payload_bytes(groups: tuple[LayerGroup, ...]) -> int:
    """Bytes of a page of each of `groups`: whole blocks of all of them."""
    least = max(one.page_bytes for one in groups)
    whole = math.lcm(*(one.layer_bytes for one in groups)) if len(groups) > 1 else 1
    return whole * -(-least // whole)


def with_least_waste(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """The groups with tokens per page for which a long sequence holds the fewest bytes.

    The first group without a window keeps its own, which is a multiple of all others.
    """
    leading = next(one for one in groups if one.window is None)
    most = leading.page_size
    allowed = [size for size in TOKENS_PER_PAGE if most % size == 0] or [most]

    def held(chosen: tuple[LayerGroup, ...]) -> int:
        lengths = (min(one.window or WEIGHED_TOKENS, WEIGHED_TOKENS) for one in chosen)
        pages = (
            -(-length // one.page_size) + (one.window is not None)
            for one, length in zip(chosen, lengths, strict=True)
        )
        return sum(pages) * payload_bytes(chosen)

    sizes = ([most] if one is leading else allowed for one in groups)
    return min(
        (
            tuple(replace(one, page_size=size) for one, size in zip(groups, chosen, strict=True))
            for chosen in product(*sizes)
        ),
        key=held,
    )
