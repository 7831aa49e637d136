"""What engines tell when a door asks them, again and again: their pages, and what became of those
that are cached."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from service.cluster.membership.engine import Engine, Told
from service.cluster.placement.cost import Load, Pace
from service.doors.kit.problems import ProblemText
from service.errors import AttndError
from service.metrics import STATES
from service.operations.table import BY_NAME
from service.road.caller_end.peer_process import PeerProcess
from service.road.tcp import is_remote
from service.tenants import OPEN, Tenant, tenant_of

if TYPE_CHECKING:
    from service.cluster.membership.members import Members

LOG: Final = logging.getLogger("attnd.cluster")
ASK_DEADLINE_S: Final = 10.0
SILENT_S: Final = 3.0
"""An engine that has not answered for so long is given no calls until it answers. It may go on at
any moment with all that it has: silence is no death."""
MEET_S: Final = 60.0
"""For so long a door that starts says that it is not ready, for an engine of its host that it has
not met."""
FEW_EVENTS: Final = 16
"""A page with fewer has hardly left any behind; those come next time."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine by its name, whether a session with it lasts or not.

    Without a session it may still have all its sequences, and come back with them. It `is_dead`
    once that is known to be over: its process has exited, another engine has its address, or it
    was taken out of the cluster. A limit of time, `counts_until`, ends the waiting for an engine of
    another host, and nothing else.
    """

    name: str
    address: str
    lost_after_s: float = 0.0
    is_leaving: bool = False
    engine: Engine | None = None
    why: str = "it has not answered yet"
    tag: str = ""
    """Of its last session; empty where there has been none."""
    is_dead: bool = False
    """The engine of that tag."""
    counts_until: float = math.inf
    """On `time.monotonic()`: until then its sequences count as there while no session lasts."""
    is_met: bool = False
    """At least once."""
    met_until: float = math.inf
    """Until then a door that starts waits for it before it says that it is ready."""
    peer: PeerProcess | None = None
    """The process of the last session, while nobody knows yet whether it has exited."""
    torn: dict[Tenant, list[str]] = field(default_factory=dict)
    """Sequences over several engines that it had a part of when its last session ended."""
    keeping: asyncio.Task[None] | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """By namespace: the number of the last event that was read."""

    def wait_for(self, now: float) -> None:
        """From now on there is no session with it. An engine of this host is waited for until it is
        met, or is known to be dead; one of another host for as long as the settings say."""
        is_elsewhere = is_remote(self.address)
        self.met_until = now + (self.lost_after_s if is_elsewhere else MEET_S)
        self.counts_until = now + self.lost_after_s if is_elsewhere else math.inf

    def is_reached(self) -> None:
        """Somebody listens there: an engine that does not answer is stopped or busy, not away."""
        self.counts_until = math.inf

    def is_out_of_reach(self, now: float) -> None:
        """The connection could not be made, or has broken."""
        if math.isinf(self.counts_until) and is_remote(self.address):
            self.counts_until = now + self.lost_after_s

    def is_awaited(self, now: float) -> bool:
        """Whether it was never met, and its answer may come."""
        return not (self.is_met or self.is_dead) and now < self.met_until

    def may_be(self, tag: str) -> bool:
        """Whether the engine of a tag may be this one, which has no session."""
        return self.engine is None and not self.is_dead and self.tag in ("", tag)

    def stop_watching(self) -> None:
        """Nobody needs to know any more when the process exits."""
        if self.peer is not None:
            asyncio.get_running_loop().remove_reader(self.peer.fd)
            self.peer.close()
            self.peer = None


async def ask(engine: Engine, name: str, tenant: Tenant, **fields: Any) -> Told:
    """A question of the router's own, which is asked of silent engines, too."""
    call = engine.own(BY_NAME[name], tenant, ASK_DEADLINE_S)
    call.is_poll = True
    return await engine.ask(call, fields)


async def look_at(members: Members, member: Member, engine: Engine) -> None:
    """Poll an engine, and wait for as long as it takes; it is silent meanwhile. What it refuses is
    an answer too."""
    polling = asyncio.ensure_future(poll(members, member, engine))
    try:
        await asyncio.wait((polling,), timeout=SILENT_S)
        if not polling.done() and member.engine is engine:
            text = "%s has not answered for %g s: its calls are refused"
            LOG.warning(text, member.name, SILENT_S)
            engine.is_silent = True
            members.changes += 1
        await polling
    except (ProblemText, AttndError) as refused:
        LOG.debug("%s was not polled: %s", member.name, refused)
    finally:
        polling.cancel()
    if engine.is_silent:
        LOG.info("%s answers again", member.name)
        engine.is_silent = False
        members.changes += 1


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
