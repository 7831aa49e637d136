"""Results of calls: typed, frozen values with numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnd.meta import NO_META, Meta
from attnd.wire.dtypes import token_bytes
from attnd.wire.states import AttentionState, Float32, LseBase

Array = NDArray[Any]
Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """`length` is the least of `lengths`, one per layer; `parent` is the id of the
    sequence it was forked from.

    `cached_len` is the number of tokens found in the prefix cache at its creation, `cached` the
    same by the tier that had them (None: the service has the pool alone); `ttl_s` the idle seconds
    before its deletion (None: never).
    """

    id: str
    length: int
    lengths: tuple[int, ...]
    pages: int
    last_page_len: int
    parent: str | None
    cached_len: int = 0
    ttl_s: float | None = None
    cached: Mapping[str, int] | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SequencePage:
    """Some of all sequences, by id; `next` is the `after` of the next page, None at the end."""

    sequences: tuple[SequenceInfo, ...]
    next: str | None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class PageTableLevel:
    """One cascade level over plan rows: segment s is rows `qo_indptr[s]:qo_indptr[s+1]`."""

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The CSR page table in the order asked, and the cascade levels over rows `order`.

    Sequence b holds pages `kv_indices[kv_indptr[b]:kv_indptr[b+1]]`, the last one filled up to
    `kv_last_page_len[b]` (0 when it has none).
    """

    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    levels: tuple[PageTableLevel, ...]
    order: Int32
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True)
class AppendResult:
    """kv_len of each sequence at the layer after the append, in the order asked."""

    lengths: tuple[int, ...]
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult:
    """`o [n, num_qo_heads, head_dim]` in q's dtype, `lse [n, num_qo_heads]` float32.

    `levels` counts the cascade levels used, `cascade` says whether it was one. `level_states` holds
    each level's own state when `return_levels` asked for them.
    """

    o: Array
    lse: Float32
    lse_base: LseBase
    levels: int = 1
    cascade: bool = False
    level_states: tuple[AttentionState, ...] = ()
    meta: Meta = NO_META

    @property
    def state(self) -> AttentionState:
        """The pair to merge with states over other keys."""
        return AttentionState(self.o, self.lse, self.lse_base)


@dataclass(frozen=True, slots=True, eq=False)
class MergeResult:
    """`o [T, H, D]` in the dtype sent, `lse [T, H]` float32."""

    o: Array
    lse: Float32
    lse_base: LseBase
    meta: Meta = NO_META

    @property
    def state(self) -> AttentionState:
        """The pair to merge with states over other keys."""
        return AttentionState(self.o, self.lse, self.lse_base)


