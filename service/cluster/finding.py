"""Which engines a call's sequences are on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from service.cluster.answering import each
from service.cluster.engine import Call, Engine
from service.cluster.names import Names
from service.doors.problems import ProblemText
from service.errors import LostSequence, UnknownSequence
from service.operations.rows import GATHER
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.members import Members

ASKED_AT_ONCE: Final = 1024
"""Ids that the engines are asked for in one call: a batch of ids that nobody has costs no more."""
ASK_DEADLINE_S: Final = 10.0


class Homes:
    """Finds engines for a router: by what is remembered, by the ids, or by asking them all."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.names = Names()

    async def of(self, ids: Sequence[str], tenant: Tenant) -> list[Engine]:
        """The engine of each sequence. Raises UnknownSequence, LostSequence, NotReady."""
        space, by_tag, tag = tenant.namespace, self.members.by_tag, self.names.tag
        found = [by_tag.get(tag((space, name)) or "") for name in ids]
        if None in found:
            missing = [name for name, engine in zip(ids, found, strict=True) if engine is None]
            await self.find(missing, tenant)
            found = [by_tag.get(tag((space, name)) or "") for name in ids]
        return [engine for engine in found if engine is not None]

    async def find(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Ask the engines for sequences, and remember where they are. Raises as `of`."""
        for begin in range(0, len(ids), ASKED_AT_ONCE):
            some = ids[begin : begin + ASKED_AT_ONCE]
            there = await self.there(some, tenant, self.members.engines)
            for name, engine in there.items():
                self.names.learn((tenant.namespace, name), engine.tag)
            if missing := [name for name in some if name not in there]:
                self.refuse(missing, tenant)

    def refuse(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Say why sequences are nowhere: with their engine, or never anywhere."""
        tags = {name: self.names.tag((tenant.namespace, name)) for name in ids}
        gone = {name: tag for name, tag in tags.items() if tag and tag not in self.members.by_tag}
        self.members.check_reachable(set(gone.values()))
        raise LostSequence(list(gone)) if gone else UnknownSequence(ids)

    async def there(
        self, ids: Sequence[str], tenant: Tenant, engines: Iterable[Engine]
    ) -> dict[str, Engine]:
        """Which of the engines have which of the sequences."""
        asked = list(engines)
        found: dict[str, Engine] = {}
        for engine, known in zip(
            asked, await each([known_there(engine, ids, tenant) for engine in asked]), strict=True
        ):
            if isinstance(known, BaseException):
                if engine.tag in self.members.by_tag:
                    raise known
                continue  # it was lost meanwhile, and its sequences with it
            found |= dict.fromkeys(known, engine)
        return found

    def made(self, call: Call, ids: Iterable[str], engine: Engine) -> None:
        for name in ids:
            self.names.learn((call.tenant.namespace, name), engine.tag)

    def forget(self, call: Call, ids: Iterable[str]) -> None:
        for name in ids:
            self.names.forget((call.tenant.namespace, name))


async def known_there(engine: Engine, ids: Sequence[str], tenant: Tenant) -> list[str]:
    """Which of the sequences an engine has: a gather of no rows names those it does not know."""
    call = engine.own(GATHER, tenant, ASK_DEADLINE_S)
    fields = {"layer": 0, "sequences": list(ids), "stop": 0}
    try:
        await engine.ask(call, fields)
    except ProblemText as refused:
        problem = json.loads(refused.text)
        if problem["code"] != "unknown_sequence":
            raise
        unknown = set(problem["sequences"])
        return [name for name in ids if name not in unknown]
    return list(ids)
