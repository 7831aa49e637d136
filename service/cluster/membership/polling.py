"""Regular questions of the router to each engine: its pages, and what became of cached ones."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from service.cluster.membership.engine import SILENT_S, EngineSession
from service.cluster.membership.member import Member
from service.cluster.membership.members import Members
from service.cluster.placement.cost import EngineLoad, Pace
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply
from service.errors import AttndError, NotReady
from service.families import STATES
from service.operations.table import BY_NAME
from service.tenants import OPEN, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
MAX_EVENT_PAGES: Final = 64
"""Pages of events that one poll reads; the rest comes with the next poll."""


async def ask(engine: EngineSession, name: str, tenant: Tenant, **fields: Any) -> EngineReply:
    """The reply to a question of the router's own, which silent engines get as well."""
    try:
        return await engine.question(BY_NAME[name], tenant, fields, is_poll=True)
    finally:
        engine.heard_s = time.monotonic()


async def poll_to_the_end(members: Members, member: Member, engine: EngineSession) -> None:
    """Polls an engine, however long that takes; it is silent after `SILENT_S` without a reply to
    any question. An error reply is a sign of life."""
    polling = asyncio.ensure_future(poll(members, member, engine))
    engine.heard_s = time.monotonic()
    try:
        while not polling.done() and (age_s := time.monotonic() - engine.heard_s) < SILENT_S:
            await asyncio.wait((polling,), timeout=SILENT_S - age_s)
        if not polling.done() and member.engine is engine:
            text = "%s has not replied for %g s: its calls are refused until it does"
            LOG.warning(text, member.name, SILENT_S)
            engine.is_silent = True
            members.changes += 1
        await polling
    except (ProblemText, AttndError) as error:
        LOG.debug("%s was not polled: %s", member.name, error)
    finally:
        polling.cancel()
    if engine.is_silent:
        LOG.info("%s replies again", member.name)
        engine.is_silent = False
        members.changes += 1


async def poll(members: Members, member: Member, engine: EngineSession) -> None:
    """Updates the load and the cached prefixes of an engine."""
    promised = engine.promised
    fields = {"counts": True} if engine.has_own_counts else {}
    (view,) = (await ask(engine, "engines", members.tenant, **fields)).fields["engines"]
    engine.promised -= min(promised, engine.promised)
    held = view["referenced"] + view["pinned"]
    engine.pace = Pace(view["page_s"], view["pair_s"], view["read_s"])
    pace = engine.pace.near([one.pace for one in {engine, *members.by_tag.values()}])
    engine.load = EngineLoad(view["free"], view["cached"], held, pace=pace)
    engine.is_draining = view["draining"]
    if members.ids.has_too_many(engine.tag, view["sequences"]):
        await members.ids.read(engine)
    if members.metrics is not None:
        pages = {state: view[state] for state in STATES}
        calls, engine.num_calls = engine.num_calls, 0
        members.metrics.engine(member.name, pages, view["sequences"], engine.queue_s, calls)
        if engine.has_own_counts and view["counts"] is not None:
            members.metrics.remote.take(engine.tag, view["counts"])
    for namespace in list(members.prefixes):
        try:
            await read_events(members, member, engine, namespace)
        except ProblemText as error:  # an engine with `cache.events_history` = 0 keeps none
            LOG.debug("the events of %s are not known: %s", member.name, error)


async def read_events(
    members: Members, member: Member, engine: EngineSession, namespace: str
) -> None:
    """Reads a namespace's events since the last time."""
    known = members.prefixes[namespace]
    tenant = reader_of(members, namespace)
    for _ in range(MAX_EVENT_PAGES):
        after = member.positions.get(namespace, 0)
        try:
            page = (await ask(engine, "events", tenant, after=after)).fields
        except ProblemText as error:
            member.no_events = error if error.problem["code"] == "invalid_request" else None
            raise
        member.no_events = None
        if engine.link.state[0] == "lost":  # its pages were forgotten while the reply waited
            raise NotReady(engine.link.state[1])
        if member.positions.get(namespace, 0) != after:
            continue  # another reader was faster
        if page["too_old"] and after:
            known.forget(engine.tag, namespace)
        for event in page["events"]:
            known.add(engine.tag, event)
        member.positions[namespace] = page["next"]
        if not page["events"]:
            return


async def follow(members: Members, namespace: str) -> None:
    """Reads a namespace's events, now and with every poll."""
    members.prefixes_of(namespace)
    for member in list(members.by_name.values()):
        if member.engine is not None:
            await read_events(members, member, member.engine, namespace)


async def restate(members: Members, namespace: str) -> None:
    """Logs all pages of the engines' pools again, as the engines report them."""
    known, tenant = members.prefixes[namespace], reader_of(members, namespace)
    base = known.log.newest
    for engine in members.engines:
        page: dict[str, Any] = {"next": 0, "events": True}
        while page["events"]:
            page = (await ask(engine, "events", tenant, after=page["next"])).fields
            for event in page["events"]:
                known.add_again(event)
    known.log.base = base


def reader_of(members: Members, namespace: str) -> Tenant:
    return tenant_of(namespace, ("read",)) if members.has_keys else OPEN
