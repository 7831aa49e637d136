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
    views the memory as `[units, page elements]`: page g of the pool (`layer * num_pages + page`)
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

        `pages` int64 `[G, P]` are pages of the pool over all layers. One pass over whole pages.
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
        """The units of pages over all layers, one after another."""
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
    """K and V of a pool, and the one buffer or two that hold them.

    `joint` views a buffer that holds both as `[pages over all layers, 2, inner axes by layout]`.
    """

    k: StoredPages
    v: StoredPages
    storage: tuple[torch.Tensor, ...]
    joint: torch.Tensor | None = None

    def load(self, pages: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of runs of pages int64 `[G, P]`, each as `StoredPages.load` gives it."""
        runs, per_run = pages.shape
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
        """K and V of runs of pages int64 `[G, P]` over all layers as they are, each `[G, heads,
        num_keys, dim]`."""
        runs, per_run = pages.shape
        if self.joint is None or runs * per_run * self.k.flat.shape[1] > JOINT_ELEMENTS:
            k, v = (one.stored(one.units(pages), pages.shape, num_keys) for one in (self.k, self.v))
        else:
            units = torch.cat((self.k.units(pages), self.v.units(pages)))
            k, v = self.k.stored(units, (2, runs, per_run), num_keys)
        return k, v

    def fill_with_nan(self) -> None:
        """Set every byte to 0xFF, a NaN in all five formats."""
        for tensor in self.storage:
            tensor.view(torch.uint8).fill_(0xFF)


class HostPageCopies:
    """`PageCopies` of a pool in host memory: the thread that waits for a copy makes it.

    numpy and xxhash work without the interpreter's lock.
    """

    calls = 1

    def __init__(self, storage: torch.Tensor, geometry: PoolGeometry) -> None:
        """`storage [layers, pages, ...]`."""
        self._pages: UInt8 = storage.flatten(2).numpy().view(np.uint8)
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


def allocate(geometry: PoolGeometry) -> Pool:
    """One 5-D tensor per layer, `geometry.layer_shape`; memory is taken as pages are written.

    Raises `MemoryError` when the machine would never have that much.
    """
    shape = geometry.layer_shape
    dtype = BITS[NUMPY_DTYPES[geometry.dtype].itemsize]
    try:
        whole = torch.empty((geometry.num_layers, *shape), dtype=dtype)
    except RuntimeError as error:
        size = geometry.num_layers * geometry.num_pages * geometry.page_bytes
        remedy = "lower pool.num_pages"
        raise MemoryError(f"the pool needs {size} bytes, more than there are: {remedy}") from error
    flat = whole.view(-1, shape[2] * shape[3] * shape[4])
    k_scale, v_scale = geometry.scales
    return Pool(
        StoredPages(whole[:, :, 0], flat, 2, 0, geometry.layout, geometry.dtype, k_scale),
        StoredPages(whole[:, :, 1], flat, 2, 1, geometry.layout, geometry.dtype, v_scale),
        (whole,),
        whole.flatten(0, 1),
    )


def pair(k: torch.Tensor, v: torch.Tensor, layout: Layout, dtype: DType) -> Pool:
    """A pool over 4-D K and V `[pages, ...]` held apart: one layer, no scales, nothing copied."""
    k_bits, v_bits = k.view(BITS[k.itemsize]), v.view(BITS[v.itemsize])
    stores = [
        StoredPages(bits[None], bits.flatten(1), 1, 0, layout, dtype, 1.0)
        for bits in (k_bits, v_bits)
    ]
    return Pool(stores[0], stores[1], (k_bits, v_bits))
