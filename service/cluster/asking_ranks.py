"""What the ranks of a sequence are asked for each operation, and what becomes of their answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from service.cluster.answering import each, longest
from service.cluster.batches import row_sums
from service.cluster.dealt import gathered, one_state, whole_view
from service.cluster.engine import Call, Told
from service.doors.problems import ProblemText
from service.errors import InvalidRequest, LengthMismatch, NotReady
from service.image.dtypes import Array
from service.operations.sequences import DELETE_SEQUENCES

if TYPE_CHECKING:
    from service.cluster.ranks import Dealt, Ranks

Fields = dict[str, Any]
Arrays = Mapping[str, Array]
TRIES: Final = 3
"""How often lengths may turn out to be old before that is the answer."""
UNDO_S: Final = 10.0


async def asked(ranks: Ranks, call: Call, fields: Mapping[str, Any], arrays: Arrays) -> Told:
    """The answer of all ranks to an operation. Raises InvalidRequest for one that needs its
    sequences on one engine."""
    ask = ASKED.get(call.operation.name)
    if ask is None:
        ids = fields.get("sequences", fields.get("id"))
        rule = f"over {len(ranks.engines)} engines: {call.operation.name} takes those on one"
        raise InvalidRequest("sequences", ids, rule)
    return await ask(ranks, call, dict(fields), arrays)


async def rows(ranks: Ranks, call: Call, fields: Fields, arrays: Arrays) -> Told:
    """append, decode, prefill: the same for all ranks, which pick their own rows."""
    ids, layer, believed = fields["sequences"], fields["layer"], fields.get("offsets")
    counts = np.diff(row_sums(fields, len(ids))).tolist()
    appends = "k" in arrays
    async with ranks.held(call, ids) as every:
        for left in reversed(range(TRIES)):
            before = [(await ranks.know(one))[layer] for one in every]
            if believed is not None and list(believed) != before:
                raise LengthMismatch(dict(zip(ids, before, strict=True)))
            for one in every if appends else ():
                one.is_even = False  # until all of them have done it
            asking = [e.ask(call, fields | {"offsets": before}, arrays) for e in ranks.engines]
            told = await each(asking)
            refused = [one for one in told if not isinstance(one, Told)]
            if not refused:
                break
            if appends:
                await ranks.take_back(every, layer, told)
            if any(map(is_stale, refused)):
                for one in every:
                    one.lengths = None
                if left:
                    continue
            ranks.whole(told)
        if appends:
            for one, count in zip(every, counts, strict=True):
                grow(one, layer, count)
        after = [length + count for length, count in zip(before, counts, strict=True)]
        return joined(call, [one for one in told if isinstance(one, Told)], fields, after)


def grow(one: Dealt, layer: int, count: int) -> None:
    """It has been appended to, at all ranks."""
    if one.lengths is not None:
        one.lengths[layer] += count
        one.is_even = True


def joined(call: Call, told: Sequence[Told], fields: Fields, lengths: list[int]) -> Told:
    """One answer of all ranks'."""
    stages = longest(one.stages for one in told)
    if call.operation.name == "append":
        return Told({"lengths": lengths}, {}, stages)
    states = one_state([one.arrays for one in told], fields.get("lse_base", "e"))
    answer = told[0].fields | {
        "levels": max(one.fields["levels"] for one in told),
        "cascade": any(one.fields["cascade"] for one in told),
    }
    return Told(answer, states, stages)


def is_stale(refused: object) -> bool:
    """Whether an engine holds other lengths than it was told: another door was at work."""
    if not isinstance(refused, ProblemText):
        return False
    return bool(json.loads(refused.text)["code"] == "length_mismatch")


