"""The page pool on the host: every layer's K and V, as stored bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from kernels.backend import (
    NUMPY_DTYPES,
    Array,
    DType,
    EndOfCopies,
    Int32,
    LayerGroup,
    Layout,
    PagePlaces,
    PoolGeometry,
    UInt8,
)
from kernels.cpu.tensors import BITS, TORCH_DTYPES, narrow, to_torch, widen
from kernels.digests import host_digests

JOINT_ELEMENTS: Final = 64 * 1024
"""Elements of K up to which K and V are gathered and widened by one call each, and not by two."""


@dataclass(frozen=True, slots=True)
class StoredPages:
    """K or V of all layers, for 5-D and for paired 4-D storage alike.

    `bits` is 5-D `[layers, pages, ...]`, inner axes by `layout`; its pages may be strided. `flat`
    views the memory as `[units, page elements]`: block g of the pool (`PoolGeometry.block_steps`)
    is unit `g * step + first`.
    """

    bits: torch.Tensor
    flat: torch.Tensor
    step: int
    first: int
    layout: Layout
    dtype: DType
    scale: float

    @property
    def by_token(self) -> torch.Tensor:
        """View `[layers, pages, page_size, heads, dim]`, whatever the layout."""
        return self.bits if self.layout == "NHD" else self.bits.transpose(2, 3)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    def write(self, layer: int, page: torch.Tensor, offset: torch.Tensor, rows: Array) -> None:
        """Quantise `rows [n, heads, dim]` into the token slots (page, offset)."""
        self.by_token[layer, page, offset] = narrow(to_torch(rows), self.dtype, self.scale)

    def write_bits(
        self, layer: int, page: torch.Tensor, offset: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Store `rows [n, heads, dim]` of the pool's own dtype as they are."""
        if rows.dtype != self.torch_dtype:
            raise ValueError(f"rows are {rows.dtype}: must be {self.torch_dtype}, as the pool is")
        self.by_token[layer, page, offset] = rows.view(BITS[rows.itemsize])

    def read(self, layer: int, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Real values of token slots, float32 `[n, heads, dim]`."""
        values = widen(self.by_token[layer, page, offset], self.dtype)
        return values if self.scale == 1.0 else values.mul(self.scale)

    def copy(self, src: torch.Tensor, dst: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy token slots (src, offset) to (dst, offset) in every layer."""
        self.by_token[:, dst, offset] = self.by_token[:, src, offset]

    def loads_as_is(self, runs: int) -> bool:
        """Whether gathered values need no second pass."""
        return runs == 1 and self.dtype == "fp32" and self.layout == "NHD"

    def loads_jointly(self, runs: int, per_run: int) -> bool:
        """Whether K and V are cheaper to bring together: the calls cost more than the bytes."""
        small = runs * per_run * self.flat.shape[1] <= JOINT_ELEMENTS
        return small and not self.loads_as_is(runs)

    def load(self, pages: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Runs of pages as unscaled float32 `[G * heads, num_keys, dim]`, cut to `num_keys` keys.

        `pages` int64 `[G, P]` are blocks of the pool. One pass over whole pages.
        """
        runs, per_run = pages.shape
        stored = self.flat.index_select(0, self.units(pages))
        stored = stored.view(runs, per_run, *self.bits.shape[2:])
        by_token = stored if self.layout == "NHD" else stored.transpose(2, 3)
        if self.loads_as_is(runs):
            keys = by_token.view(torch.float32).flatten(1, 2)[0].transpose(0, 1)
        else:
            keys = widen(by_token.permute(0, 3, 1, 2, 4), self.dtype).flatten(2, 3).flatten(0, 1)
        return keys[:, :num_keys]

    def units(self, pages: torch.Tensor) -> torch.Tensor:
        """The units of blocks, one after another."""
        return pages.reshape(-1) * self.step + self.first

    def stored(self, units: torch.Tensor, shape: tuple[int, ...], num_keys: int) -> torch.Tensor:
        """Units as they are, `[..., G, heads, num_keys, dim]`, where `shape` `[..., G, P]` has runs
        of units."""
        stored = self.flat.index_select(0, units).view(self.torch_dtype)
        stored = stored.view(*shape, *self.bits.shape[2:])
        if self.layout == "NHD":
            keys = stored.flatten(-4, -3).transpose(-3, -2)
        else:
            keys = stored.transpose(-4, -3).flatten(-3, -2)
        return keys.narrow(-2, 0, num_keys) if num_keys < keys.shape[-2] else keys


@dataclass(frozen=True, slots=True)
class Pool:
    """K and V of a pool.

    `joint` views a buffer that holds both as `[blocks, 2, inner axes by layout]`. With
    `latent_dim`, V is the first values of K, and `v` has rows of no values.
    """

    k: StoredPages
    v: StoredPages
    joint: torch.Tensor | None = None
    latent_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Values of a row of V."""
        return self.v.bits.shape[-1] if self.latent_dim is None else self.latent_dim

    def load(self, pages: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of runs of blocks int64 `[G, P]`, each as `StoredPages.load` gives it."""
        runs, per_run = pages.shape
        if self.latent_dim is not None:
            rows = self.k.load(pages, num_keys)
            return rows, rows[..., : self.latent_dim]
        if self.joint is None or not self.k.loads_jointly(runs, per_run):
            return self.k.load(pages, num_keys), self.v.load(pages, num_keys)
        stored = self.joint.index_select(0, pages.view(-1)).view(
            runs, per_run, *self.joint.shape[1:]
        )
        by_token = stored if self.k.layout == "NHD" else stored.transpose(3, 4)
        keys = widen(by_token.permute(2, 0, 4, 1, 3, 5), self.k.dtype)
        k, v = keys.flatten(3, 4).flatten(1, 2)[:, :, :num_keys]
        return k, v

    def load_stored(self, pages: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of runs of blocks int64 `[G, P]` as they are, each `[G, heads,
        num_keys, dim]`."""
        runs, per_run = pages.shape
        if self.joint is None or runs * per_run * self.k.flat.shape[1] > JOINT_ELEMENTS:
            k, v = (one.stored(one.units(pages), pages.shape, num_keys) for one in (self.k, self.v))
        else:
            units = torch.cat((self.k.units(pages), self.v.units(pages)))
            k, v = self.k.stored(units, (2, runs, per_run), num_keys)
        return k, v


class HostPageCopies:
    """`PageCopies` of a pool in host memory: the thread that waits for a copy makes it.

    numpy and xxhash work without the interpreter's lock.
    """

    calls = 1

    def __init__(self, memory: torch.Tensor, geometry: PoolGeometry) -> None:
        """`memory`: the pool's bytes, `[pieces, pages, piece bytes]`."""
        self._pages: UInt8 = memory.numpy()
        self._geometry = geometry

    def is_prepared(self, places: PagePlaces) -> bool:
        return True

    def prepare(self, places: PagePlaces) -> None:
        pass

    def memory(self, count: int, size: int) -> UInt8:
        return np.zeros((count, size), np.uint8)

    def mark(self) -> None:
        return None

    def read(self, pages: Int32, to: PagePlaces, after: object) -> EndOfCopies:
        return EndOfCopies(partial(self._copy, pages, to, is_load=False))

    def write(self, pages: Int32, source: PagePlaces, after: object) -> EndOfCopies:
        return EndOfCopies(partial(self._copy, pages, source, is_load=True))

    def _copy(self, pages: Int32, places: PagePlaces, is_load: bool) -> list[bytes]:
        size = self._geometry.payload_bytes
        for page, row in zip(pages.tolist(), places.rows.tolist(), strict=True):
            block = places.blocks[row, places.skip : places.skip + size]
            both = (self._pages[:, page], block.reshape(len(self._pages), -1))
            np.copyto(*(both if is_load else both[::-1]))
        return host_digests(places, self._geometry)


def allocate(geometry: PoolGeometry) -> torch.Tensor:
    """The bytes of a pool, `[pieces, pages, piece bytes]`; memory is taken as pages are written.

    Raises `MemoryError` when the machine would never have that much.
    """
    shape = (geometry.num_pieces, geometry.num_pages, geometry.piece_bytes)
    try:
        return torch.empty(shape, dtype=torch.uint8)
    except RuntimeError as error:
        size = geometry.num_pages * geometry.payload_bytes
        remedy = "lower pool.num_pages"
        raise MemoryError(f"the pool needs {size} bytes, more than there are: {remedy}") from error


def pool_of(memory: torch.Tensor, geometry: PoolGeometry, group: LayerGroup) -> Pool:
    """The pages of one group of layers in a pool's memory."""
    of_page, of_layer = geometry.block_steps(group)
    blocks = memory.view(BITS[NUMPY_DTYPES[group.dtype].itemsize]).view(
        -1, sum(group.row_elements) * group.page_size
    )
    num_layers, num_keys = len(group.layers), group.page_size * group.row_elements[0]
    pages = blocks.as_strided(
        (num_layers, geometry.num_pages, blocks.shape[1]),
        (of_layer * blocks.shape[1], of_page * blocks.shape[1], 1),
    )
    heads = (group.page_size, group.num_kv_heads)
    heads = heads if geometry.layout == "NHD" else heads[::-1]
    k = pages[..., :num_keys].view(*pages.shape[:2], *heads, group.head_dim)
    v = pages[..., num_keys:].view(*pages.shape[:2], *heads, group.stored_dims[1])
    kinds = [(geometry.layout, group.dtype, scale) for scale in geometry.scales_of(group.dtype)]
    if group.head_dim != group.v_head_dim:
        flats = blocks[:, :num_keys], blocks[:, num_keys:]
        of_k, of_v = (
            StoredPages(bits, flat, 1, 0, *kind)
            for bits, flat, kind in zip((k, v), flats, kinds, strict=True)
        )
        return Pool(of_k, of_v, None, group.v_head_dim if group.kind == "latent" else None)
    flat = blocks.view(-1, num_keys)
    return Pool(
        StoredPages(k, flat, 2, 0, *kinds[0]),
        StoredPages(v, flat, 2, 1, *kinds[1]),
        blocks.view(-1, 2, *heads, group.head_dim),
    )


def pair(k: torch.Tensor, v: torch.Tensor, layout: Layout, dtype: DType) -> Pool:
    """A pool over 4-D K and V `[pages, ...]` held apart: one layer, no scales, nothing copied."""
    k_bits, v_bits = k.view(BITS[k.itemsize]), v.view(BITS[v.itemsize])
    stores = [
        StoredPages(bits[None], bits.flatten(1), 1, 0, layout, dtype, 1.0)
        for bits in (k_bits, v_bits)
    ]
    return Pool(stores[0], stores[1])
