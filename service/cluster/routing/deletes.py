"""Many sequences are deleted over all engines, also those that change their engine meanwhile.

Engines delete what they alone have to do with; the others, of which they have a part or which are
on their way, are deleted one by one, each at all of its engines or at none. A sequence may come to
an engine after that was asked, and leave another before that one is: so they are asked again, until
there is nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from service.cluster.membership.engine import Call
from service.cluster.routing.batch_calls import ask_parts
from service.cluster.routing.joins import ask_all
from service.cluster.routing.locator import ASK_DEADLINE_S
from service.cluster.routing.replies import each, reply
from service.doors.kit.problems import ProblemText, document_of
from service.errors import InvalidRequest, LostSequence, UnknownSequence
from service.image.json_text import dump_json
from service.operations.schema.spec import Prepared
from service.operations.sequences import DELETE_SEQUENCE, DELETE_SEQUENCES, MAX_LISTED
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

AT_ONCE: Final = 64
"""Sequences that are deleted one by one at the same time."""
MOST_LOOKS: Final = 4
"""Others may go on making sequences whose ids begin like this."""


async def delete_many(router: Router, call: Call, prepared: Prepared) -> tuple[Answered, Slot]:
    """How many were deleted, where one that is dealt out counts once. Raises what engines refuse:
    then each is still there or is not, and asking again deletes the rest."""
    fields = prepared.fields
    if fields.skip:
        raise InvalidRequest("skip", True, "is for one engine: a cluster's sequences are whole")
    wanted = None if fields.prefix is not None else len(fields.names)
    asked = fields.model_dump(exclude_unset=True) | {"skip": True}
    total = looks = 0
    if fields.prefix is not None:
        router.members.check_all_answer()
    while total != wanted and looks < MOST_LOOKS:
        told = await ask_all(router, call, [asked] * len(router.members.engines))
        answers = [one.fields for _, one in told]
        skipped = sorted({name for one in answers for name in one["skipped"]})
        deleted = sum(one["num_deleted"] for one in answers)
        total += deleted + await one_by_one(router, call, skipped)
        if looks and not (deleted or skipped):
            break
        looks += all(len(one["skipped"]) < MAX_LISTED for one in answers)
    if total != wanted:
        router.members.check_reachable()
    router.prompts.end(call.tenant.namespace, fields.names)
    return reply(router.arena, call, {"num_deleted": total})


async def one_by_one(router: Router, call: Call, names: Sequence[str]) -> int:
    """How many were there. Raises the first refusal when all were asked for."""
    free = asyncio.Semaphore(AT_ONCE)

    async def delete(name: str) -> bool:
        async with free:
            return await was_there(router, call, name)

    told = await each([delete(name) for name in names])
    both = list(zip(names, told, strict=True))
    if errors := [one for one in told if isinstance(one, BaseException)]:
        document = document_of(errors[0], b"")
        done = [name for name, one in both if one is True]
        raise ProblemText(dump_json(document | {"done": [*document.get("done", ()), *done]}))
    return sum(one is True for one in told)


async def was_there(router: Router, call: Call, name: str) -> bool:
    """Delete a sequence at all engines that have a part of it, or at none; whether there was one.
    Of one that was lost with an engine, the rest is deleted."""
    asked, members = replace(call, operation=DELETE_SEQUENCE), router.members
    try:
        await ask_parts(router, asked, [name], {"id": name}, {}, changes=True)
    except UnknownSequence:
        return False
    except LostSequence:
        tenant = members.acting_for(call.tenant)
        own = [one.own(DELETE_SEQUENCES, tenant, ASK_DEADLINE_S) for one in members.engines]
        every = zip(members.engines, own, strict=True)
        await each([engine.ask(one, {"ids": [name]}) for engine, one in every])
        return False
    except ProblemText as refused:
        if refused.problem["code"] != "unknown_sequence":
            raise
        return False  # where it has gone since is found out by the next look
    router.homes.forget(call, [name])
    return True
