"""The store: the prefix tree and the backend's pool as one thing, with the plans made for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kernels.backend import Backend, DeviceLost, Int32, Pending, Tensor
from service.core.errors import IntegrityError
from service.core.pool.satellites import GroupShape
from service.core.prefix.inventory import named_in
from service.core.sequences.books import Batch
from service.core.tree import PrefixTree
from service.core.values import Extension
from service.engine.store.event_history import EventHistory, group_fields
from service.engine.store.imports import UnfinishedImports
from service.engine.store.ledger import RETRY_S, Kind, Ledger
from service.engine.store.plan_cache import PlanCache
from service.engine.store.snapshot import Snapshots
from service.engine.work.pace import DevicePace
from service.engine.work.request import Request
from service.engine.work.work import Cost, Seconds
from service.errors import NotReady, OutOfSequences
from service.operations.schema.fields import InfoAnswer

DRAINING: Final = "engine is draining and accepts no new sequences"
EXPIRY_S: Final = 2e-3
"""Longest time in a round for deleting expired sequences."""
ENDED_AT_ONCE: Final = 32
"""Sequences checked between two reads of the clock."""
EVICTED_AHEAD: Final = 32
"""Pages evicted ahead of need in one round of turns: a fraction of a millisecond."""


if TYPE_CHECKING:
    from service.engine.records.pool import RecordPool
    from service.engine.tiers.loading import Loading
    from service.engine.tiers.tiers import Tiers


class StoreLost(RuntimeError):
    """Tree and pool no longer agree; nothing they hold can be trusted."""


FATAL: Final = (DeviceLost, StoreLost, IntegrityError)
"""After these nothing in the pool can be trusted."""


class Store:
    """Owned by one thread: nothing here is locked."""

    def __init__(
        self,
        backend: Backend,
        pace: DevicePace,
        info: InfoAnswer,
        high_watermark: float = 1.0,
        events_history: int = 0,
        live: bool = True,
        window_slack: int = 0,
    ) -> None:
        """`events_history`: pages for which each namespace's events are kept; `live`: whether
        snapshots may be taken; `window_slack`: tokens that are kept behind windows."""
        geometry = backend.geometry
        self.info = info
        self.backend = backend
        self.geometry = geometry
        self.pace = pace
        self.num_qo_heads = geometry.num_kv_heads
        """Query heads of the latest queries."""
        shapes = [GroupShape(one.layers, one.page_size, one.window) for one in geometry.groups]
        size, layers = geometry.page_size, geometry.num_layers
        self.tree = PrefixTree(geometry.num_pages, size, layers, shapes, window_slack)
        self._leased = Kind("pages held by leases", geometry.num_pages, "release leases")
        self.limit(info.limits.max_sequences, info.limits.max_sequences)
        self.plans = PlanCache(self.tree, backend.split_keys)
        names = group_fields(shapes, [one.kind for one in geometry.groups])
        self.history = EventHistory(geometry.page_size, events_history, names)
        if self.history.is_kept:
            self.tree.cache.named.listener = self.history.hear
            at_once = self.history.pages_an_event
            self.history.inventories.append(
                lambda namespace: named_in(self.tree.cache.named, namespace, at_once)
            )
        self.imports = UnfinishedImports(self.tree.books)
        self.loading: Loading | None = None
        """Loads from the tiers below the pool, if there are any."""
        self.records: RecordPool | None = None
        """Opaque records in the tiers, if there is room for some."""
        self.deadline = math.inf
        """By `time.monotonic()`, of the operation whose turn it is."""
        self.is_draining = False
        self.counts: Callable[[], dict[str, list[float]]] = dict
        """Reads the counts of the engine's metrics."""
        self.now = time.monotonic()
        self.snapshots = Snapshots(self.tree, self.all_numbers) if live else None
        self._watermark = int(high_watermark * geometry.num_pages)
        self._least_free = geometry.num_pages - self._watermark

    @property
    def lower(self) -> list[Tiers | RecordPool]:
        """Pages and records in the tiers below the pool; one that has a disk is first."""
        pages = None if self.loading is None else self.loading.tiers
        every: list[Tiers | RecordPool] = [one for one in (pages, self.records) if one is not None]
        return sorted(every, key=lambda one: one.disk.total_bytes is None)

    def limit(self, sequences: int, leases: int, share: float = 1.0) -> None:
        """Set the limits of all namespaces together, and the share that one may have."""
        self.ledger = Ledger(share)
        remedy = "release some, let them end, or raise engine.max_leases or engine.namespace_share"
        self._holds = Kind("leases and pins", leases, remedy, self._num_holds)
        self._sequences = Kind("sequences", sequences, "delete some", self._num_sequences)

    def _num_sequences(self, namespace: str | None) -> int:
        """Sequences of a namespace, or of all (None), unfinished imports among them."""
        tree = self.tree
        return (
            tree.num_sequences if namespace is None else tree.budget.look(namespace).num_sequences
        )

    def _num_holds(self, namespace: str | None) -> int:
        """Leases, jobs that hold records, and hard pins of a namespace, or of all (None)."""
        cache = self.tree.cache
        jobs = 0 if self.records is None else self.records.leases.count(namespace)
        if namespace is None:
            return jobs + cache.num_leases + cache.num_pins
        own = self.tree.budget.look(namespace)
        return jobs + own.num_leases + len(own.pins)

    def refuse_sequences(self, namespace: str, number: int) -> None:
        """Raises OutOfSequences where `number` more exceed a limit."""
        kind, ledger = self._sequences, self.ledger
        free, most = kind.most - ledger.count(kind, None), ledger.part(kind)
        if number > free:
            raise OutOfSequences(number, max(0, free), kind.most)
        if number > (free := most - ledger.count(kind, namespace)):
            raise OutOfSequences(number, max(0, free), most, share_retry_s=RETRY_S)

    def refuse_hold(self, namespace: str) -> None:
        """Raises Overloaded where one more lease, or hard pin, exceeds a limit."""
        self.ledger.refuse(self._holds, namespace)

    @property
    def shares(self) -> dict[str, int]:
        """Maximum sequences, and leases with hard pins, of one namespace."""
        part = self.ledger.part
        return {"max_sequences": part(self._sequences), "max_leases": part(self._holds)}

    def refuse_new(self) -> None:
        """Raises NotReady while the engine is draining."""
        if self.is_draining:
            raise NotReady(DRAINING)

    def look_up(self, request: Request) -> Batch:
        """A request's sequences; requests that repeat a header share the batch.

        Raises `UnknownSequence`.
        """
        batch = self.tree.books.look_up(request.known.get("batch") or request.fields.ids)
        request.known["batch"] = batch
        return batch

    def extend(
        self,
        layer: int,
        ids: Batch,
        counts: Int32,
        offsets: Int32 | None,
        seconds: Seconds,
    ) -> Extension:
        """Reserve pages for `counts` [B] tokens; nothing is written there yet."""
        started = time.monotonic()
        extension = self.tree.extend(layer, ids, counts, offsets)
        seconds.plan += time.monotonic() - started
        return extension

    def write(
        self, extension: Extension, rows: tuple[Tensor, Tensor], seconds: Seconds
    ) -> Pending[None]:
        """Write `rows` (k and v [n, Hkv, D]) to an extension, which is undone if that fails."""
        started = time.monotonic()
        try:
            pending = self.backend.append(extension.layer, *rows, extension.slots)
        except BaseException:
            self.undo(extension)
            raise
        spent = time.monotonic() - started
        if spent > self.pace.slice_s and pending.done:  # else it is the time to start a copy
            self.pace.correct("append", write_cost(rows), spent)
        seconds.copy_in += spent
        return pending

    def undo(self, extension: Extension | None) -> None:
        """Roll back an extension, if there is one; plans made for it get a new key."""
        if extension is not None:
            self.tree.undo(extension)

    def tick(self) -> bool:
        """End leases, priorities and pins by the time, and evict pages ahead of need; whether a
        sequence, or the mark of one that moves, may have expired."""
        tree, now = self.tree, time.monotonic()
        self.now = now
        tree.tick(now)
        if (missing := self._least_free - tree.allocator.num_free) > 0:
            tree.budget.evict_ahead(min(missing, EVICTED_AHEAD))
        return tree.books.expiry.next_due <= now

    @property
    def next_end(self) -> float:
        """When the next lease, pin, sequence or mark ends, by `time.monotonic()`."""
        tree = self.tree
        ends = tree.books.expiry, tree.cache.ends, tree.cache.named.retention.ends
        return min(one.next_due for one in ends)

    def expire(self, is_held: Callable[[str], bool]) -> None:
        """Delete sequences whose idle time is over, and remove expired marks, for a fraction of a
        slice; the next round continues.

        `is_held` reports sequences in use, whose time starts again. All launches must be answered.
        """
        books, ends = self.tree.books, time.monotonic() + EXPIRY_S
        while books.expiry.next_due <= self.now and time.monotonic() < ends:
            over = books.expired(is_held, ENDED_AT_ONCE)
            self.tree.free(over)
            self.imports.forget(over)

    def all_numbers(self) -> dict[str, int]:
        """The numbers of the whole pool, and of the tiers' records."""
        found = self.numbers() | ({} if self.loading is None else self.loading.tiers.num_records)
        if self.records is not None:
            found |= {f"{tier}_records": num for tier, num in self.records.num_records.items()}
        return found

    def numbers(self, namespace: str | None = None) -> dict[str, int]:
        """Pages by their state, sequences, leases and imports: of the whole pool (None), or of the
        part that a namespace sees. `available`: pages that it can get, evictions included."""
        tree, imports = self.tree, self.imports.count(namespace)
        if namespace is None:
            allocator, named = tree.allocator, tree.cache.named
            free, available = allocator.num_free, 0
            used = allocator.num_pages - free
            cached, pinned = named.num_cached, named.num_pinned
            leases, sequences = tree.cache.num_leases, tree.num_sequences
        else:
            own = tree.budget.look(namespace)
            free, available = max(0, tree.budget.available(own)), tree.budget.obtainable(own)
            used, cached, pinned = own.used, own.cached, own.pinned
            leases, sequences = own.num_leases, own.num_sequences
        return {
            "free": free,
            "available": available,
            "imports": imports,
            "referenced": used - cached - pinned,
            "cached": cached,
            "pinned": pinned,
            "leases": leases,
            "sequences": sequences - imports - self.num_hidden(namespace),
        }

    def lease_room(self, namespace: str) -> int | None:
        """Pages that nothing holds yet, and that a namespace's leases can hold; None: any number.

        Where leases load pages from lower tiers, a key that cannot append could otherwise hold the
        whole pool: it can have an equal part of it, with all that its namespace holds.
        """
        if self.loading is None:
            return None
        budget = self.tree.budget
        own, every = budget.look(namespace), budget.namespaces.values()
        others = sum(one is not own and bool(one.used or one.reserved_pages) for one in every)
        part = self.ledger.part(self._leased, 1 + others)
        return max(0, max(part, own.reserved_pages) - own.referenced)

    def num_hidden(self, namespace: str | None) -> int:
        """Hidden sequences of loads, of a namespace or of all (None)."""
        return 0 if self.loading is None else self.loading.num_hidden(namespace)

    def emit_pressure_event(self, numbers: Mapping[str, int]) -> None:
        """Emit an event to all namespaces when the pages that cannot be evicted rise above the
        watermark, or fall below; `numbers` are the whole pool's."""
        is_high = numbers["referenced"] + numbers["pinned"] > self._watermark
        if is_high != self.history.is_high:
            self.history.press(is_high, self.tree.budget.left())


def write_cost(rows: tuple[Tensor, Tensor]) -> Cost:
    return Cost(num_bytes=2.0 * (rows[0].nbytes + rows[1].nbytes))
