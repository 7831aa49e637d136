"""A sequence whose door died while it changed its engine: any other door decides where it is.

The old engine has handed it over, so it answers for it no more, and deletes it only when it is told
to. The other engine has all of it as an import that lacks its name. Whoever finds that ends the
import and has the old engine delete the sequence; where no engine has the import any more, the old
one takes the sequence back. The door that moves it does the same in the same order, so it does no
harm where that door is only slow.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership.engine import Call, Engine
from service.cluster.routing.locator import ASK_DEADLINE_S, in_time, part_at
from service.cluster.routing.replies import MOVING_PAUSE_S, each
from service.doors.kit.problems import ProblemText
from service.errors import AttndError
from service.operations.internal import HAND_OVER
from service.operations.schema.spec import Operation
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import GET_IMPORT, IMPORT
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

SETTLE_AFTER_S: Final = 0.5
NO_DIGEST: Final = "0" * 64
"""Where an engine asks for none: it had all pages already."""


async def wait_for_move(router: Router, call: Call, refused: ProblemText) -> None:
    """Wait a moment for sequences that change their engine; where nobody has said for long what
    becomes of them, decide it."""
    handed = refused.problem.get("handed", ())
    if handed and call.has_waited_s > SETTLE_AFTER_S:
        for name in handed:
            with suppress(ProblemText, AttndError):
                await settle(router, name, call.tenant)
    await asyncio.sleep(MOVING_PAUSE_S)


async def settle(router: Router, name: str, tenant: Tenant) -> None:
    """Decide where a sequence is, if one engine has handed it over and nobody goes on. Raises what
    engines refuse, NotReady where one does not answer: then it stays undecided."""
    members, tenant = router.members, router.members.acting_for(tenant)
    members.check_all_answer()
    engines = members.engines
    source = await handed_by(engines, name, tenant)
    if source is None:
        return
    others = [one for one in engines if one is not source]
    for told in await each([end_import(one, name, tenant) for one in others]):
        if isinstance(told, BaseException):
            raise told
    parts = await each([part_at(one, name, tenant) for one in others])
    ranks: dict[int, int] = {}
    for part in parts:
        if isinstance(part, BaseException):
            raise part
        if part == "moving":
            return  # another part of it: which of the two has arrived is not known here
        if part is not None:
            ranks[part["rank"]] = part["ranks"]
    is_whole = bool(ranks) and len(ranks) == max(ranks.values())
    await ask(source, HAND_OVER, tenant, {"id": name, "state": "gone" if is_whole else "back"})


async def handed_by(engines: list[Engine], name: str, tenant: Tenant) -> Engine | None:
    """The one engine that has handed a sequence over."""
    found: list[Engine] = []
    for engine in engines:
        try:
            await ask(engine, GET_SEQUENCE, tenant, {"id": name})
        except ProblemText as refused:
            if name in refused.problem.get("handed", ()):
                found.append(engine)
    return found[0] if len(found) == 1 else None


async def end_import(engine: Engine, name: str, tenant: Tenant) -> None:
    """Give a complete import its name. Raises NotReady."""
    with suppress(ProblemText):
        state = await ask(engine, GET_IMPORT, tenant, {"id": name})
        if state["state"] == "receiving" and state["next_part"] == state["num_parts"]:
            ended = {"id": name, "digest": state["digest"] or NO_DIGEST}
            await ask(engine, IMPORT, tenant, ended)


async def ask(
    engine: Engine, operation: Operation, tenant: Tenant, fields: dict[str, Any]
) -> dict[str, Any]:
    call = engine.own(operation, tenant, ASK_DEADLINE_S)
    return (await in_time(engine.ask(call, fields), engine)).fields
