"""Rows in and out of the pool: append, gather, and row copies between pages."""

from __future__ import annotations

import numpy as np

from kernels.backend import (
    NUMPY_DTYPES,
    Array,
    Done,
    DType,
    Int32,
    Pending,
    PoolGeometry,
    StageSeconds,
    Unsupported,
)
from kernels.cuda import checks
from kernels.cuda.launch import Launcher, Library, OverlappingLauncher
from kernels.cuda.pending import Guard, Result
from kernels.cuda.scene import Store
from kernels.cuda.shapes import rows_spec
from kernels.cuda.structs import POOL_ROWS, TENSOR_ROWS, packed
from kernels.cuda.transfer import Transfers, aligned, pinned

THREADS = 256
APPENDED_UNITS = 2
"""Units of 8 values that a thread of append_rows writes; one of gather_rows reads one."""


class Rows:
    """Moves rows between host arrays and the token slots of one pool."""

    def __init__(
        self,
        geometry: PoolGeometry,
        store: Store,
        library: Library,
        transfers: Transfers,
        guarded: Guard,
    ) -> None:
        self._geometry, self._store = geometry, store
        self._library, self._transfers, self._guarded = library, transfers, guarded

    def append(self, layer: int, k: Array, v: Array, slots: Int32) -> None:
        """`Backend.append`."""
        checks.check_layer(layer, self._geometry)
        checks.check_kv(k, v, self._geometry, len(slots))
        checks.check_slots(slots, self._geometry)
        dtype = checks.tensor_dtype(k, "k")
        if len(slots) == 0:
            return
        with self._guarded():
            buffer, at = self._transfers.upload((k, v, slots))
            with self._transfers.compute:
                self.enqueue("append_rows", layer, dtype, len(slots), at)
            self._transfers.retire(buffer)

    def gather(self, layer: int, slots: Int32, dtype: DType) -> Pending[tuple[Array, Array]]:
        """`Backend.gather`."""
        g = self._geometry
        checks.check_layer(layer, g)
        checks.check_slots(slots, g)
        if dtype.startswith("fp8"):
            raise Unsupported("dtype", dtype, "gather gives fp16, bf16 or fp32")
        shape = (len(slots), g.num_kv_heads, g.head_dim)
        with self._guarded():
            k, v = pinned(shape, NUMPY_DTYPES[dtype]), pinned(shape, NUMPY_DTYPES[dtype])
            if len(slots) == 0:
                return Done((k, v))
            buffer, (slots_at,) = self._transfers.upload((slots,))
            second = aligned(k.nbytes)
            out = self._transfers.scratch(2 * second)
            at = (out.ptr, out.ptr + second, slots_at)
            with self._transfers.compute:
                self.enqueue("gather_rows", layer, dtype, len(slots), at)
            self._transfers.retire(buffer)
            done = self._transfers.download(out.ptr, ((k, 0), (v, second)), out)
            return Result(self._guarded, done, lambda: (k, v), StageSeconds())

    def copy(self, src_pages: Int32, dst_pages: Int32, num_rows: Int32) -> None:
        """`Backend.copy_rows`."""
        g = self._geometry
        checks.check_pages(src_pages, g, "src_pages")
        checks.check_pages(dst_pages, g, "dst_pages")
        same = len(src_pages) == len(dst_pages) == len(num_rows)
        checks.require(same, "num_rows", len(num_rows), "one per source and destination page")
        if len(num_rows) == 0:
            return
        low, high = int(num_rows.min()), int(num_rows.max())
        checks.require(low >= 0 and high <= g.page_size, "num_rows", (low, high), "0..page_size")
        with self._guarded():
            buffer, at = self._transfers.upload((src_pages, dst_pages, num_rows))
            function = self._library.function(rows_spec(g.head_dim, "fp16", g.dtype), "copy_rows")
            grid = (len(num_rows), g.num_layers)
            pool = np.frombuffer(bytearray(self._pool(0)), POOL_ROWS)
            with self._transfers.compute:
                function(grid, (THREADS,), (pool, *map(np.uint64, at)))
            self._transfers.retire(buffer)

    def enqueue(
        self, entry: str, layer: int, dtype: DType, rows: int, at: tuple[int, ...] | list[int]
    ) -> None:
        """Launch append_rows or gather_rows on the current stream; `at`: k, v and slots there.

        What is appended must be there already: it is read while earlier kernels may still run.
        """
        g, appends = self._geometry, entry == "append_rows"
        if rows * g.num_kv_heads * g.head_dim >= 2**32:
            raise Unsupported("rows", rows, "fewer than 2^32 values of k at a time")
        function = self._library.function(rows_spec(g.head_dim, dtype, g.dtype), entry)
        units = rows * g.num_kv_heads * (g.head_dim // 8)
        per_block = THREADS * (APPENDED_UNITS if appends else 1)
        k, v, slots = at
        tensors = packed(TENSOR_ROWS, k=k, v=v, slots=slots, num_rows=rows)
        launcher = OverlappingLauncher if appends and self._library.overlaps else Launcher
        grid = -(-units // per_block)
        launcher(function, grid, THREADS, 0, self._pool(layer) + tensors)()

    def _pool(self, layer: int) -> bytes:
        """`PoolRows` of one layer."""
        store = self._store
        shift = layer * store.layer_bytes
        return packed(
            POOL_ROWS,
            k=store.k + shift,
            v=store.v + shift,
            **store.strides,
            k_scale=store.k_scale,
            v_scale=store.v_scale,
        )
