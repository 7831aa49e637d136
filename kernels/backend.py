"""The contract between the service and a device: pool geometry, requests, states, `Backend`.

Tensors are handles (`kernels.tensor`): numpy arrays, pinned arrays, or memory of the device. Index
arrays are numpy's, int32 and C-contiguous. Everything here is a value: a backend may keep a
reference to a `Plan` and use its identity as a cache key, because a plan never changes after it is
made. A pageable array has been read when the call returns. A `PinnedArray` is read, and an `out`
written, until the call's `Pending` is done; a `DeviceTensor` in the order of its stream.

Scores, softmax and sums are float32. A backend may multiply in a 16-bit format: that of the keys if
it is one, else q's, or fp16 where q is float32 too. It then rounds q, and ragged k and v, to that
format first, and o on conversion to q's dtype; accuracy is stated in addition to that rounding.

A visible score of NaN or +inf makes the row's o and lse NaN. Invisible keys never change lse; a row
that sees no key is (0, -inf). For rows that see some key, o can be NaN if an invisible V is not
finite. The same call on the same pool gives the same bits.

With `numerics` "invariant" a row's keys are split at fixed positions of each level, multiples of
`split_keys` among them, and the bits of its state depend only on q, the keys it sees in order, and
the scoring; where levels begin and end at multiples of `split_keys` they do not depend on the
levels either.

`sinks [num_qo_heads]`, float32 on the host, are logits that enter the softmax's denominator only:
each row's state merges once, at the end, with `(0, sinks[head])`; -inf changes nothing. The CUDA
backend rounds o before that and again after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.errors import DeviceLost as DeviceLost
from kernels.errors import Unsupported as Unsupported
from kernels.geometry import NUMPY_DTYPES as NUMPY_DTYPES
from kernels.geometry import POISON as POISON
from kernels.geometry import TENSOR_DTYPES as TENSOR_DTYPES
from kernels.geometry import DType as DType
from kernels.geometry import LayerGroup as LayerGroup
from kernels.geometry import Layout as Layout
from kernels.geometry import PoolGeometry as PoolGeometry
from kernels.pending import Done as Done
from kernels.pending import Mixed as Mixed
from kernels.pending import Pending as Pending
from kernels.pending import StageSeconds as StageSeconds
from kernels.tensor import Array as Array
from kernels.tensor import Tensor as Tensor

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

Numerics = Literal["fast", "invariant"]
"""Whether results may depend, in their last bits, on the rest of the batch."""

LEFT_OUT: Final = -1
"""The token slot of a row that is not appended."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One cascade level: segment `s` of plan rows attends one run of pages (CSR over both).

    `qo_indptr` int32 [S+1] starts at 0, ends at the number of plan rows, and never decreases;
    `kv_indptr` int32 [S+1] over pages; `kv_indices` int32 page ids; `kv_last_page_len` int32 [S] in
    1..page_size, or 0 for a segment without pages. `kv_start` int32 [S] is the position, in each
    row's own sequence, of the segment's first key. `causal`: this level hides keys that come after
    a row's position.
    """

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    kv_start: Int32
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The levels (0 = most shared) that each query row attends; their states are merged.

    Plan row `r` is row `order[r]` of the request's q and o (`order` None: the identity).
    `positions` int32 [n], in plan order, is the row's own position in its sequence,
    `kv_len - qo_len + i` (negative when there are more queries than keys): with `causal`, key
    position p is visible iff `p <= positions[r]`; with `window_left = w >= 0`, iff
    `p >= positions[r] - w`.
    """

    levels: tuple[Level, ...]
    positions: Int32
    order: Int32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A custom mask as bits (little bit order), True = visible.

    Key position p of plan row r is bit `row_offsets[r] + p` of `bits`; int64 `row_offsets` [n].
    """

    bits: UInt8
    row_offsets: Int64


class Scoring(NamedTuple):
    """The scores: `s = sm_scale * q.k`, then `cap * tanh(s / cap)` if cap > 0.

    `window_left` is as in `Plan`; -1 is off.
    """

    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Attend:
    """Attention of `q [n, num_qo_heads, head_dim]` over pooled KV of one layer.

    q can have another dtype than the pool. `out` is the place of the result, and then the result.
    """

    layer: int
    q: Tensor
    plan: Plan
    scoring: Scoring
    mask: Mask | None = None
    out: AttentionState | None = None
    sinks: Float32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RaggedAttend:
    """Attention of ragged q over ragged `k, v [nnz, num_kv_heads, head_dim]`, touching no pool.

    Request b owns q rows `qo_indptr[b]:qo_indptr[b+1]` and key rows `kv_indptr[b]:kv_indptr[b+1]`.
    num_kv_heads and head_dim are the tensors' own. Mask rows are in q order. `out`: as in `Attend`.
    `positions` int32 [n] are the rows' positions among their request's keys, for rows that are not
    the last of it; None aligns them to its end.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qo_indptr: Int32
    kv_indptr: Int32
    causal: bool
    scoring: Scoring
    mask: Mask | None = None
    out: AttentionState | None = None
    positions: Int32 | None = None
    sinks: Float32 | None = None

    @property
    def row_positions(self) -> Int32:
        """Each row's position among its request's keys, int32 [n]."""
        if self.positions is None:
            return last_positions(self.qo_indptr, self.kv_indptr)
        if self.positions.shape != self.q.shape[:1]:
            given, rows = self.positions.shape, self.q.shape[0]
            raise ValueError(f"positions has shape {given}: must be one for each of {rows} rows")
        return self.positions


