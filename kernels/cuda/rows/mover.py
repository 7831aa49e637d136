"""Rows in and out of the pool: append, gather, and row copies between pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kernels.backend import (
    LEFT_OUT,
    NUMPY_DTYPES,
    Done,
    DType,
    Int32,
    Pending,
    PoolGeometry,
    StageSeconds,
    Tensor,
    Unsupported,
)
from kernels.cuda import checks
from kernels.cuda.common.structs import POOL_ROWS, TENSOR_ROWS, packed
from kernels.cuda.device.answers import Answers, Goal, Made
from kernels.cuda.device.inputs import as_is, upload
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.pending import Guard, Result
from kernels.cuda.device.transfer import Transfers, mark
from kernels.cuda.kv.view import KvView
from kernels.cuda.rows.variants import rows_spec, stored_spec, stored_width
from kernels.outputs import check_gathered
from kernels.tensor import DeviceTensor

THREADS = 256
APPENDED_UNITS = 2
"""Units of 8 values that a thread of append_rows writes; one of gather_rows reads one."""
APPENDS: Final = ("append_rows", "append_some_rows")


def append_entry(slots: Int32) -> str:
    """The kernel that appends rows to these slots: leaving some out takes one of its own."""
    return APPENDS[bool(slots.min(initial=0) == LEFT_OUT)]


class RowMover:
    """Moves rows between tensors and the token slots of one group of layers.

    `geometry` is the group's own (`PoolGeometry.alone`); layers are places in the group. A latent
    pool has no rows of V: those tensors are empty.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        kv: KvView,
        library: Library,
        transfers: Transfers,
        guarded: Guard,
    ) -> None:
        self._geometry, self._kv = geometry, kv
        self._values = 0 if kv.latent else kv.v_head_dim
        self._library, self._transfers, self._guarded = library, transfers, guarded

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        """`Backend.append`."""
        return self._write(layer, k, v, slots, checks.tensor_dtype(k, "k"))

    def write_stored(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        """`Backend.write_stored`."""
        kind = NUMPY_DTYPES[self._kv.dtype]
        checks.require(k.dtype == kind, "k.dtype", k.dtype, f"{kind}, as the pool is")
        return self._write(layer, k, v, slots, None)

    def _shapes(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of k and v."""
        kv = self._kv
        return (rows, kv.num_kv_heads, kv.head_dim), (rows, kv.num_kv_heads, self._values)

    def _write(
        self, layer: int, k: Tensor, v: Tensor, slots: Int32, dtype: DType | None
    ) -> Pending[None]:
        """Rows of `dtype`, or as they are stored (None)."""
        shapes = self._shapes(len(slots))
        checks.check_kv(k, v, shapes)
        checks.check_slots(slots, self._geometry, LEFT_OUT)
        if len(slots) == 0:
            return Done(None)
        transfers = self._transfers
        tensors = (k, v) if self._values else (k,)
        with self._guarded():
            uploaded = upload(transfers, as_is(*tensors, slots))
            made_here = any(_is_of(tensor, transfers.compute) for tensor in tensors)
            with transfers.compute:
                at = (uploaded.at[0], uploaded.at[1] if self._values else 0, uploaded.at[-1])
                entry = append_entry(slots)
                self.enqueue(entry, layer, dtype, len(slots), at, overlap=not made_here)
            uploaded.release(mark(transfers.compute))
        if uploaded.copied is None:
            return Done(None)
        return Result(self._guarded, uploaded.copied, lambda: None, StageSeconds())

    def gather(
        self, layer: int, slots: Int32, dtype: DType, out: tuple[Tensor, Tensor] | None
    ) -> Pending[tuple[Tensor, Tensor]]:
        """`Backend.gather`."""
        if dtype.startswith("fp8"):
            raise Unsupported("dtype", dtype, "gather gives fp16, bf16 or fp32")
        return self._read(layer, slots, dtype, out)

    def read_stored(
        self, layer: int, slots: Int32, out: tuple[Tensor, Tensor]
    ) -> Pending[tuple[Tensor, Tensor]]:
        """`Backend.read_stored`."""
        return self._read(layer, slots, None, out)

    def _read(
        self, layer: int, slots: Int32, dtype: DType | None, out: tuple[Tensor, Tensor] | None
    ) -> Pending[tuple[Tensor, Tensor]]:
        """Rows as `dtype`, or as they are stored (None)."""
        kv, transfers = self._kv, self._transfers
        kind = NUMPY_DTYPES[dtype or kv.dtype]
        checks.check_slots(slots, self._geometry)
        shapes = self._shapes(len(slots))
        places = check_gathered(out, shapes, kind)
        if len(slots) == 0:
            return Done(out or (np.zeros(shapes[0], kind), np.zeros(shapes[1], kind)))
        asked = zip(shapes, places, strict=True) if self._values else ((shapes[0], places[0]),)
        with self._guarded():
            uploaded = upload(transfers, as_is(slots))
            made = [Made(kind, [Goal(shape, kind, place)]) for shape, place in asked]
            answers = Answers(transfers, made)
            with transfers.compute:
                at = (answers.at[0], answers.at[1] if self._values else 0, *uploaded.at)
                self.enqueue("gather_rows", layer, dtype, len(slots), at)
            launched = mark(transfers.compute)
            uploaded.release(launched)
            done = answers.send(launched)

        def rows() -> tuple[Tensor, Tensor]:
            if self._values:
                k, v = answers.take()
                return k, v
            (k,) = answers.take()
            return k, np.zeros(shapes[1], kind) if places[1] is None else places[1]

        return Result(self._guarded, done, rows, StageSeconds())

    def copy(self, src_pages: Int32, dst_pages: Int32, num_rows: Int32) -> None:
        """`Backend.copy_rows`."""
        kv, g = self._kv, self._geometry
        checks.check_pages(src_pages, g, "src_pages")
        checks.check_pages(dst_pages, g, "dst_pages")
        same = len(src_pages) == len(dst_pages) == len(num_rows)
        checks.require(same, "num_rows", len(num_rows), "one per source and destination page")
        if len(num_rows) == 0:
            return
        low, high = int(num_rows.min()), int(num_rows.max())
        checks.require(low >= 0 and high <= kv.page_size, "num_rows", (low, high), "0..page_size")
        with self._guarded():
            uploaded = upload(self._transfers, as_is(src_pages, dst_pages, num_rows))
            spec = rows_spec(kv.head_dim, "fp16", kv.dtype, self._values)
            function = self._library.function(spec, "copy_rows")
            grid = (len(num_rows), g.num_layers)
            pool = np.frombuffer(bytearray(self._pool(0)), POOL_ROWS)
            with self._transfers.compute:
                function(grid, (THREADS,), (pool, *map(np.uint64, uploaded.at)))
            uploaded.release(mark(self._transfers.compute))

    def enqueue(
        self,
        entry: str,
        layer: int,
        dtype: DType | None,
        rows: int,
        at: Sequence[int],
        overlap: bool = True,
    ) -> None:
        """Launch an entry of rows.cu on the current stream; `at`: k, v and slots there.

        Rows outside the pool are `dtype`, or as they are stored (None). With `overlap`, what is
        appended must be there already: it is read while earlier kernels of the stream may still
        run.
        """
        kv, appends = self._kv, entry in APPENDS
        # a thread has the same values of K and V where these are alike
        width = kv.head_dim + (0 if kv.head_dim == self._values else self._values)
        if rows * kv.num_kv_heads * width >= 2**32:
            raise Unsupported("rows", rows, "fewer than 2^32 values of k at a time")
        if dtype is None:
            spec, width = (
                stored_spec(kv.head_dim, kv.dtype, self._values),
                stored_width(width, kv.dtype),
            )
        else:
            spec = rows_spec(kv.head_dim, dtype, kv.dtype, self._values)
        function = self._library.function(spec, entry)
        units = rows * kv.num_kv_heads * (width // 8)
        per_block = THREADS * (APPENDED_UNITS if appends else 1)
        k, v, slots = at
        tensors = packed(TENSOR_ROWS, k=k, v=v, slots=slots, num_rows=rows)
        overlaps = overlap and appends and self._library.overlaps
        grid, struct = -(-units // per_block), self._pool(layer) + tensors
        Launcher(function, grid, THREADS, 0, struct, overlaps=overlaps)()

    def _pool(self, layer: int) -> bytes:
        """`PoolRows` of one layer."""
        kv = self._kv
        shift = layer * kv.layer_bytes
        return packed(
            POOL_ROWS,
            k=kv.k + shift,
            v=kv.v + shift,
            **kv.strides,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
        )


def _is_of(tensor: Tensor, stream: Any) -> bool:
    """Whether a kernel of `stream` may be writing the tensor."""
    return isinstance(tensor, DeviceTensor) and tensor.stream == stream.ptr
