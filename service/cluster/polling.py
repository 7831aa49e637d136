"""What engines tell when a door asks them, again and again: their pages, and what became of those
that are cached."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from service.cluster.engine import Engine, Told
from service.cluster.placement import Load, Pace
from service.metrics import STATES
from service.operations.table import BY_NAME
from service.tenants import OPEN, Tenant, tenant_of

if TYPE_CHECKING:
    from service.cluster.members import Members

ASK_DEADLINE_S: Final = 10.0
"""An engine that has not answered by then is given up: a process that hangs counts as dead."""
FEW_EVENTS: Final = 16
"""A page with fewer has hardly left any behind; those come next time."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine by its name, whether a session with it lasts or not."""

    name: str
    address: str
    lost_after_s: float = 0.0
    is_leaving: bool = False
    engine: Engine | None = None
    why: str = "it has not answered yet"
    tag: str = ""
    """Of its last session."""
    keeping: asyncio.Task[None] | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """By namespace: the number of the last event that was read."""


async def ask(engine: Engine, name: str, tenant: Tenant, **fields: Any) -> Told:
    """A question of the router's own."""
    async with asyncio.timeout(ASK_DEADLINE_S):
        call = engine.own(BY_NAME[name], tenant, ASK_DEADLINE_S)
        return await engine.ask(call, fields)


async def poll(members: Members, member: Member, engine: Engine) -> None:
    """Ask an engine for its pages, and what became of cached ones."""
    promised = engine.promised
    asked = {"counts": True} if engine.is_elsewhere else {}
    (told,) = (await ask(engine, "engines", members.tenant, **asked)).fields["engines"]
    engine.promised -= min(promised, engine.promised)
    held = told["referenced"] + told["pinned"]
    engine.pace = Pace(told["page_s"], told["pair_s"], told["read_s"])
    pace = engine.pace.near([one.pace for one in {engine, *members.by_tag.values()}])
    engine.load = Load(told["free"], told["cached"], held, pace=pace)
    engine.is_draining = told["draining"]
    if members.metrics is not None:
        pages = {state: told[state] for state in STATES}
        calls, engine.num_calls = engine.num_calls, 0
        members.metrics.engine(member.name, pages, told["sequences"], engine.queue_s, calls)
        if engine.is_elsewhere and told["counts"] is not None:
            members.metrics.told(engine.tag, told["counts"])
    for namespace in list(members.prefixes):
        await read_events(members, member, engine, namespace)


async def read_events(members: Members, member: Member, engine: Engine, namespace: str) -> None:
    """The events of a namespace since the last time."""
    known = members.prefixes[namespace]
    tenant = tenant_of(namespace, ("read",)) if members.has_keys else OPEN
    while True:
        after = member.positions.get(namespace, 0)
        page = (await ask(engine, "events", tenant, after=after)).fields
        if page["too_old"] and after:
            known.forget(engine.tag, namespace)
        for event in page["events"]:
            known.take(engine.tag, event)
        member.positions[namespace] = page["next"]
        if len(page["events"]) < FEW_EVENTS:
            return
