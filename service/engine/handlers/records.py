"""Operations on records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

from attnd.wire.dtypes import DTYPES

from service.engine.handlers.tiers import end_of_waits
from service.engine.records.moves import Bytes, Move, MoveBatch
from service.engine.records.pool import TAG, RecordPool, record_id, stamp_digest
from service.engine.store.store import Store
from service.engine.tiers.loads import waiting
from service.engine.tiers.reports import TierName
from service.engine.work.request import Request
from service.engine.work.work import (
    TURN_S,
    Answer,
    Fields,
    Seconds,
    Slice,
    SlicedWork,
    Slices,
    empty_slice,
    in_slices,
)
from service.errors import NotErased, NotSupported
from service.image.json_text import dump_json
from service.operations.records import MAX_KEY_BYTES, MAX_RECORD_BYTES
from service.operations.schema.fields import refuse
from service.tiers.shelf import Entry

OUTCOME_BYTES: Final = 32
"""Most that one key takes in an answer, quotes and escapes included."""
BATCH_BYTES: Final = 2**22
"""Bytes that a thread moves before it takes another namespace's batch."""
IN_FLIGHT: Final = 4
"""Batches of one call that wait for threads."""
LOOKED_AT: Final = 64
"""Keys between two looks at the clock."""
LONGEST_OUTCOME: Final = len("never_stored")
TIERS: Final[tuple[TierName, ...]] = ("host", "disk")
NO_RECORDS: Final = (
    "the service has no place for records: set cache.records_share, with cache.host_bytes or "
    "cache.disk_path"
)


@dataclass(slots=True, eq=False)
class RecordNames:
    """The keys of a request, and the ids of their records."""

    namespace: str
    stamp: bytes
    keys: list[bytes]
    ids: list[bytes]

    @classmethod
    def of(cls, request: Request) -> RecordNames:
        """Copied, as the caller can still write to its tensors. Raises InvalidRequest."""
        lens = request.tensors["key_lens"].tolist()
        raw = request.tensors["keys"].tobytes()
        if not 1 <= min(lens) <= max(lens) <= MAX_KEY_BYTES:
            refuse("key_lens", [min(lens), max(lens)], f"must be 1 to {MAX_KEY_BYTES}")
        if (total := sum(lens)) != len(raw):
            refuse("key_lens", total, f"must add up to the {len(raw)} bytes of keys")
        ends = list(accumulate(lens, initial=0))
        keys = [raw[first:last] for first, last in pairwise(ends)]
        namespace, stamp = request.tenant.namespace, stamp_digest(request.fields.stamp)
        begin = record_id(namespace, stamp, b"")
        return cls(namespace, stamp, keys, [begin + key for key in keys])


def pool_of(store: Store) -> RecordPool:
    """Raises NotSupported."""
    if store.records is None:
        raise NotSupported(NO_RECORDS)
    return store.records


def lookup(pool: RecordPool, keys: RecordNames, stop: bool = False) -> Iterator[str]:
    """The outcome of each key; with `stop` up to the first miss."""
    for key, one in zip(keys.keys, keys.ids, strict=True):
        if pool.find(one) is not None:
            yield "found"
            continue
        yield pool.reason(one, keys.namespace, keys.stamp, key)
        if stop:
            return


def counted(pool: RecordPool, outcomes: Sequence[str]) -> list[str]:
    """The same outcomes, counted in the metrics."""
    for outcome, number in Counter(outcomes).items():
        pool.looked_up(outcome, number)
    return list(outcomes)


def contains_records(store: Store, request: Request, _: Seconds) -> Fields:
    pool, fields, keys = pool_of(store), request.fields, RecordNames.of(request)
    request.place.require(OUTCOME_BYTES * (len(keys.ids) + 2))
    outcomes = list(lookup(pool, keys, fields.stop_at_miss))
    if fields.job is not None:
        held = [one for one, how in zip(keys.ids, outcomes, strict=False) if how == "found"]
        if held:
            if not pool.leases.has(keys.namespace, fields.job):
                store.refuse_hold(keys.namespace)
            pool.leases.hold(keys.namespace, fields.job, held, fields.lease_s)
    return {"outcomes": counted(pool, outcomes)}


