"""What the ranks of a sequence are asked for each operation, and what becomes of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Told
from service.cluster.routing.batch_split import row_sums
from service.cluster.routing.replies import each, longest
from service.cluster.sharded.deletion import delete, delete_made
from service.cluster.sharded.epochs import (
    TRIES,
    Dealt,
    ask_anew,
    claim,
    is_stale,
    know,
    later,
    pause,
    shard_of,
)
from service.cluster.sharded.shard_replies import gathered, has_all, one_state, whole_view
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    InvalidRequest,
    LengthMismatch,
    SequenceTaken,
)
from service.operations.sequences import DELETE_SEQUENCES

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks

Fields = dict[str, Any]
Arrays = Mapping[str, Array]
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
    ids, believed = fields["sequences"], fields.get("offsets")
    refuse_field("layers", fields)
    layer = fields["layer"]
    counts = np.diff(row_sums(fields, len(ids))).tolist()
    appends, asked_anew = "k" in arrays, False
    async with ranks.held(call, ids) as every:
        for number in range(TRIES):
            await pause(number)
            await know(ranks, every, to_change=appends)
            before = [lengths_of(one)[layer] for one in every]
            if believed is not None and list(believed) != before:
                if asked_anew:
                    raise LengthMismatch(dict(zip(ids, before, strict=True)))
                asked_anew = True
                ask_anew(every)
                continue
            asked_anew = False
            for one in every if appends else ():
                one.is_even = False  # until all ranks have done it
            agreed = {"offsets": before, "epochs": [one.epoch for one in every]}
            told = await ranks.told_by_all(call, fields | agreed, arrays)
            refused = [one for one in told if not isinstance(one, Told)]
            if not refused:
                break
            if any(map(is_stale, refused)):
                ask_anew(every)
                continue
            if appends:
                with suppress(ProblemText, AttndError):  # what fails is done before the next use
                    await know(ranks, every, to_change=True)
            ranks.whole(told)
        else:
            raise SequenceTaken({one.id: one.epoch for one in every})
        if appends:
            for one, count in zip(every, counts, strict=True):
                grow(one, layer, count)
        after = [length + count for length, count in zip(before, counts, strict=True)]
        return joined(call, [one for one in told if isinstance(one, Told)], fields, after)


def lengths_of(one: Dealt) -> list[int]:
    if one.lengths is None:
        raise RuntimeError(f"the lengths of {one.id} are not known: this is a bug")
    return one.lengths


def grow(one: Dealt, layer: int, count: int) -> None:
    """It has been appended to, at all ranks."""
    lengths_of(one)[layer] += count
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


async def gather(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """Every rank's rows, and then in order."""
    span = fields.get("start", 0), fields.get("stop")
    async with ranks.held(call, fields["sequences"]) as every:
        for number in range(TRIES):
            await pause(number)
            await know(ranks, every, to_change=False)
            lengths = [lengths_of(one)[fields["layer"]] for one in every]
            epochs = {"epochs": [one.epoch for one in every]}
            told = await ranks.told_by_all(call, fields | epochs)
            if not any(map(is_stale, told)):
                rows_of = [(one.fields, one.arrays) for one in ranks.whole(told)]
                if has_all(rows_of, lengths, span, ranks.page_size):
                    answer, arrays = gathered(rows_of, lengths, span, ranks.page_size)
                    stages = longest(one.stages for one in ranks.whole(told))
                    return Told(answer, arrays, stages)
            ask_anew(every)  # it has been appended to
    raise SequenceTaken({one.id: one.epoch for one in every})


