"""Requests to the ranks of sharded sequences, by operation, and one reply made of theirs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from kernels.states import add_sinks, merge_states
from service.cluster.membership.engine import Call, EngineReply
from service.cluster.routing.batch_split import row_sums
from service.cluster.routing.replies import longest, results_of, whole
from service.cluster.sharded.deletion import delete
from service.cluster.sharded.epochs import (
    TRIES,
    ShardedSequence,
    Stale,
    all_of,
    common_state,
    invalidate,
    is_stale,
    later,
    pause,
    refresh,
    retried,
)
from service.core.shards import held
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    DeadlineExceeded,
    InvalidRequest,
    LengthMismatch,
    NotReady,
)
from service.operations.internal import HAND_OVER
from service.operations.schema.fields import check_sinks
from service.operations.sequences import GET_SEQUENCE
from service.road.caller_end.caller import AnswerLost

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks

Fields = dict[str, Any]
Arrays = Mapping[str, Array]
Sequences = list[ShardedSequence]
LN2: Final = np.float32(math.log(2))


async def handle(
    ranks: Ranks, call: Call, fields: Mapping[str, Any], arrays: Arrays
) -> EngineReply:
    """Raises InvalidRequest for an operation that needs its sequences on one engine."""
    handler = HANDLERS.get(call.operation.name)
    if handler is None:
        ids = fields.get("sequences", fields.get("id"))
        rule = f"over {len(ranks.engines)} engines: {call.operation.name} takes those on one"
        raise InvalidRequest("sequences", ids, rule)
    return await handler(ranks, call, dict(fields), arrays)


async def rows(ranks: Ranks, call: Call, fields: Fields, arrays: Arrays) -> EngineReply:
    """append, decode, prefill: the same for all ranks, which pick their own rows."""
    refuse_field("layers", fields)
    ids, layer, offsets = fields["sequences"], fields["layer"], fields.get("offsets")
    counts = np.diff(row_sums(fields, len(ids))).tolist()
    appends = "k" in arrays
    sinks = arrays.get("sinks")
    if sinks is not None:
        check_sinks(sinks)
    arrays = {name: array for name, array in arrays.items() if name != "sinks"}

    async def attempt(sequences: Sequences, is_fresh: bool) -> EngineReply:
        before = [one.known_lengths[layer] for one in sequences]
        if offsets is not None and list(offsets) != before:
            if is_fresh:
                raise LengthMismatch(dict(zip(ids, before, strict=True)))
            raise Stale
        for one in sequences if appends else ():
            one.is_consistent = False  # until all ranks have appended
        state = {"offsets": before, "epochs": [one.epoch for one in sequences]}
        replies = await ranks.broadcast(call, fields | state, arrays)
        try:
            parts = all_of(replies)
        except Stale:
            raise
        except BaseException:
            if appends:
                with suppress(ProblemText, AttndError):  # else before the next use
                    await refresh(ranks, sequences, to_write=True)
            raise
        after = [length + count for length, count in zip(before, counts, strict=True)]
        for one, length in zip(sequences, after, strict=True) if appends else ():
            one.known_lengths[layer], one.is_consistent = length, True
        return joined(call, parts, fields, after, sinks)

    return await retried(ranks, call, ids, attempt, to_write=appends)


def joined(
    call: Call,
    parts: Sequence[EngineReply],
    fields: Fields,
    lengths: list[int],
    sinks: Array | None,
) -> EngineReply:
    stages = longest(part.stages for part in parts)
    if call.operation.name == "append":
        return EngineReply({"lengths": lengths}, {}, stages)
    states = one_state([part.arrays for part in parts], fields.get("lse_base", "e"), sinks)
    text = parts[0].fields | {
        "levels": max(part.fields["levels"] for part in parts),
        "cascade": any(part.fields["cascade"] for part in parts),
    }
    return EngineReply(text, states, stages)


async def gather(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> EngineReply:
    """Every rank's rows, put in order."""
    span = fields.get("start", 0), fields.get("stop")

    async def attempt(sequences: Sequences, _: bool) -> EngineReply:
        if not all(one.is_ordered for one in sequences):
            raise Stale  # claimed from another door: asks where each rank is
        lengths = [one.known_lengths[fields["layer"]] for one in sequences]
        epochs = {"epochs": [one.epoch for one in sequences]}
        replies = all_of(await ranks.broadcast(call, fields | epochs))
        parts = [(reply.fields, reply.arrays) for reply in replies]
        if not has_all(parts, lengths, span, ranks.page_size):
            raise Stale  # rows were appended meanwhile
        text, arrays = gathered(parts, lengths, span, ranks.page_size)
        return EngineReply(text, arrays, longest(reply.stages for reply in replies))

    return await retried(ranks, call, fields["sequences"], attempt)


