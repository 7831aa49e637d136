"""One engine of the roster, with or without a session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from service.cluster.membership.engine import EngineSession
from service.doors.kit.problems import ProblemText
from service.road.caller_end.greeting import PeerProcess

FIRST_SESSION_S: Final = 60.0
"""For how long a new router waits for an engine before it reports ready without it."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine by its name.

    Without a session it may still have all its sequences, and come back with them. It `is_dead`
    once that is known: its process has exited, another engine has its address, or it left the
    roster, as the engines do that Ray declares dead.
    """

    name: str
    address: str
    met_until: float
    """On `time.monotonic()`: until then a new router waits for its first session."""
    is_leaving: bool = False
    engine: EngineSession | None = None
    why: str = "no response yet"
    """Why there is no session."""
    tag: str = ""
    """Of its latest session; empty before the first."""
    is_dead: bool = False
    """The engine of `tag`."""
    is_known: bool = False
    """The router knows the ids of all sequences of the engine of `tag`."""
    peer: PeerProcess | None = None
    """The process of the latest session, while it is unknown whether it has exited."""
    session: asyncio.Task[None] | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """The number of the latest event read, by namespace."""
    no_events: ProblemText | None = None
    """The refusal of an engine that keeps no events."""

    def is_awaited(self, now: float) -> bool:
        """Whether a new router waits for it."""
        return not (self.is_known or self.is_dead) and now < self.met_until

    def stop_watching(self) -> None:
        """Stops waiting for the process to exit."""
        if self.peer is not None:
            asyncio.get_running_loop().remove_reader(self.peer.fd)
            self.peer.close()
            self.peer = None
