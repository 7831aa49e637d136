"""Who changes a sequence that is dealt out over engines: one door at a time, in its own epoch.

A door claims a sequence at every rank before it changes it, with a number above all before; from
then on ranks refuse whoever claimed earlier, so nothing that is under way elsewhere can come in
between. What a door of an earlier epoch has left half done is cut back then. Within an epoch a
sequence only grows, and every rank knows the length of all of it: ranks of equal epoch and lengths
have parts of the same sequence.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership.engine import Told
from service.cluster.routing.replies import each
from service.doors.kit.problems import ProblemText
from service.errors import SequenceTaken, UnknownSequence
from service.operations.internal import CLAIM
from service.operations.sequences import GET_SEQUENCE, TRUNCATE
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.sharded.ranks import Ranks

MEND_S: Final = 10.0
TRIES: Final = 14
"""How often other doors may come in between before a call is refused: half a second or so."""
FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.1
STALE: Final = frozenset({"length_mismatch", "sequence_taken"})


@dataclass(slots=True, eq=False)
class Dealt:
    """One sequence, as this door knows it. `lengths` is kv_len by layer in `epoch`, None where it
    has to be asked for. `is_owned`: this door claimed the epoch. Not `is_even`: what it began may
    have been done by some ranks alone."""

    tenant: Tenant
    id: str
    lengths: list[int] | None = None
    epoch: int = 0
    is_owned: bool = False
    is_even: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_at(self, lengths: Sequence[int], epoch: int) -> None:
        """Claimed, and nothing half done."""
        self.lengths, self.epoch = list(lengths), epoch
        self.is_owned = self.is_even = True


def later(epoch: int) -> int:
    """An epoch after this one, and as good as surely after those of others: they are times, in
    microseconds. Two that are equal do no harm: each rank takes one of them."""
    return max(epoch + 1, time.time_ns() // 1000)


async def pause(number: int) -> None:
    """Wait before all tries but the first, so that two doors do not keep each other waiting."""
    if number:
        longest = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
        await asyncio.sleep(random.uniform(0.0, longest))


async def know(ranks: Ranks, every: Sequence[Dealt], *, to_change: bool) -> None:
    """Ask for what is not known of sequences; claim those that are to be changed."""
    asking = [one for one in every if is_wanting(one, to_change)]
    if not asking:
        return
    for told in await each([know_one(ranks, one, to_change) for one in asking]):
        if isinstance(told, BaseException):
            ranks.forget_all(every)  # perhaps nobody knows them
            raise told


def ask_anew(every: Sequence[Dealt]) -> None:
    """Other doors may have changed the sequences: what is known of them holds no more."""
    for one in every:
        one.lengths = None


def is_wanting(one: Dealt, to_change: bool) -> bool:
    """Whether ranks must be asked before the sequence is read, or changed."""
    return one.lengths is None or not one.is_even or (to_change and not one.is_owned)


async def know_one(ranks: Ranks, one: Dealt, to_change: bool) -> None:
    if one.is_even and (one.is_owned or not to_change):
        await learn(ranks, one)
    if is_wanting(one, to_change):
        await claim(ranks, one)


async def learn(ranks: Ranks, one: Dealt) -> None:
    """Read what all ranks know. Where they go on differing, what some have done alone is cut."""
    for number in range(TRIES // 2):
        await pause(number)
        known = [shard_of(one, part) for part in await parts(ranks, one)]
        epoch, lengths = known[0]["epoch"], known[0]["lengths"]
        if all((part["epoch"], part["lengths"]) == (epoch, lengths) for part in known):
            one.is_owned = one.is_owned and one.epoch == epoch
            one.lengths, one.epoch = lengths, epoch
            return
    await claim(ranks, one)


async def parts(ranks: Ranks, one: Dealt) -> list[dict[str, Any]]:
    """What each rank tells of the sequence."""
    call = ranks.own(GET_SEQUENCE, one.tenant, MEND_S)
    return [told.fields for told in await ranks.all(call, {"id": one.id})]


def shard_of(one: Dealt, part: Mapping[str, Any]) -> dict[str, Any]:
    """Raises UnknownSequence where another sequence has the name by now."""
    shard: dict[str, Any] | None = part.get("shard")
    if shard is None:
        raise UnknownSequence([one.id])
    return shard


async def claim(ranks: Ranks, one: Dealt) -> None:
    """Make this door the one that changes the sequence, and all ranks agree on its lengths.

    Raises SequenceTaken where others keep coming in between.
    """
    call, seen, own = ranks.own(CLAIM, one.tenant, MEND_S), one.epoch, one.epoch
    known = one.lengths if one.is_owned else None
    one.is_owned = one.is_even = False
    for number in range(TRIES):
        await pause(number)
        epoch = later(seen)
        told = await ranks.told_by_all(call, {"id": one.id, "epoch": epoch})
        refused = [answer for answer in told if not isinstance(answer, Told)]
        if refused and not all(map(is_stale, refused)):
            ranks.whole(told)
        seen = max([epoch, *(epoch_in(answer, one.id) for answer in refused)])
        if not refused:
            held = [answer.fields for answer in ranks.whole(told)]
            # what this door has begun itself and nobody has seen is as if it had not been
            nobody_else = known is not None and all(part["epoch"] == own for part in held)
            await settle(ranks, one, epoch, held, known if nobody_else else None)
            return
    raise SequenceTaken({one.id: seen})


async def settle(
    ranks: Ranks,
    one: Dealt,
    epoch: int,
    held: Sequence[Mapping[str, Any]],
    known: Sequence[int] | None,
) -> None:
    """Cut what only some ranks have, in an epoch that all have been claimed for."""
    columns = zip(*(part["lengths"] for part in held), strict=True)
    lengths = [min(column) for column in columns]
    if known is not None:
        lengths = [min(both) for both in zip(lengths, known, strict=True)]
    call, asking = ranks.own(TRUNCATE, one.tenant, MEND_S), []
    for engine, part in zip(ranks.engines, held, strict=True):
        if part["lengths"] == lengths:
            continue
        cuts = [{"layer": layer, "length": length} for layer, length in enumerate(lengths)]
        if len(set(lengths)) == 1:  # also within what is shared: a cut of all layers was begun
            cuts = [{"length": lengths[0]}]
        asking += [engine.ask(call, {"id": one.id, "epoch": epoch} | cut) for cut in cuts]
    ranks.whole(await each(asking))
    one.is_at(lengths, epoch)


def is_stale(refused: object) -> bool:
    """Whether a rank is not where this door believed: another one was at work."""
    if isinstance(refused, ProblemText):
        return refused.problem["code"] in STALE
    return isinstance(refused, SequenceTaken)


def epoch_in(refused: object, name: str) -> int:
    """The epoch that a refusal tells of, 0 where it tells none."""
    if not isinstance(refused, ProblemText):
        return 0
    return int(refused.problem.get("epochs", {}).get(name, 0))