async def create(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> EngineReply:
    """Create empty sequences, and forks of sharded ones: at every rank, all or none.

    Raises Forbidden: the ranks see the router's scopes, not the caller's.
    """
    call.tenant.require(call.operation.scope, call.operation.name)
    call = replace(call, tenant=ranks.acting_for(call.tenant))
    new = fields["sequences"]
    confirming = {"confirm_s": fields["confirm_s"]} if "confirm_s" in fields else {}
    own = {one["id"] for one in new}
    parents = sorted({one["parent"] for one in new if one.get("parent")} - own)

    async def attempt(sequences: Sequences, is_fresh: bool) -> EngineReply:
        try:
            created = plan_new(ranks, call, new, {one.id: one for one in sequences})
        except InvalidRequest:
            if is_fresh or not sequences:
                raise
            raise Stale from None
        asking = []
        for rank, engine in enumerate(ranks.engines):
            shard = {"rank": rank, "ranks": len(ranks.engines)}
            there = [shard_fields(one, shard, created[one["id"]]) for one in new]
            asking.append(engine.ask(call, {"sequences": there} | confirming))
        replies = await results_of(asking)
        if not all(isinstance(reply, EngineReply) for reply in replies):
            await undo_create(ranks, call, [one["id"] for one in new], replies)
        parts = all_of(replies)
        views = list(zip(*(part.fields["sequences"] for part in parts), strict=True))
        for view in views:
            name = view[0]["id"]
            ranks.books[call.tenant.namespace, name] = created[name]
        shown = {"sequences": [whole_view(view) for view in views]}
        return EngineReply(shown, {}, longest(part.stages for part in parts))

    return await retried(ranks, call, parents, attempt, rereads=True)


def plan_new(
    ranks: Ranks,
    call: Call,
    new: Sequence[Mapping[str, Any]],
    parents: Mapping[str, ShardedSequence],
) -> dict[str, ShardedSequence]:
    """The new sequences by id. This door owns an empty one. A fork begins in its parent's epoch,
    which other doors may know, so it must be claimed before it is changed."""
    layers = ranks.engines[0].info.num_layers
    created: dict[str, ShardedSequence] = {}
    for one in new:
        name, parent = one["id"], one.get("parent")
        created[name] = ShardedSequence(ranks.acting_for(call.tenant), name)
        if parent is None:
            created[name].set_claimed([0] * layers, later(0))
            created[name].is_ordered = True
            continue
        of = created.get(parent) or parents[parent]
        created[name].is_ordered = of.is_ordered
        length = fork_length(parent, of.known_lengths, one.get("length"))
        created[name].lengths, created[name].epoch = [length] * layers, of.epoch
    return created


def shard_fields(new: Mapping[str, Any], shard: Fields, created: ShardedSequence) -> Fields:
    """One new sequence, for the engine of one rank."""
    same = {name: new[name] for name in ("id", "ttl_s", "parent") if new.get(name) is not None}
    same["epoch"] = created.epoch
    own = {"length": created.known_lengths[0]} if "parent" in same else {"shard": shard}
    return same | own


def fork_length(parent: str | None, lengths: Sequence[int], wanted: int | None) -> int:
    """The number of tokens of a fork. Raises InvalidRequest as an engine does."""
    least, most = min(lengths), max(lengths)
    if wanted is None and least != most:
        rule = f"its layers hold {least} to {most} tokens: say length = {least}, or append first"
        raise InvalidRequest("parent", parent, rule)
    if wanted is not None and wanted > least:
        raise InvalidRequest("length", wanted, f"0 to {least}, the parent's length")
    return least if wanted is None else wanted


async def undo_create(ranks: Ranks, call: Call, ids: list[str], replies: Sequence[object]) -> None:
    """Delete the sequences at the ranks that have, or may have, created them, as others did not; at
    a rank that does not reply they expire unconfirmed."""
    ranks.forget(call, ids)
    asking = [  # an engine that has fallen silent since has them, too
        engine.question(HAND_OVER, call.tenant, {"id": name, "state": "gone"}, is_poll=True)
        for engine, reply in zip(ranks.engines, replies, strict=True)
        if not isinstance(reply, ProblemText)
        for name in ids
    ]
    await asyncio.shield(results_of(asking))


async def get(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> EngineReply:
    """A description on which all ranks agree; of the tokens that all have, if they keep
    differing."""
    async with ranks.locked(call, [fields["id"]]) as (one,):
        for number in range(TRIES):
            await pause(number)
            if number or not one.is_consistent:
                await refresh(ranks, [one], to_write=False)
            parts = whole(await ranks.broadcast(call, fields))
            if common_state(one, parts) is not None:
                break
            invalidate([one])
    return view_reply(parts)


async def truncate(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> EngineReply:
    """First at the rank of the last page: only that one may need a fresh page, and lack one."""
    for name in ("layer", "epoch", "keep"):
        refuse_field(name, fields)
    length = fields["length"]
    last = ranks.engines[length // ranks.page_size % len(ranks.engines)]
    is_cut = False

    async def attempt(sequences: Sequences, is_fresh: bool) -> EngineReply:
        nonlocal is_cut
        (one,) = sequences
        if is_cut:  # once is enough: each later owner has cut it at all ranks
            parts = whole(await ranks.question(GET_SEQUENCE, one.tenant, {"id": one.id}))
            lengths = [length] * len(one.known_lengths)
            return view_reply(parts, length=length, lengths=lengths)
        if length > (least := min(one.known_lengths)):
            if is_fresh:
                raise InvalidRequest("length", length, f"0 to {least}, the sequence's length")
            raise Stale
        # an epoch of its own: tokens that were cut may come again, with other numbers
        cut, num_layers = fields | {"epoch": later(one.epoch)}, len(one.known_lengths)
        one.is_consistent = False
        (first,) = await results_of([last.ask(call, cut)])
        if not isinstance(first, EngineReply):
            one.is_consistent = not is_stale(first)
            all_of([first])
        one.lengths, is_cut = None, True  # at least one rank is in the new epoch
        parts = all_of(await ranks.broadcast(call, cut))
        one.set_claimed([length] * num_layers, cut["epoch"])
        return view_reply(parts)

    try:
        return await retried(ranks, call, [fields["id"]], attempt, to_write=True)
    except NotReady as error:
        if is_cut and not isinstance(error, AnswerLost):  # that one's engine may be dead
            raise DeadlineExceeded(f"{error}: it may have been applied") from error
        raise


def refuse_field(name: str, fields: Fields) -> None:
    if fields.get(name) is not None:
        raise InvalidRequest(name, fields[name], "is for sequences that are on one engine")


def whole_view(parts: Sequence[Mapping[str, Any]]) -> Fields:
    """The description of a sequence, from the descriptions of its shards by rank."""
    known = (part["shard"]["lengths"] for part in parts)
    lengths = [min(column) for column in zip(*known, strict=True)]
    pages = sum(part["pages"] for part in parts)
    last = parts[max(pages - 1, 0) % len(parts)]
    whole = {name: value for name, value in parts[0].items() if name != "shard"}
    return whole | {
        "length": min(lengths),
        "lengths": lengths,
        "pages": pages,
        "last_page_len": last["last_page_len"],
    }


def view_reply(parts: Sequence[EngineReply], **instead: Any) -> EngineReply:
    """The ranks' descriptions of a sequence as one, with other values of some fields."""
    view = whole_view([part.fields for part in parts]) | instead
    return EngineReply(view, {}, longest(part.stages for part in parts))


def one_state(
    replies: Sequence[Mapping[str, Array]], base: str, sinks: Array | None
) -> dict[str, Array]:
    """The ranks' states of the same rows as one, and `sinks`; log-sum-exps are in `base`."""
    o = np.stack([one["o"] for one in replies], axis=1)
    lse = np.stack([one["lse"] for one in replies], axis=1)
    unit = LN2 if base == "2" else np.float32(1)
    merged = merge_states(o, lse * unit)
    if sinks is not None:
        merged = add_sinks(merged, sinks)
    return {"o": np.asarray(merged.o), "lse": np.asarray(merged.lse) / unit}


def has_all(
    replies: Sequence[tuple[Fields, Mapping[str, Array]]],
    lengths: Sequence[int],
    span: tuple[int, int | None],
    page_size: int,
) -> bool:
    """Whether every rank has sent as many rows as it holds in sequences of these lengths."""
    stop = np.array(lengths) if span[1] is None else np.minimum(lengths, span[1])
    start = np.minimum(stop, span[0])
    for rank, (fields, _) in enumerate(replies):
        before, after = (held(at, rank, len(replies), page_size) for at in (start, stop))
        if not np.array_equal(np.diff(fields["kv_indptr"]), after - before):
            return False
    return True


def gathered(
    replies: Sequence[tuple[Fields, Mapping[str, Array]]],
    lengths: Sequence[int],
    span: tuple[int, int | None],
    page_size: int,
) -> tuple[Fields, dict[str, Array]]:
    """K and V of tokens `span` of each sequence, in order, from the rows that every rank has."""
    ranks, sums, places = len(replies), [0], []
    for length in lengths:
        stop = length if span[1] is None else min(span[1], length)
        token = np.arange(min(span[0], length), stop)
        places.append(token // page_size % ranks)
        sums.append(sums[-1] + token.size)
    whole: dict[str, Array] = {}
    for name, like in replies[0][1].items():
        whole[name] = np.empty((sums[-1], *like.shape[1:]), like.dtype)
        for rank, (fields, arrays) in enumerate(replies):
            own = fields["kv_indptr"]
            for index, at in enumerate(places):
                into = whole[name][sums[index] : sums[index + 1]]
                into[at == rank] = arrays[name][own[index] : own[index + 1]]
    return {"kv_indptr": sums}, whole


Handler = Callable[["Ranks", Call, Fields, Arrays], Awaitable[EngineReply]]
HANDLERS: Final[dict[str, Handler]] = {
    "append": rows,
    "decode": rows,
    "prefill": rows,
    "gather": gather,
    "create_sequences": create,
    "get_sequence": get,
    "truncate": truncate,
    "delete_sequence": delete,
}
