"""Settles where a sequence is whose door died during a transfer of ownership.

The old engine has handed the sequence over: it no longer answers for it, and deletes it only when
asked to. The new engine has all of it, as an import that has not been given its name. Any door that
finds this finishes the import and has the old engine delete the sequence; where no engine has the
import any more, the old engine takes the sequence back. The door that moves the sequence does the
same in the same order, so settling does no harm where that door is only slow.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from service.cluster.membership.engine import Engine
from service.cluster.membership.members import Members
from service.cluster.routing.locator import ASK_DEADLINE_S, in_time, shard_at
from service.cluster.routing.replies import gather_all, results_of
from service.doors.kit.problems import ProblemText
from service.operations.internal import HAND_OVER
from service.operations.schema.spec import Operation
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import GET_IMPORT, IMPORT
from service.tenants import Tenant

NO_DIGEST: Final = "0" * 64
"""For an import that had all pages from the beginning."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Settles abandoned transfers, for one router."""

    members: Members

    async def settle(self, name: str, tenant: Tenant) -> None:
        """Decides the owner of a sequence that an engine has handed over. Raises an engine's error,
        and NotReady where one does not reply: then the owner stays undecided."""
        tenant = self.members.acting_for(tenant)
        self.members.check_all_respond()
        engines = self.members.engines
        source = await handed_by(engines, name, tenant)
        if source is None:
            return
        others = [one for one in engines if one is not source]
        await gather_all([finish_import(one, name, tenant) for one in others])
        ranks: dict[int, int] = {}
        for shard in await results_of([shard_at(one, name, tenant) for one in others]):
            if isinstance(shard, BaseException):
                raise shard
            if shard == "moving":
                return  # another shard of it: which of the two has arrived is not known here
            if shard is not None:
                ranks[shard["rank"]] = shard["ranks"]
        is_whole = bool(ranks) and len(ranks) == max(ranks.values())
        await ask(source, HAND_OVER, tenant, {"id": name, "state": "gone" if is_whole else "back"})


async def handed_by(engines: list[Engine], name: str, tenant: Tenant) -> Engine | None:
    """The one engine that has handed a sequence over."""
    found: list[Engine] = []
    for engine in engines:
        try:
            await ask(engine, GET_SEQUENCE, tenant, {"id": name})
        except ProblemText as error:
            if name in error.problem.get("handed", ()):
                found.append(engine)
    return found[0] if len(found) == 1 else None


async def finish_import(engine: Engine, name: str, tenant: Tenant) -> None:
    """Gives a complete import its name. Raises NotReady."""
    with suppress(ProblemText):
        state = await ask(engine, GET_IMPORT, tenant, {"id": name})
        if state["state"] == "receiving" and state["next_part"] == state["num_parts"]:
            end = {"id": name, "digest": state["digest"] or NO_DIGEST}
            await ask(engine, IMPORT, tenant, end)


async def ask(
    engine: Engine, operation: Operation, tenant: Tenant, fields: dict[str, Any]
) -> dict[str, Any]:
    call = engine.own(operation, tenant, ASK_DEADLINE_S)
    return (await in_time(engine.ask(call, fields), engine)).fields