def touch_records(store: Store, request: Request, _: Seconds) -> Fields:
    pool, keys = pool_of(store), RecordNames.of(request)
    request.place.require(OUTCOME_BYTES * (len(keys.ids) + 2))
    outcomes = list(lookup(pool, keys))
    for one in keys.ids:
        pool.use(one)
    return {"outcomes": outcomes}


def delete_records(store: Store, request: Request, _: Seconds) -> Fields:
    pool, keys = pool_of(store), RecordNames.of(request)
    request.place.require(OUTCOME_BYTES * (len(keys.ids) + 2))
    outcomes = list(lookup(pool, keys))
    pool.delete(keys.ids)
    return {"outcomes": outcomes}


def release_records(store: Store, request: Request, _: Seconds) -> Fields:
    pool_of(store).leases.release(request.tenant.namespace, request.fields.id)
    return {}


def clear_records(store: Store, request: Request, _: Seconds) -> SlicedWork:
    pool, namespace = pool_of(store), request.tenant.namespace

    def slices() -> Slices:
        number = yield from in_slices(pool.clear_host(namespace))
        ends: list[OSError | None] = []
        pool.disk.clear(namespace, ends.append)
        while not ends:
            yield waiting()
        if ends[0] is not None:
            remedy = "stop the service, and delete the files in cache.disk_path"
            raise NotErased(f"the disk failed: {ends[0]}: {remedy}")
        request.place.lay({"num_records": number})

    return SlicedWork(slices(), must_finish=lambda: True)


@dataclass(slots=True, eq=False)
class Transfer:
    """The batches of one call."""

    pool: RecordPool
    batches: list[MoveBatch] = field(default_factory=list)
    turn_ends: float = 0.0

    def abandon(self) -> None:
        """The caller's memory is neither read nor written from now on."""
        for batch in self.batches:
            batch.abandon()

    def rest(self) -> Slices:
        """Let others have their turns, where this one has taken long."""
        if (now := time.monotonic()) > self.turn_ends:
            if self.turn_ends:
                yield empty_slice()
                now = time.monotonic()
            self.turn_ends = now + TURN_S


def put_records(store: Store, request: Request, _: Seconds) -> SlicedWork:
    pool, keys = pool_of(store), RecordNames.of(request)
    sizes, values = request.tensors["sizes"].tolist(), request.tensors["values"]
    if not 1 <= min(sizes) <= max(sizes) <= MAX_RECORD_BYTES:
        refuse("sizes", [min(sizes), max(sizes)], f"must be 1 to {MAX_RECORD_BYTES}")
    if (total := sum(sizes)) != values.size:
        refuse("sizes", total, f"must add up to the {values.size} bytes of values")
    request.place.require(OUTCOME_BYTES * (len(keys.ids) + 4))
    transfer, ends = Transfer(pool), end_of_waits(store)
    return SlicedWork(
        storing(request, transfer, keys, split(values, sizes), ends), undo=transfer.abandon
    )