async def gather(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """Every rank's rows, and then in order."""
    span = fields.get("start", 0), fields.get("stop")
    async with ranks.held(call, fields["sequences"]) as every:
        lengths = [(await ranks.know(one))[fields["layer"]] for one in every]
        told = await ranks.all(call, fields)
    answer, arrays = gathered(
        [(one.fields, one.arrays) for one in told], lengths, span, ranks.page_size
    )
    return Told(answer, arrays, longest(one.stages for one in told))


async def create(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """Empty sequences, and forks of those that are here: at every rank, all or none."""
    new = fields["sequences"]
    own = {one["id"] for one in new}
    parents = sorted({one["parent"] for one in new if one.get("parent")} - own)
    async with ranks.held(call, parents) as every:
        known = {one.id: await ranks.know(one) for one in every}
        layers = ranks.engines[0].info.num_layers
        lengths: dict[str, list[int]] = {}
        for one in new:
            parent = one.get("parent")
            held = [0] * layers if parent is None or parent in own else known[parent]
            lengths[one["id"]] = [fork_length(parent, held, one.get("length"))] * layers
        asking = []
        for rank, engine in enumerate(ranks.engines):
            shard = {"rank": rank, "ranks": len(ranks.engines)}
            made_there = [part_of(one, shard, lengths[one["id"]][0]) for one in new]
            asking.append(engine.ask(call, {"sequences": made_there}))
        told = await each(asking)
        if not all(isinstance(one, Told) for one in told):
            await unmake(ranks, call, [one["id"] for one in new], told)
        views = [one.fields["sequences"] for one in ranks.whole(told)]
    made = []
    for parts in zip(*views, strict=True):
        ranks.dealt(call.tenant, parts[0]["id"]).lengths = list(lengths[parts[0]["id"]])
        made.append(whole_view(parts))
    return Told({"sequences": made}, {}, longest(one.stages for one in ranks.whole(told)))


def part_of(new: Mapping[str, Any], shard: Fields, length: int) -> Fields:
    """What one rank is asked to make."""
    same = {name: new[name] for name in ("id", "ttl_s", "parent") if new.get(name) is not None}
    return same | ({"length": length} if "parent" in same else {"shard": shard})


def fork_length(parent: str | None, lengths: Sequence[int], wanted: int | None) -> int:
    """How many tokens a fork gets. Raises InvalidRequest as an engine does."""
    least, most = min(lengths), max(lengths)
    if wanted is None and least != most:
        rule = f"its layers hold {least} to {most} tokens: say length = {least}, or append first"
        raise InvalidRequest("parent", parent, rule)
    if wanted is not None and wanted > least:
        raise InvalidRequest("length", wanted, f"0 to {least}, the parent's length")
    return least if wanted is None else wanted


async def unmake(ranks: Ranks, call: Call, ids: list[str], told: Sequence[object]) -> None:
    """Delete what some ranks have made, where others have not."""
    ranks.forget(call, ids)
    await each(
        [
            engine.ask(engine.own(DELETE_SEQUENCES, call.tenant, UNDO_S), {"ids": ids})
            for engine, one in zip(ranks.engines, told, strict=True)
            if isinstance(one, Told)
        ]
    )


async def get(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    async with ranks.held(call, [fields["id"]]):
        told = await ranks.all(call, fields)
    return Told(whole_view([one.fields for one in told]), {}, longest(one.stages for one in told))


async def truncate(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """First at the rank that has the last page: only there a fresh page may be wanting."""
    if fields.get("layer") is not None:
        raise InvalidRequest("layer", fields["layer"], "is for sequences that are on one engine")
    length = fields["length"]
    async with ranks.held(call, [fields["id"]]) as (one,):
        lengths = await ranks.know(one)
        if length > min(lengths):
            rule = f"0 to {min(lengths)}, the sequence's length"
            raise InvalidRequest("length", length, rule)
        last = ranks.engines[length // ranks.page_size % len(ranks.engines)]
        one.is_even = False
        first = await each([last.ask(call, fields)])
        if not isinstance(first[0], Told):
            one.is_even = True
            ranks.whole(first)
        one.lengths = [length] * len(lengths)
        told = await ranks.all(call, fields)
        one.is_even = True
    return Told(whole_view([one.fields for one in told]), {}, longest(one.stages for one in told))


async def delete(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """At every rank, also where one refuses, and those there are."""
    ids = fields.get("ids") or [fields["id"]]
    told = await each([engine.ask(call, fields) for engine in ranks.engines])
    ranks.forget(call, ids)
    gone = [one for one in told if isinstance(one, Told)]
    if not gone or any(isinstance(one, NotReady) for one in told):
        ranks.whole(told)
    return Told(gone[0].fields, {}, longest(one.stages for one in gone))


Ask = Callable[["Ranks", Call, Fields, Arrays], Awaitable[Told]]
ASKED: Final[dict[str, Ask]] = {
    "append": rows,
    "decode": rows,
    "prefill": rows,
    "gather": gather,
    "create_sequences": create,
    "get_sequence": get,
    "truncate": truncate,
    "delete_sequence": delete,
    "delete_sequences": delete,
}
