"""One engine as the members file names it, with or without a session."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from service.cluster.membership.engine import Engine
from service.doors.kit.problems import ProblemText
from service.road.caller_end.greeting import PeerProcess
from service.road.tcp import is_remote

FIRST_SESSION_S: Final = 60.0
"""For how long a new door waits for an engine of its host before it reports ready without it."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine by its name.

    Without a session it may still have all its sequences, and come back with them. It `is_dead`
    once there is proof: its process has exited, another engine has its address, or it was removed
    from the cluster. `counts_until` only bounds the wait for an engine of another host.
    """

    name: str
    address: str
    lost_after_s: float = 0.0
    is_leaving: bool = False
    engine: Engine | None = None
    why: str = "no response yet"
    """Why there is no session."""
    tag: str = ""
    """Of its latest session; empty before the first."""
    is_dead: bool = False
    """The engine of `tag`."""
    counts_until: float = math.inf
    """On `time.monotonic()`: until then its sequences are not lost, while no session lasts."""
    is_met: bool = False
    """It has had a session."""
    met_until: float = math.inf
    """Until then a new door waits for its first session before it reports ready."""
    peer: PeerProcess | None = None
    """The process of the latest session, while it is unknown whether it has exited."""
    session: asyncio.Task[None] | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """The number of the latest event read, by namespace."""
    no_events: ProblemText | None = None
    """The refusal of an engine that keeps no events."""

    def disconnected(self, now: float) -> None:
        """There is no session from now on. An engine of this host is awaited until it is met or
        known to be dead; one of another host for `lost_after_s`."""
        elsewhere = is_remote(self.address)
        self.met_until = now + (self.lost_after_s if elsewhere else FIRST_SESSION_S)
        self.counts_until = now + self.lost_after_s if elsewhere else math.inf

    def reached(self) -> None:
        """Its address accepts connections: the engine is stopped or busy, not away."""
        self.counts_until = math.inf

    def unreachable(self, now: float) -> None:
        """The connection has failed or broken."""
        if math.isinf(self.counts_until) and is_remote(self.address):
            self.counts_until = now + self.lost_after_s

    def is_lost(self, now: float) -> bool:
        """Whether it has no session, and is dead or has been unreachable for too long."""
        return self.engine is None and (self.is_dead or now >= self.counts_until)

    def is_awaited(self, now: float) -> bool:
        """Whether its first session may still come."""
        return not (self.is_met or self.is_dead) and now < self.met_until

    def stop_watching(self) -> None:
        """Stops waiting for the process to exit."""
        if self.peer is not None:
            asyncio.get_running_loop().remove_reader(self.peer.fd)
            self.peer.close()
            self.peer = None
