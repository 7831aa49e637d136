"""What the engine can be asked to do, and what it answers: plain values, free of HTTP and of JSON.

Whoever builds an operation has checked what can be checked from the operation and `ServiceInfo`
alone (shapes, dtypes, indptr, duplicate ids). What depends on the pool's state (ids, lengths,
pages, a mask's length) is checked by the engine's worker when the operation's turn comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int32 = NDArray[np.int32]
Ids = tuple[str, ...]
LseBase = Literal["e", "2"]
CascadeMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Options:
    """Common to attention. `sm_scale` None: head_dim ** -0.5. Cap 0 and window -1 are off."""

    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    lse_base: LseBase = "e"
    cascade: CascadeMode = "auto"


@dataclass(frozen=True, slots=True)
class NewSequence:
    """`id` None: the service makes one. With `parent`, fork it at `length` (None: all of it)."""

    id: str | None = None
    parent: str | None = None
    length: int | None = None


# Operations. `name` is the label in metrics and logs.


@dataclass(frozen=True, slots=True)
class CreateSequences:
    """All or none; answers `tuple[SequenceInfo, ...]` in the order given."""

    name: ClassVar[str] = "create_sequences"
    sequences: tuple[NewSequence, ...]


@dataclass(frozen=True, slots=True)
class ListSequences:
    """Answers up to `limit` `SequenceInfo`, by id, those after `after` (None: from the start)."""

    name: ClassVar[str] = "list_sequences"
    after: str | None
    limit: int


@dataclass(frozen=True, slots=True)
class GetSequence:
    """Answers a `SequenceInfo`."""

    name: ClassVar[str] = "get_sequence"
    sequence: str


@dataclass(frozen=True, slots=True)
class DeleteSequence:
    """Answers None."""

    name: ClassVar[str] = "delete_sequence"
    sequence: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut every layer to `length` (at most the sequence's own); answers `SequenceInfo`."""

    name: ClassVar[str] = "truncate"
    sequence: str
    length: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Answers a `PageTableInfo`."""

    name: ClassVar[str] = "page_table"
    sequences: Ids
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """Append rows `append_indptr[b]:[b+1]` of k, v [n, Hkv, D] to sequence b; `Appended`."""

    name: ClassVar[str] = "append"
    layer: int
    sequences: Ids
    append_indptr: Int32
    offsets: Int32 | None
    k: Array
    v: Array


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Decode and prefill: row block b of q attends the whole of sequence b; answers `Attended`.

    With k, v they are appended first, by the same `qo_indptr`. A mask is bits (little order), each
    sequence's qo_len x kv_len segment padded to a byte when `mask_packed`, else BOOL elements back
    to back; its length is checked against the true kv_len by the worker.
    """

    name: str  # "decode" | "prefill"
    layer: int
    sequences: Ids
    qo_indptr: Int32
    q: Array
    causal: bool
    options: Options
    k: Array | None = None
    v: Array | None = None
    offsets: Int32 | None = None
    mask: Array | None = None
    mask_packed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPrefill:
    """Attention over the request's own k, v [nnz, Hkv, D]; answers `Attended`."""

    name: ClassVar[str] = "ragged_prefill"
    q: Array
    k: Array
    v: Array
    qo_indptr: Int32
    kv_indptr: Int32
    causal: bool
    options: Options
    mask: Array | None = None
    mask_packed: bool = False


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """Rows `qo_indptr[s]:qo_indptr[s+1]` attend the whole of sequence s."""

    sequences: Ids
    qo_indptr: Int32


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """Explicit levels; answers `Attended` (with `level_states` if asked for)."""

    name: ClassVar[str] = "cascade"
    layer: int
    levels: tuple[CascadeLevel, ...]
    q: Array
    causal: bool  # last level only
    return_levels: bool
    options: Options


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Merge o [nnz, H, D], lse [nnz, H] (in `lse_base`) by `indptr` [T+1]; answers `Attended`."""

    name: ClassVar[str] = "merge"
    o: Array
    lse: Array
    indptr: Int32
    lse_base: LseBase


@dataclass(frozen=True, slots=True)
class Gather:
    """Answers `Gathered`: all K/V of the sequences at one layer, dequantised to `dtype`."""

    name: ClassVar[str] = "gather"
    layer: int
    sequences: Ids
    dtype: str  # a key of kernels.backend.NUMPY_DTYPES


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Answers a `PoolInfo`; runs the integrity check."""

    name: ClassVar[str] = "pool"


Operation = (
    CreateSequences
    | ListSequences
    | GetSequence
    | DeleteSequence
    | Truncate
    | PageTable
    | Append
    | Attention
    | RaggedPrefill
    | Cascade
    | Merge
    | Gather
    | PoolStatus
)


# Answers.


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """`length` is the least over layers, `lengths` per layer; `parent` is whom it is a fork of."""

    id: str
    length: int
    lengths: tuple[int, ...]
    pages: int
    last_page_len: int
    parent: str | None


@dataclass(frozen=True, slots=True, eq=False)
class LevelInfo:
    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32


@dataclass(frozen=True, slots=True, eq=False)
class PageTableInfo:
    """The flat CSR table in the order asked, and the cascade levels over rows `order`."""

    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    levels: tuple[LevelInfo, ...]
    order: Int32


@dataclass(frozen=True, slots=True)
class Appended:
    """kv_len at that layer after the append, in the request's order."""

    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """`o` in q's dtype, float32 `lse` in `lse_base`; `levels` counts cascade levels, 1 = flat."""

    o: Array
    lse: Array
    lse_base: LseBase
    levels: int
    cascade: bool
    level_states: tuple[tuple[Array, Array], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """`k, v [tokens, Hkv, D]`; sequence b owns rows `kv_indptr[b]:kv_indptr[b+1]`."""

    k: Array
    v: Array
    kv_indptr: Int32


@dataclass(frozen=True, slots=True)
class PoolInfo:
    free: int
    referenced: int
    total: int
    sequences: int
    nodes: int
    sharing_ratio: float  # tokens seen by sequences / tokens stored; 1 when nothing is shared
    integrity: str  # "ok", or what is broken


Answer = (
    SequenceInfo
    | tuple[SequenceInfo, ...]
    | PageTableInfo
    | Appended
    | Attended
    | Gathered
    | PoolInfo
    | None
)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What the engine serves: the pool's geometry and the backend, for checks and `/v1/info`."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: str
    dtype: str
    k_scale: float
    v_scale: float
    backend: str
    device: str
    unsupported: tuple[str, ...]


@dataclass(slots=True)
class Timings:
    """Seconds per stage of one operation's life, for `Server-Timing` and metrics."""

    queue: float = 0.0
    plan: float = 0.0
    copy_in: float = 0.0
    kernel: float = 0.0
    copy_out: float = 0.0
    encode: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What a submitted operation resolves to."""

    answer: Answer
    timings: Timings
