"""The router as the only replica of its deployment in Ray Serve: starts the router's process on its
node, and writes the roster that it follows.

The process listens by itself: calls pass neither through Serve's proxy nor through Ray. Engines
report their addresses here; Ray says which of them are dead.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import ray

from config.settings import Settings
from service.addresses import bind_addresses
from service.cluster.membership.processes import Processes, router_children
from service.cluster.membership.roster import RosterEntry, write_roster
from service.logs import set_up_logs

REPORT_S: Final = 0.5
"""How often engines report."""
SETTLE_S: Final = 3 * REPORT_S
"""By then all running engines have reported to a restarted router."""
MAX_SETTLE_S: Final = 60.0
"""Maximum time that a new router waits for `cluster.engines` of them."""
QUIET_S: Final = 2.0
"""After so long without a report Ray is asked whether the engine's actor is dead."""
ENDING_S: Final = 5.0
"""Time for the router to end, beyond server.drain_timeout_s."""


@dataclass(frozen=True, slots=True)
class Place:
    """One engine: its actor, its Ray node, and its address on that node and elsewhere."""

    name: str
    actor: tuple[str, str]
    """Name and namespace."""
    node: str
    path: str
    address: str
    is_leaving: bool = False

    def entry(self, node: str) -> RosterEntry:
        """Its entry in the roster of a node."""
        address = self.path if self.node == node else self.address
        return RosterEntry(self.name, address, self.is_leaving)

    def is_dead(self) -> bool:
        """Whether Ray says so: a dead actor, or one of a dead node, has no name any more. The
        engine's process ends with its actor."""
        name, namespace = self.actor
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return True
        return False


class RouterReplica:
    """The router of a cluster."""

    def __init__(self, settings: Settings, secret: str, engines: Any = None) -> None:
        """`engines` is Serve's handle: passing it makes Serve start the engines."""
        set_up_logs(settings.log, "replica")
        self.settings = settings
        self.addresses = bind_addresses(
            settings.server, is_private=settings.auth.is_private, num_engines=0
        )
        self.node = ray.get_runtime_context().get_node_id()
        self.known: dict[str, tuple[Place, float]] = {}
        """With the time of the latest report."""
        self.written: list[RosterEntry] | None = None
        self.began_s = time.monotonic()
        self.is_over = False
        write_roster(self.addresses.roster, [])
        children, where = router_children(settings, self.addresses), self.addresses
        self.processes = Processes(settings, children, str(where.roster), where.url, secret)
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    def url(self) -> str:
        return self.addresses.url

    def end(self) -> None:
        """The whole cluster stops: engines need not be drained."""
        self.is_over = True

    def report(self, place: Place) -> bool:
        """Called by engines; returns whether the whole cluster stops."""
        self.known[place.name] = place, time.monotonic()
        return self.is_over

    def leave(self, name: str) -> None:
        """An engine is drained and stops."""
        self.known.pop(name, None)

    async def watch(self) -> None:
        """Writes the roster whenever the engines change."""
        while True:
            quiet_s = time.monotonic() - QUIET_S
            for name, (place, at) in list(self.known.items()):
                is_gone = at < quiet_s and await asyncio.to_thread(place.is_dead)
                if is_gone and self.known.get(name) == (place, at):
                    del self.known[name]
            self.write(time.monotonic() - self.began_s)
            await asyncio.sleep(REPORT_S)

    def write(self, age_s: float) -> None:
        """Not before all running engines have reported: the router could not know their ids."""
        are_all = len(self.known) >= self.settings.cluster.engines and age_s > SETTLE_S
        entries = [place.entry(self.node) for place, _ in self.known.values()]
        if self.written is None and not (are_all or age_s > MAX_SETTLE_S):
            return
        if entries != self.written:
            write_roster(self.addresses.roster, entries)
            self.written = entries

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError where Serve should restart the replica."""
        if self.watching.done():
            raise RuntimeError("the roster is not updated any more")
        self.processes.check()

    async def __del__(self) -> None:
        """Called by Serve at the end: lets the router finish accepted requests."""
        self.watching.cancel()
        await asyncio.to_thread(self.processes.end, self.settings.server.drain_timeout_s + ENDING_S)
        self.addresses.roster.unlink(missing_ok=True)
        self.addresses.close()