@dataclass(frozen=True, slots=True, eq=False)
class GatherResult:
    """`k, v [tokens, num_kv_heads, head_dim]`; sequence b owns `kv_indptr[b]:kv_indptr[b+1]`."""

    k: Array
    v: Array
    kv_indptr: Int32
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True)
class Lease:
    """Keeps the matched pages until `expires_at`, in seconds since the epoch."""

    id: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold on `num_pages` pages up to `page_key` without a sequence: a lease, for `left_s` more
    seconds, or a hard pin, where `lease` and `left_s` are None."""

    lease: str | None
    left_s: float | None
    page_key: str
    cache_salt: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached tokens, in whole pages; `lease` None: not requested, or nothing matched.

    `cached` has the tokens by the tier that had them (`pool`, `host`, `disk`); None: the service
    has the pool alone.
    """

    matched_len: int
    num_pages: int
    lease: Lease | None = None
    cached: Mapping[str, int] | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The committed tokens and pages; `last_key` is the last page's key in hex.

    `durable`: whether all these pages are on disk (None: commits are not written there).
    """

    committed_len: int
    num_pages: int
    last_key: str | None
    durable: bool | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant's quotas (None: no limit), and its pages by state."""

    name: str
    max_pages: int | None
    reserved_pages: int
    used: int
    referenced: int
    cached: int
    pinned: int
    leases: int
    sequences: int
    max_host_bytes: int | None = None
    max_disk_bytes: int | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages by state and in total; `sharing_ratio` is tokens seen per token stored.

    `referenced` pages are held by sequences and leases, `pinned` ones by hard pins alone, `cached`
    ones by nothing: a match finds them until they are evicted. `imports` are unfinished.
    `available` pages can be allocated now: free ones, and cached ones within the quota.
    """

    free: int
    referenced: int
    cached: int
    pinned: int
    total: int
    leases: int
    sequences: int
    nodes: int
    sharing_ratio: float
    integrity: str
    imports: int = 0
    available: int = 0
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTree:
    """The largest parts of the prefix tree, a row each, below the row they hang under.

    The first rows are the `namespaces`; `parents` is -1 there. `pages` counts a row's own pages,
    `totals` those below it too. `states` has the values of page states, `idle_s` seconds since the
    last use.
    """

    namespaces: tuple[str, ...]
    parents: Int32
    pages: Int32
    totals: Int32
    sequences: Int32
    idle_s: Float32
    states: UInt8


@dataclass(frozen=True, slots=True)
class EnginePages:
    """Pages of one engine in a cluster's snapshot."""

    name: str
    total: int
    referenced: int
    pinned: int
    cached: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The whole pool at one moment, all namespaces together.

    `page_states` has every `page_step`-th page: 0 free, 1 referenced, 2 pinned, 3 cached. `evicted`
    counts pages since the start. `engines` is empty without a cluster; else each engine has
    ceil(total / page_step) of the `page_states`, in this order.
    """

    free: int
    referenced: int
    cached: int
    pinned: int
    total: int
    leases: int
    sequences: int
    nodes: int
    evicted: int
    page_step: int
    page_states: UInt8
    tree: SnapshotTree
    engines: tuple[EnginePages, ...] = ()
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine of the service: its pages by state, for all namespaces, and its pace in seconds:
    to compute a page of a prompt (`page_s`), for each page before that one in addition (`pair_s`),
    and to read a page for the next token (`read_s`).

    `counts`, where requested, are its counters since its start, by the names of `/metrics` without
    `attnd_`, labels after a `/`; of a histogram the buckets and the sum.
    """

    name: str
    instance_id: str
    free: int
    referenced: int
    cached: int
    pinned: int
    sequences: int
    draining: bool
    page_s: float
    pair_s: float
    read_s: float
    counts: Mapping[str, Sequence[float]] | None = None
    leases: int = 0
    imports: int = 0


@dataclass(frozen=True, slots=True)
class Info:
    """The service: its pool's geometry, backend, dtypes and limits.

    `instance_id` changes with every start of the engine, which begins with an empty pool.
    `numerics` is "fast", or "invariant" if a row's bits do not depend on its batch. `tiers` has
    size and measured seconds of each tier below the pool.
    """

    instance_id: str
    version: str
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
    tensor_dtypes: tuple[str, ...]
    unsupported: tuple[str, ...]
    limits: Mapping[str, float]
    numerics: str = "fast"
    tiers: tuple[Mapping[str, Any], ...] | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return token_bytes(self.num_kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of cached pages of the caller's namespace.

    `type` is `stored` (with `page_keys`, the `parent_key` before them, `page_size`, `medium`, and
    `token_ids` where they are known), `removed` (`page_keys`, `medium`), `cleared`, `pressure`
    (`is_high`, pages `free` and `available`), or `too_old`: earlier events were not kept. After
    `too_old` and `cleared` discard what you know: `stored` events of all pages follow, and may
    repeat some. `time` is in Unix seconds. `medium` is `GPU` for the pool, `CPU` for host memory,
    or `DISK`.
    `extra_keys`: for each page None, or the `first_token` in it and the `key` of each further key
    that begins there; None where no page has any.
    """

    id: int
    type: str
    namespace: str = ""
    time: float = 0.0
    page_keys: tuple[str, ...] = ()
    parent_key: str | None = None
    token_ids: tuple[int, ...] | None = None
    extra_keys: tuple[Sequence[Mapping[str, Any]] | None, ...] | None = None
    page_size: int | None = None
    medium: str | None = None
    is_high: bool | None = None
    free: int | None = None
    available: int | None = None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Some events in order; `next` is the `after` of the next page. `too_old`: events in between
    were not kept."""

    events: tuple[CacheEvent, ...]
    next: int
    too_old: bool
    meta: Meta = field(default=NO_META, compare=False, repr=False)

    @property
    def all_events(self) -> Iterator[CacheEvent]:
        """The events, after one of type `too_old` where earlier ones are missing."""
        if self.too_old:
            yield CacheEvent(self.next - len(self.events), "too_old")
        yield from self.events


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service is live, or ready; if not, `reason` is its own explanation."""

    ok: bool
    reason: str
    meta: Meta = field(default=NO_META, compare=False, repr=False)