async def create(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """Empty sequences, and forks of those that are here: at every rank, all or none.

    Raises Forbidden for a caller who may not create: the ranks see the router's scopes, not his.
    """
    call.tenant.require(call.operation.scope, call.operation.name)
    call = replace(call, tenant=ranks.acting_for(call.tenant))
    new = fields["sequences"]
    own = {one["id"] for one in new}
    parents = sorted({one["parent"] for one in new if one.get("parent")} - own)
    asked_anew = False
    async with ranks.held(call, parents) as every:
        for number in range(TRIES):
            await pause(number)
            ask_anew([one for one in every if not one.is_owned])
            await know(ranks, every, to_change=False)
            known = {one.id: one for one in every}
            try:
                made = plan_new(ranks, call, new, known)
            except InvalidRequest:  # by what this door believes
                if asked_anew or not every:
                    raise
                asked_anew = True
                ask_anew(every)
                continue
            asking = []
            for rank, engine in enumerate(ranks.engines):
                shard = {"rank": rank, "ranks": len(ranks.engines)}
                there = [part_of(one, shard, made[one["id"]]) for one in new]
                asking.append(engine.ask(call, {"sequences": there}))
            told = await each(asking)
            if all(isinstance(one, Told) for one in told):
                break
            await unmake(ranks, call, [one["id"] for one in new], told)
            if not any(map(is_stale, told)):
                ranks.whole(told)
            ask_anew(every)
        else:
            raise SequenceTaken({one.id: one.epoch for one in every})
        views = [one.fields["sequences"] for one in ranks.whole(told)]
    answers = []
    for shown in zip(*views, strict=True):
        name = shown[0]["id"]
        ranks.books[call.tenant.namespace, name] = made[name]
        answers.append(whole_view(shown))
    return Told({"sequences": answers}, {}, longest(one.stages for one in ranks.whole(told)))


def plan_new(
    ranks: Ranks, call: Call, new: Sequence[Mapping[str, Any]], parents: Mapping[str, Dealt]
) -> dict[str, Dealt]:
    """What the new sequences will be. An empty one is this door's to change; a fork begins in its
    parent's epoch, which more than one door may know, and must be claimed before it is changed."""
    layers = ranks.engines[0].info.num_layers
    made: dict[str, Dealt] = {}
    for one in new:
        name, parent = one["id"], one.get("parent")
        made[name] = Dealt(ranks.acting_for(call.tenant), name)
        if parent is None:
            made[name].is_at([0] * layers, later(0))
            continue
        of = made.get(parent) or parents[parent]
        length = fork_length(parent, lengths_of(of), one.get("length"))
        made[name].lengths, made[name].epoch = [length] * layers, of.epoch
    return made


def part_of(new: Mapping[str, Any], shard: Fields, made: Dealt) -> Fields:
    """What one rank is asked to make."""
    same = {name: new[name] for name in ("id", "ttl_s", "parent") if new.get(name) is not None}
    same["epoch"] = made.epoch
    return same | ({"length": lengths_of(made)[0]} if "parent" in same else {"shard": shard})


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
    async with ranks.held(call, [fields["id"]]) as (one,):
        for number in range(TRIES):
            await pause(number)
            if not one.is_even:
                await know(ranks, [one], to_change=False)
            told = await ranks.all(call, fields)
            shards = [shard_of(one, part.fields) for part in told]
            if all(
                (s["epoch"], s["lengths"]) == (shards[0]["epoch"], shards[0]["lengths"])
                for s in shards
            ):
                break
            ask_anew([one])
            await know(ranks, [one], to_change=False)
    return Told(whole_view([one.fields for one in told]), {}, longest(one.stages for one in told))


def refuse_field(name: str, fields: Fields) -> None:
    if fields.get(name) is not None:
        raise InvalidRequest(name, fields[name], "is for sequences that are on one engine")


async def truncate(ranks: Ranks, call: Call, fields: Fields, _: Arrays) -> Told:
    """First at the rank that has the last page: only there a fresh page may be wanting."""
    for name in ("layer", "epoch", "keep"):
        refuse_field(name, fields)
    length = fields["length"]
    async with ranks.held(call, [fields["id"]]) as (one,):
        for number in range(TRIES):
            await pause(number)
            await claim(ranks, one)
            lengths = lengths_of(one)
            if length > min(lengths):
                rule = f"0 to {min(lengths)}, the sequence's length"
                raise InvalidRequest("length", length, rule)
            # in an epoch of its own: what has been cut off may come again, with other numbers
            last = ranks.engines[length // ranks.page_size % len(ranks.engines)]
            asked, one.is_even = fields | {"epoch": later(one.epoch)}, False
            first = await each([last.ask(call, asked)])
            if not isinstance(first[0], Told):
                if is_stale(first[0]):
                    continue
                one.is_even = True
                ranks.whole(first)
            one.lengths = None  # at least one rank is in the new epoch
            told = await ranks.told_by_all(call, asked)
            if any(map(is_stale, told)):
                continue
            views = ranks.whole(told)
            one.is_at([length] * len(lengths), asked["epoch"])
            shown = whole_view([view.fields for view in views])
            return Told(shown, {}, longest(view.stages for view in views))
    raise SequenceTaken({one.id: one.epoch})


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
    "delete_sequences": delete_made,
}