def split_keys(numerics: Numerics, least: int, page_size: int) -> int:
    """`Backend.split_keys`: `least`, or somewhat more so that it is whole pages."""
    return 0 if numerics == "fast" else page_size * -(-least // page_size)


def last_positions(qo_indptr: Int32, kv_indptr: Int32) -> Int32:
    """Positions of each request's rows among its keys when they are the last of its sequence."""
    qo_lens, kv_lens = np.diff(qo_indptr), np.diff(kv_indptr)
    within = np.arange(int(qo_indptr[-1])) - np.repeat(qo_indptr[:-1], qo_lens)
    positions: Int32 = (np.repeat(kv_lens - qo_lens, qo_lens) + within).astype(np.int32)
    return positions


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class AttentionState:
    """`o [n, num_qo_heads, head_dim]` in q's dtype; `lse [n, num_qo_heads]` float32, natural log.

    The empty state is (0, -inf). Arrays, unless device tensors were given as `out` or `into`.
    """

    o: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """Places of pages in host memory: page i in `blocks[rows[i], skip:]`.

    `blocks` is uint8 `[n, size]` of `PageCopies.memory`. A page takes `payload_bytes`: K and V of
    every layer, as the pool stores them.
    """

    blocks: UInt8
    rows: Int64
    skip: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EndOfCopies:
    """Called in any thread, it waits for the end of copies of pages, and returns the digests of
    each of them (`kernels.digests`), computed on the device where the pages are in its memory.

    `has_come` says whether a call would not wait; None where the call itself copies.
    """

    wait: Callable[[], list[bytes]]
    has_come: Callable[[], bool] | None = None

    def __call__(self) -> list[bytes]:
        return self.wait()


class PageCopies(Protocol):
    """Copies of whole pages between pool and host memory, beside a backend's other calls.

    `read` and `write` begin copies, in any thread, and return at once where the places are
    prepared. Until the end the caller neither writes to the pages nor frees them, nor touches the
    places.
    """

    @property
    def calls(self) -> int:
        """Calls that should be under way at once."""
        ...

    def is_prepared(self, places: PagePlaces) -> bool:
        """Whether places have been prepared or copied to or from before."""
        ...

    def prepare(self, places: PagePlaces) -> None:
        """Make the driver know the places, in any thread: some milliseconds."""
        ...

    def memory(self, count: int, size: int) -> UInt8:
        """Host memory `[count, size]`: zeros, which take room as they are written to."""
        ...

    def mark(self) -> object:
        """A point after all calls of the backend so far. Not for other threads than its own."""
        ...

    def read(self, pages: Int32, to: PagePlaces, after: object) -> EndOfCopies:
        """Copy pages to their places, once the calls before the mark `after` are done."""
        ...

    def write(self, pages: Int32, source: PagePlaces, after: object) -> EndOfCopies:
        """Copy pages from their places, once the calls before the mark `after` are done.

        Calls of the backend after the end see it.
        """
        ...


class Backend(Protocol):
    """One device's pool and kernels, used by one thread; calls take effect in call order."""

    @property
    def name(self) -> str: ...  # "cpu" | "cuda"

    @property
    def device(self) -> str: ...  # the device's own name, for people

    @property
    def geometry(self) -> PoolGeometry: ...

    @property
    def split_keys(self) -> int:
        """Keys between two positions at which every row's keys are split, whole pages; 0: `fast`.

        Levels that begin and end there do not show in the results.
        """
        ...

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What this backend refuses, one sentence each, for `/v1/info`."""
        ...

    def register(self, address: int, size: int) -> bool:
        """Pin host memory, so that arrays over it may be `PinnedArray`s. False: they may not.

        A range is registered once, and unregistered before the memory is unmapped.
        """
        ...

    def unregister(self, address: int) -> None:
        """Take back `register` of the range that begins at `address`; copies of it come to an end.

        Unregistered addresses are ignored.
        """
        ...

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        """Write row i of `k [n, num_kv_heads, head_dim]` and `v [n, num_kv_heads, v_head_dim]` to
        token slot `slots[i]`.

        Shapes, and the page size of slots and plans, are those of the layer's group. A token slot
        is `page * page_size + offset`; a row whose slot is `LEFT_OUT` is not written.
        Later calls see what was written, whether this is done or not: done only means that pinned k
        and v have been read.

        fp8 pools store `value / scale`, saturated to the format's largest finite number.
        """
        ...

    def copy_rows(
        self, src_pages: Int32, dst_pages: Int32, num_rows: Int32, group: int = 0
    ) -> None:
        """Copy the first `num_rows[i]` token slots of page `src_pages[i]` to `dst_pages[i]`.

        K and V, every layer of one of `PoolGeometry.groups`, one launch.
        """
        ...

    def attend(self, requests: Sequence[Attend]) -> Pending[list[AttentionState]]:
        """Run requests of one q dtype and one `Scoring` together; any mix of layers and plans."""
        ...

    def attend_ragged(self, request: RaggedAttend) -> Pending[AttentionState]: ...

    def merge(
        self,
        o: Tensor,
        lse: Tensor,
        indptr: Int32,
        into: AttentionState | None = None,
        out: AttentionState | None = None,
        sinks: Float32 | None = None,
    ) -> Pending[AttentionState]:
        """Merge rows `indptr[t]:indptr[t+1]` of `o [nnz, H, D]`, `lse [nnz, H]` into row t.

        An empty list gives (0, -inf). With `into`, row t of it is one more member of list t and is
        overwritten in place (and returned). Any H and D, whatever the pool's. `into` or `out`, not
        both.
        """
        ...

    def gather(
        self, layer: int, slots: Int32, dtype: DType, out: tuple[Tensor, Tensor] | None = None
    ) -> Pending[tuple[Tensor, Tensor]]:
        """Dequantised K and V of token slots: two `[n, num_kv_heads, head_dim]` of `dtype`.

        With `out` they are written there, and `out` is returned.
        """
        ...

    def read_stored(
        self, layer: int, slots: Int32, out: tuple[Tensor, Tensor]
    ) -> Pending[tuple[Tensor, Tensor]]:
        """K and V of token slots as the pool stores them, to the bit, into `out`.

        Two `[n, num_kv_heads, head_dim]` of the pool's dtype; no scale is applied.
        """
        ...

    def write_stored(self, layer: int, k: Tensor, v: Tensor, slots: Int32) -> Pending[None]:
        """As `append`, for rows that `read_stored` gave: stored to the bit."""
        ...

    @property
    def page_copies(self) -> PageCopies:
        """The copies of this backend's pages."""
        ...

    def close(self) -> None:
        """Finish all work and free the pool."""
        ...
