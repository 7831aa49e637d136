"""The answers of the service: what clients return, and what the OpenAPI describes.

The members of an answer's JSON are the fields of its class. Arrays but those of type `Listed`,
states and `meta` are not among them: the answer has tensors of these names, or the client makes
them. A class with tensors in a class without gives it its other fields. Lines of a docstring that
begin with a field's name are the field's text, here and in the OpenAPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from attnd.wire.dtypes import token_bytes
from attnd.wire.meta import NO_META, Meta
from attnd.wire.states import AttentionState, Float32, LseBase

Array = NDArray[Any]
Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]
Listed = Annotated[Int32, "a list in JSON"]
FOUND: Final = "found"


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence.

    `length`: minimum kv_len over layers.
    `lengths`: kv_len per layer.
    `last_page_len`: tokens in the last page; 0 for an empty sequence.
    `parent`: id of the sequence it was forked from.
    `cached_len`: tokens found in the prefix cache at its creation; the caller appends the rest.
    `ttl_s`: idle seconds before deletion; null: never.
    `cached`: tokens found by the tier that had them (`pool`, `host`, `disk`), if the service has
        other tiers than the pool.
    `reserved_len`: length up to which pages are kept for it; 0: it has no reserve.
    `known_len`: tokens whose ids, or whose pages' keys, are known, of a sequence that was made with
        a prefix, or a fork of one; 0 for others.
    `committed_len`: tokens in its committed pages.
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
    reserved_len: int = 0
    known_len: int = 0
    committed_len: int = 0
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SequencePage:
    """Some of all sequences, in order of id.

    `next`: value of `after` for the next page; null at the end.
    """

    sequences: tuple[SequenceInfo, ...]
    next: str | None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class PageTableLevel:
    """One cascade level over plan rows: segment s is rows `qo_indptr[s]:qo_indptr[s+1]`."""

    qo_indptr: Listed
    kv_indptr: Listed
    kv_indices: Listed
    kv_last_page_len: Listed


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The CSR page table in the order asked, int32.

    `kv_indptr`: sequence b holds pages `kv_indices[kv_indptr[b]:kv_indptr[b+1]]`.
    `kv_indices`: page ids.
    `kv_last_page_len`: tokens in each last page: 1..page_size, or 0 for an empty sequence.
    `levels`: cascade levels, over rows in `order`.
    `order`: row i of the levels is sequence `order[i]` of the request.
    """

    kv_indptr: Listed
    kv_indices: Listed
    kv_last_page_len: Listed
    levels: tuple[PageTableLevel, ...]
    order: Listed
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The sequences after an append.

    `lengths`: kv_len of each at the layer, in the order asked.
    `known_len`: with token ids: tokens of each whose ids are known.
    `committed_len`: with token ids: tokens in committed pages of each.
    """

    lengths: tuple[int, ...]
    meta: Meta = field(default=NO_META, compare=False, repr=False)
    known_len: tuple[int, ...] = ()
    committed_len: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult:
    """The attention state of each row.

    `o`: `[n, num_qo_heads, head_dim]`, in q's dtype.
    `lse`: `[n, num_qo_heads]` float32.
    `levels`: number of cascade levels; 1: nothing shared.
    `cascade`: whether shared KV was read once for all sequences that share it.
    `level_states`: each level's own state, where `return_levels` requested them.
    `known_len`: with token ids: tokens of each sequence whose ids are known.
    `committed_len`: with token ids: tokens in committed pages of each sequence.
    """

    o: Array
    lse: Float32
    lse_base: LseBase
    levels: int = 1
    cascade: bool = False
    level_states: tuple[AttentionState, ...] = ()
    meta: Meta = NO_META
    known_len: tuple[int, ...] = ()
    committed_len: tuple[int, ...] = ()

    @property
    def state(self) -> AttentionState:
        """The pair to merge with states over other keys."""
        return AttentionState(self.o, self.lse, self.lse_base)


@dataclass(frozen=True, slots=True, eq=False)
class MergeResult:
    """One state per list.

    `o`: `[T, H, D]`, in the dtype sent.
    `lse`: `[T, H]` float32.
    """

    o: Array
    lse: Float32
    lse_base: LseBase
    meta: Meta = NO_META

    state = AttentionResult.state


@dataclass(frozen=True, slots=True, eq=False)
class GatherResult:
    """Stored keys and values.

    `k`: `[tokens, num_kv_heads, head_dim]`.
    `v`: like k.
    `kv_indptr`: sequence b has rows `kv_indptr[b]:kv_indptr[b+1]` (tokens, not pages), int32.
    """

    k: Array
    v: Array
    kv_indptr: Listed
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True)
class Lease:
    """Keeps matched pages from eviction.

    `expires_at`: its end, in seconds since 1970.
    """

    id: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Hold:
    """A lease or hard pin, which keeps pages without a sequence.

    `lease`: id of the lease; null for a hard pin.
    `left_s`: seconds until the lease ends; null for a hard pin.
    `page_key`: the last page held, with all before it, in hex.
    `num_pages`: number of held pages.
    """

    lease: str | None
    left_s: float | None
    page_key: str
    cache_salt: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached beginning of a prompt.

    `matched_len`: cached tokens, in full pages; after a prefetch those in the pool.
    `lease`: null if none was requested, without a match, or while the engine is draining.
    `cached`: these tokens by the tier that had them (`pool`, `host`, `disk`), if the service has
        other tiers than the pool.
    """

    matched_len: int
    num_pages: int
    lease: Lease | None = None
    cached: Mapping[str, int] | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What of a sequence is committed.

    `committed_len`: committed tokens, up to the end of this request's names.
    `last_key`: key of the last of these pages in hex, as used by pins.
    `durable`: whether all these pages are on disk, with `cache.write` = `commit`.
    """

    committed_len: int
    num_pages: int
    last_key: str | None
    durable: bool | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant's quotas, and its pages by state.

    `max_pages`: quota, cached pages included; null: no limit.
    `reserved_pages`: pages that other namespaces cannot use.
    `used`: referenced, cached and pinned pages together.
    """

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
    """Pages by state and in total, as the caller's namespace sees them.

    `free`: pages that can be allocated without evictions.
    `referenced`: pages held by sequences or leases.
    `cached`: committed pages that nothing holds; they can be matched, and evicted.
    `pinned`: pages held by hard pins only.
    `total`: sum of the above.
    `sharing_ratio`: tokens seen by sequences / tokens stored; 1: nothing shared.
    `integrity`: "ok", or a reference to the service's log, which has the error. Covers the whole
        pool for keys with the scope `admin`, else the namespace's sequences and cached pages.
    `imports`: unfinished imports, which hold pages and are not sequences yet.
    `available`: pages that can be allocated within the quota, evictions included. In a cluster, of
        all engines together.
    `available_tokens`: tokens that a new sequence can have now: the largest `reserve` that is
        accepted. In a cluster, of the engine with the most room.
    `reserved`: pages kept by the reserves of sequences, among the `referenced` ones.
    `max_pages`: quota, cached pages included; null: no limit.
    `reserved_pages`: pages that other namespaces cannot use.
    `max_sequences`: maximum live sequences of the namespace.
    `max_leases`: maximum leases and hard pins of the namespace.
    `max_host_bytes`: maximum bytes in host memory; null: no limit, or no such tier.
    `max_disk_bytes`: likewise on disk.
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
    available_tokens: int = 0
    reserved: int = 0
    max_pages: int | None = None
    reserved_pages: int = 0
    max_sequences: int | None = None
    max_leases: int | None = None
    max_host_bytes: int | None = None
    max_disk_bytes: int | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTree:
    """The largest parts of the prefix tree, a row each, below the row they hang under.

    `namespaces`: those of the tree's first rows.
    `parents`: -1 for the rows of the namespaces.
    `pages`: a row's own pages.
    `totals`: these and all pages of rows below, shown or not.
    `sequences`: sequences that share it.
    `idle_s`: seconds since its last use.
    `states`: values of page states; 0 for a namespace.
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
    """Pages of one engine in a cluster's snapshot.

    `name`: as in `GET /v1/engines`.
    """

    name: str
    total: int
    referenced: int
    pinned: int
    cached: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The whole pool at one moment, all namespaces together.

    `evicted`: pages evicted since the start.
    `page_step`: distance between the pages in `page_states`; above 1 for very large pools.
    `page_states`: 0 free, 1 referenced, 2 pinned, 3 cached.
    `engines`: in the order of `page_states`, with ceil(total / page_step) states each; empty
        without a cluster.
    `host`: pages in host memory, behind the pool.
    `disk`: pages on disk.
    `host_records`: records in host memory.
    `disk_records`: records on disk.
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
    host: int = 0
    disk: int = 0
    host_records: int = 0
    disk_records: int = 0
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine of the service, with the pages of all namespaces.

    `name`: in the cluster; "engine" without one.
    `free`: free pages.
    `draining`: whether it accepts no new sequences.
    `page_s`: measured seconds to prefill one page at all layers, without earlier pages.
    `pair_s`: measured seconds that each earlier page adds to that.
    `read_s`: measured seconds to read one page for the next token.
    `counts`: where requested, counters since the start, by the names of `/metrics` without
        `attnd_`, labels after a `/`. A histogram has its counts by bucket, then the sum; zeros are
        omitted.
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
class RecordLookup:
    """Which records are there.

    `outcomes`: of each key, in order: `found`, or the reason of the miss: `never_stored`,
        `evicted`, `other_stamp`, `corrupt`, `unreadable`. With `stop_at_miss` they end with the
        first miss.
    """

    outcomes: tuple[str, ...]
    meta: Meta = field(default=NO_META, compare=False, repr=False)

    @property
    def num_found(self) -> int:
        """Keys before the first miss."""
        misses = (at for at, outcome in enumerate(self.outcomes) if outcome != FOUND)
        return next(misses, len(self.outcomes))


