"""Transfers the ownership of a sequence, and settles it where a transfer has failed.

States at the source: `leaving` (calls are held up), `handed` (the target may answer for it), then
`gone` (deleted), or `back` (as before).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Final

from service.cluster.membership.engine import ASK_S, Engine, EngineReply
from service.cluster.membership.members import Members
from service.cluster.migration.transfer import Family, ask
from service.cluster.routing.locator import question, state_at
from service.cluster.routing.replies import gather_all, results_of
from service.doors.kit.problems import ProblemText
from service.operations.internal import HAND_OVER
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import CANCEL_IMPORT, GET_IMPORT, IMPORT
from service.tenants import Tenant

LOG: Final = logging.getLogger("attnd.cluster")


async def set_state(
    source: Engine, tenant: Tenant, sequence: str, state: str, **given: Any
) -> None:
    """Sets the state of a sequence at its old engine."""
    fields: dict[str, Any] = {"id": sequence, "state": state, "for_s": ASK_S}
    await ask(source, HAND_OVER, tenant, fields | given)


async def roll_back(
    members: Members, source: Engine, family: Family, sequence: str, is_handed: bool
) -> None:
    """After a failed transfer: the sequence stays at the source, unless the target has it. Where
    that is unknown the source's mark expires, so that there are never two of it. `is_handed`: the
    source may have transferred the ownership, so that others may settle it."""
    tenant, target, state = family.tenant, family.target, "back"
    if target is not None:
        cancel = target.question(CANCEL_IMPORT, tenant, {"id": sequence}, is_poll=True)
        (cancelled,) = await results_of([cancel])
        is_known = isinstance(cancelled, EngineReply)
        if isinstance(cancelled, ProblemText):
            there: bool | BaseException = False
            if is_handed:
                arrived = has_arrived(source, [target], sequence, tenant)
                (there,) = await results_of([arrived])
            is_known = isinstance(there, bool)
            state = "gone" if there is True else "back"
        if is_handed and not is_known and not await is_dead(members, target):
            LOG.warning("%s may be at %s, which does not respond", sequence, target.name)
            return
    await results_of([set_state(source, tenant, sequence, state)])


async def is_dead(members: Members, engine: Engine) -> bool:
    """Whether there is proof that an engine that did not respond is dead."""
    if engine.tag not in members.by_tag:
        await members.wait_for_fate([engine.tag])
    return members.is_dead(engine.tag)


NO_GENERATION: Final = "0" * 32
NO_DIGEST: Final = "0" * 64
"""For an import that had all pages from the beginning."""


async def settle(members: Members, name: str, tenant: Tenant) -> None:
    """Decides the owner of a sequence whose ownership an engine has transferred, where the door
    that moves it may have died. Raises an engine's error, and NotReady where one does not reply:
    then the owner stays undecided.

    The old engine no longer answers for the sequence, and deletes it only when asked to. The new
    engine has all of it, as an import that has not been given its name. Any door that finds this
    finishes the import and has the old engine delete the sequence; where no engine has the import
    any more, the old engine takes the sequence back. The door that moves the sequence does the same
    in the same order, so settling does no harm where that door is only slow.
    """
    tenant = members.acting_for(tenant)
    members.check_all_respond()
    engines = members.engines
    for source in await handed_by(engines, name, tenant):
        others = [one for one in engines if one is not source]
        await gather_all([finish_import(one, name, tenant) for one in others])
        states = await gather_all([state_at(one, name, tenant) for one in others])
        is_there = "there" in states and "moving" not in states
        has_left = is_there or await has_arrived(source, others, name, tenant)
        state = "gone" if has_left else "back"
        await question(source, HAND_OVER, tenant, {"id": name, "state": state})


async def has_arrived(source: Engine, others: list[Engine], name: str, tenant: Tenant) -> bool:
    """Whether another engine has had all of a sequence that `source` has handed over: then it was
    deleted there. Raises NotReady."""
    generation, asked = NO_GENERATION, {"id": name, "state": "handed"}
    try:
        await question(source, HAND_OVER, tenant, asked | {"generation": generation})
    except ProblemText as error:  # it names the present one
        generation = error.problem.get("generation", generation)
    asked = {"id": name, "state": "arrived", "generation": generation}
    for reply in await results_of([question(one, HAND_OVER, tenant, asked) for one in others]):
        if isinstance(reply, EngineReply):
            return True
        if not isinstance(reply, ProblemText):
            raise reply
    return False


async def handed_by(engines: list[Engine], name: str, tenant: Tenant) -> list[Engine]:
    """The engines that have handed a sequence over: also one that it has left for another one,
    which has handed it over since."""
    found: list[Engine] = []
    for engine in engines:
        try:
            await question(engine, GET_SEQUENCE, tenant, {"id": name})
        except ProblemText as error:
            if name in error.problem.get("handed", ()):
                found.append(engine)
    return found


async def finish_import(engine: Engine, name: str, tenant: Tenant) -> None:
    """Gives a complete import its name. Raises NotReady."""
    with suppress(ProblemText):
        state = (await question(engine, GET_IMPORT, tenant, {"id": name})).fields
        if state["state"] == "receiving" and state["next_part"] == state["num_parts"]:
            end = {"id": name, "digest": state["digest"] or NO_DIGEST}
            await question(engine, IMPORT, tenant, end)