def split(values: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    bounds = list(accumulate(sizes, initial=0))
    return [values[first:last] for first, last in pairwise(bounds)]


def storing(
    request: Request, transfer: Transfer, keys: RecordNames, values: Sequence[Bytes], ends: float
) -> Slices:
    """The slices of a put, until `ends`."""
    pool, namespace = transfer.pool, keys.namespace
    outcomes, moves = ["present"] * len(values), list[Move]()
    new: dict[int, Move] = {}

    def start() -> None:
        if moves:
            transfer.batches.append(pool.store(namespace, moves.copy()))
            moves.clear()

    def wait(most: int) -> Slices:
        while sum(not batch.is_over for batch in transfer.batches) > most:
            yield waiting()

    for at, (one, value) in enumerate(zip(keys.ids, values, strict=True)):
        if at % LOOKED_AT == 0:
            start()
            yield from transfer.rest()
        pool.misses.named(namespace, keys.keys[at], keys.stamp)
        while (placed := pool.place(namespace, one, value.size)) is None:
            start()
            if time.monotonic() > ends or not pool.may_find_place(namespace, value.size):
                outcomes[at] = "no_room"
                break
            yield waiting()
        if placed is None or not placed.is_new:
            continue
        outcomes[at] = "stored"
        new[at] = Move(placed.entry, value.size, value)
        moves.append(new[at])
        if sum(move.size for move in moves) >= BATCH_BYTES:
            start()
            yield from wait(IN_FLIGHT)
    start()
    yield from wait(0)
    for at, move in new.items():
        if move.entry.is_dropped:  # the namespace was cleared meanwhile
            outcomes[at] = "no_room"
    if request.fields.durable:
        pool.request_sync(keys.ids)
        while time.monotonic() < ends and any(map(pool.is_on_its_way, keys.ids)):
            yield waiting()
    durable = [pool.disk.is_durable(one) for one in keys.ids]
    request.place.lay({"outcomes": outcomes, "durable": durable})


def get_records(store: Store, request: Request, _: Seconds) -> Answer:
    pool, keys = pool_of(store), RecordNames.of(request)
    outcomes = list(lookup(pool, keys))
    found = {at: one[0] for at, name in enumerate(keys.ids) if (one := pool.find(name)) is not None}
    sizes = [TAG.unpack(found[at].tag)[0] if at in found else 0 for at in range(len(outcomes))]
    text = answer_text(outcomes, sizes)
    shapes = (("values", DTYPES["U8"], (sum(sizes),)),)
    request.place.require(2 * len(text), shapes, "request fewer records a call")
    laid = request.place.lay_text(text, shapes)
    transfer, values = Transfer(pool), split(laid["values"], sizes)

    def slices() -> Slices:
        read = yield from loading(transfer, keys, found, values)
        for at, outcome in read.items():
            outcomes[at] = outcome
        request.place.lay_again(answer_text(counted(pool, outcomes), sizes))

    return SlicedWork(slices(), undo=transfer.abandon)


def answer_text(outcomes: Sequence[str], sizes: Sequence[int]) -> str:
    """The fields of the answer to a read, as JSON of one length whatever becomes of records."""
    spaces = sum(LONGEST_OUTCOME - len(outcome) for outcome in outcomes)
    text = dump_json({"outcomes": outcomes, "num_bytes": sizes})
    return f"{text[:-1]}{' ' * spaces}}}"


def loading(
    transfer: Transfer, keys: RecordNames, found: dict[int, Entry], values: Sequence[Bytes]
) -> Generator[Slice, Any, dict[int, str]]:
    """Reads records from host memory; what is not there, or damaged there, from the disk. Returns
    the outcome of each."""
    pool, left, outcomes = transfer.pool, dict(found), dict.fromkeys(found, "evicted")
    for tier in TIERS:
        moves: dict[int, Move] = {}
        for at, first in left.items():
            if at % LOOKED_AT == 0:
                yield from transfer.rest()
            size, _ = TAG.unpack(first.tag)
            entry = pool.find_in(tier, keys.ids[at])
            if entry is not None and TAG.unpack(entry.tag)[0] == size:
                moves[at] = Move(entry, size, values[at], TAG.unpack(entry.tag)[1])
        for some in batches_of([*moves.values()]):
            transfer.batches.append(pool.load(keys.namespace, tier, some))
        while not all(batch.is_done for batch in transfer.batches):
            yield waiting()
        outcomes |= {at: move.outcome or "unreadable" for at, move in moves.items()}
        left = {at: entry for at, entry in left.items() if outcomes[at] != "found"}
    if left:
        gone = [Move(entry, values[at].size, values[at]) for at, entry in left.items()]
        transfer.batches.append(pool.blank(keys.namespace, gone))
        while not transfer.batches[-1].is_done:
            yield waiting()
    return outcomes


def batches_of(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves in batches of about `BATCH_BYTES`."""
    some: list[Move] = []
    size = 0
    for move in moves:
        some.append(move)
        size += move.size
        if size >= BATCH_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