@dataclass(frozen=True, slots=True)
class RecordsStored:
    """What became of records to store.

    `outcomes`: of each, in order: `stored`, `present` where it was there already, or `no_room`.
    `durable`: whether each is on disk and survives a loss of power.
    """

    outcomes: tuple[str, ...]
    durable: tuple[bool, ...]
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RecordsRead:
    """Records that were read and verified: bytes of each key, or None where `outcomes`, as of a
    lookup, has the reason of a miss."""

    outcomes: tuple[str, ...]
    values: tuple[UInt8 | None, ...]
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True)
class Info:
    """The service: its pool's geometry, backend, dtypes and limits.

    `instance_id`: changes with every start of the engine, which begins with an empty pool.
    `tensor_dtypes`: dtypes of q, k, v and o.
    `unsupported`: features that the backend does not support.
    `numerics`: "fast", or "invariant" if a row's bits do not depend on the rest of its batch.
    `tiers`: size and measured seconds of each tier below the pool.
    `records`: `host_bytes` and `disk_bytes` for records; null: the service has none.
    `groups`: groups of layers, in pools that were made with them: `layers`, shape, `window`, tokens
        and bytes of a page, and the share of its bytes that is padding; the fields above are then
        those of the first group without a window.
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
    records: Mapping[str, int] | None = None
    groups: tuple[Mapping[str, Any], ...] | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return token_bytes(self.num_kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of cached pages of the caller's namespace. After `cleared` and `too_old` discard
    what you know: `stored` events of all pages follow, and may repeat some.

    `id`: number, one more than the previous event's.
    `type`: `stored`, `removed`, `cleared`, `pressure`, or of clients `too_old`: earlier events were
        not kept.
    `time`: when it was recorded, in Unix seconds.
    `page_keys`: stored, removed: keys of the pages, in the order of their prompt.
    `parent_key`: stored: key of the page before them; before a prompt's first page, that of its
        salt.
    `token_ids`: stored: token ids of the pages, if they were committed with ids.
    `extra_keys`: stored: for each page, `first_token` and `key` of the further keys that begin in
        it, or null; absent: none of the pages has any.
    `page_size`: stored: tokens per page.
    `medium`: stored, removed: `GPU` is the pool, `CPU` host memory, `DISK`.
    `group_idx`: stored, removed: the layer group of the pages; null in a pool without groups.
    `kv_cache_spec_kind`: stored, removed: `full_attention`, `sliding_window`, `mla_attention` or
        `sliding_window_mla`, as vLLM names them; null in a pool without groups.
    `kv_cache_spec_sliding_window`: stored, removed: the window of the group, if it has one.
    `is_high`: pressure: whether the part of the pool that cannot be evicted exceeds
        `cache.high_watermark`.
    `free`: pressure: pages that the namespace can allocate without evictions.
    `available`: pressure: pages that it can allocate, evictions included.
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
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    is_high: bool | None = None
    free: int | None = None
    available: int | None = None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Some events in order.

    `next`: value of `after` for the next call.
    `too_old`: whether events after `after` were dropped from the history: these are the oldest kept
        ones, and state derived from earlier ones can be wrong.
    """

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
class ImportState:
    """Progress of an import.

    `state`: `receiving` or `done`.
    `next_part`: number of the next part; `num_parts` if all have arrived.
    `cached_len`: tokens found in the prefix cache.
    `digest`: of the last part received, or of the header; null if that part was skipped because its
        pages are cached.
    `expires_at`: when the import is cancelled, in seconds since 1970; null when it is done.
    """

    id: str
    state: str
    next_part: int
    num_parts: int
    cached_len: int = 0
    digest: str | None = None
    expires_at: float | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service is live, or ready.

    `reason`: if not, its own explanation.
    """

    ok: bool
    reason: str
    meta: Meta = field(default=NO_META, compare=False, repr=False)
