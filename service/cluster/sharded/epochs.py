"""Orders the writers of a sharded sequence: one door at a time, each in an epoch of its own.

A door claims a sequence at every rank before changing it, with a number above all before. From then
on ranks refuse doors that claimed earlier, so none of their requests can interfere. The claim also
cuts back an append that an earlier door left unfinished. Within an epoch a sequence only grows, and
every rank knows the whole length: ranks of equal epoch and lengths hold shards of the same
sequence.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from service.cluster.membership.engine import Call, EngineReply
from service.cluster.routing.replies import gather_all, results_of, whole
from service.doors.kit.problems import ProblemText
from service.errors import SequenceTaken, UnknownSequence, problem
from service.image.json_text import dump_json
from service.operations.internal import CLAIM
from service.operations.sequences import GET_SEQUENCE, TRUNCATE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks

TRIES: Final = 14
"""How often other doors can interfere before a request is refused: half a second or so."""
FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.1
STALE: Final = frozenset({"length_mismatch", "sequence_taken"})
Result = TypeVar("Result")


class Stale(Exception):
    """A rank is not in the state that this door believed: another door was at work."""


@dataclass(slots=True, eq=False)
class ShardedSequence:
    """One sequence, as this door knows it.

    `lengths` is kv_len by layer in `epoch`, None if the ranks must be asked. `is_owned`: this door
    claimed the epoch. Not `is_consistent`: perhaps only some ranks have carried out a change.
    Not `is_ordered`: since another door made it, its ranks may be in another order.
    """

    tenant: Tenant
    id: str
    lengths: list[int] | None = None
    epoch: int = 0
    is_owned: bool = False
    is_consistent: bool = True
    is_ordered: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def set_claimed(self, lengths: Sequence[int], epoch: int) -> None:
        """This door owns the epoch, and all ranks have these lengths."""
        self.lengths, self.epoch = list(lengths), epoch
        self.is_owned = self.is_consistent = True

    @property
    def known_lengths(self) -> list[int]:
        if self.lengths is None:
            raise RuntimeError(f"the lengths of {self.id} are not known: this is a bug")
        return self.lengths

    def is_current(self, *, to_write: bool) -> bool:
        """Whether it can be read, or changed, without asking the ranks first."""
        return self.lengths is not None and self.is_consistent and (self.is_owned or not to_write)


def later(epoch: int) -> int:
    """An epoch after this one, and almost certainly after any other: epochs are times in
    microseconds. Two equal ones do no harm: each rank accepts one of them."""
    return max(epoch + 1, time.time_ns() // 1000)


async def retried(
    ranks: Ranks,
    call: Call,
    ids: Sequence[str],
    attempt: Callable[[list[ShardedSequence], bool], Awaitable[Result]],
    *,
    to_write: bool = False,
    rereads: bool = False,
) -> Result:
    """The result of `attempt` on sequences whose state is known, repeated while it is `Stale`.

    `attempt` gets the sequences, and whether the ranks were asked after the request arrived.
    Sequences to be changed are claimed first (`to_write`). `rereads`: what this door does not own
    is asked for in any case. Raises SequenceTaken where other doors keep interfering.
    """
    async with ranks.locked(call, ids) as sequences:
        for number in range(TRIES):
            await pause(number)
            if rereads:
                invalidate([one for one in sequences if not one.is_owned])
            await refresh(ranks, sequences, to_write=to_write)
            try:
                return await attempt(sequences, number > 0)
            except Stale:
                invalidate(sequences)
        raise SequenceTaken({one.id: one.epoch for one in sequences})


async def pause(number: int) -> None:
    """Wait before all tries but the first, so that two doors do not block each other."""
    if number:
        longest = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
        await asyncio.sleep(random.uniform(0.0, longest))


def invalidate(sequences: Sequence[ShardedSequence]) -> None:
    """Other doors may have changed the sequences: ask for their lengths before the next use."""
    for one in sequences:
        one.lengths = None


def all_of(replies: Sequence[EngineReply | BaseException]) -> list[EngineReply]:
    """The replies of all ranks. Raises `Stale` if one is, else as `whole`."""
    if any(map(is_stale, replies)):
        raise Stale
    return whole(replies)


async def refresh(ranks: Ranks, sequences: Sequence[ShardedSequence], *, to_write: bool) -> None:
    """Ask the ranks for unknown lengths, and claim sequences to be changed."""
    asking = [one for one in sequences if not one.is_current(to_write=to_write)]
    for result in await results_of([refresh_one(ranks, one, to_write) for one in asking]):
        if isinstance(result, BaseException):
            ranks.forget_all(sequences)  # they may have moved, or be deleted
            raise result


async def refresh_one(ranks: Ranks, one: ShardedSequence, to_write: bool) -> None:
    if one.is_consistent and (one.is_owned or not to_write):
        await read(ranks, one)
    if not one.is_current(to_write=to_write):
        await claim(ranks, one)


async def read(ranks: Ranks, one: ShardedSequence) -> None:
    """Ask all ranks for the lengths. If they keep differing, claim, which cuts what only some
    ranks have."""
    for number in range(TRIES // 2):
        await pause(number)
        views = whole(await ranks.question(GET_SEQUENCE, one.tenant, {"id": one.id}))
        if (state := common_state(one, views)) is not None:
            one.is_owned = one.is_owned and one.epoch == state[0]
            one.epoch, one.lengths = state
            one.is_ordered = True
            return
    await claim(ranks, one)


def common_state(
    one: ShardedSequence, views: Sequence[EngineReply]
) -> tuple[int, list[int]] | None:
    """Epoch and lengths, where all ranks have the same. Raises ProblemText, `unknown_sequence`,
    where a rank has another sequence by that name, or its shards are in another order."""
    whole = {"rank": 0, "ranks": 1}
    shards: list[dict[str, Any]] = [view.fields.get("shard", whole) for view in views]
    in_order = [(rank, len(views)) for rank in range(len(views))]
    if [(shard["rank"], shard["ranks"]) for shard in shards] != in_order:
        raise ProblemText(dump_json(problem(UnknownSequence([one.id]))))
    states = [(shard["epoch"], shard["lengths"]) for shard in shards]
    return states[0] if all(state == states[0] for state in states) else None


async def claim(ranks: Ranks, one: ShardedSequence) -> None:
    """Make this door the writer, and all ranks agree on the lengths.

    Raises SequenceTaken where other doors keep interfering.
    """
    seen = own = one.epoch
    known = one.lengths if one.is_owned else None
    one.is_owned = one.is_consistent = False
    for number in range(TRIES):
        await pause(number)
        epoch = later(seen)
        replies = await ranks.question(CLAIM, one.tenant, {"id": one.id, "epoch": epoch})
        errors = [reply for reply in replies if not isinstance(reply, EngineReply)]
        if not all(map(is_stale, errors)):
            whole(replies)
        seen = max([epoch, *(epoch_in(error, one.id) for error in errors)])
        if not errors:
            held = [reply.fields for reply in whole(replies)]
            # an unfinished change of this door, which no other door has seen, is cut back as well
            is_same = all(shard["epoch"] == own for shard in held)
            is_unseen, one.is_ordered = known is not None and is_same, one.is_ordered and is_same
            await settle(ranks, one, epoch, held, known if is_unseen else None)
            return
    raise SequenceTaken({one.id: seen})


async def settle(
    ranks: Ranks,
    one: ShardedSequence,
    epoch: int,
    held: Sequence[Mapping[str, Any]],
    known: Sequence[int] | None,
) -> None:
    """Cut tokens that only some ranks have, in an epoch that all have accepted."""
    every = [shard["lengths"] for shard in held] + ([] if known is None else [known])
    lengths = [min(layer) for layer in zip(*every, strict=True)]
    cutting = []
    for engine, shard in zip(ranks.engines, held, strict=True):
        if shard["lengths"] == lengths:
            continue
        cuts = [{"layer": layer, "length": length} for layer, length in enumerate(lengths)]
        if len(set(lengths)) == 1:  # also within shared pages: a cut of all layers was begun
            cuts = [{"length": lengths[0]}]
        given = {"id": one.id, "epoch": epoch}
        cutting += [engine.question(TRUNCATE, one.tenant, given | cut) for cut in cuts]
    await gather_all(cutting)
    one.set_claimed(lengths, epoch)


def is_stale(reply: object) -> bool:
    """Whether a rank refused a request because it is in another state than the door believed."""
    if isinstance(reply, ProblemText):
        return reply.problem["code"] in STALE
    return isinstance(reply, SequenceTaken)


def epoch_in(error: object, name: str) -> int:
    if not isinstance(error, ProblemText):
        return 0
    return int(error.problem.get("epochs", {}).get(name, 0))
