"""Where the engines of a Ray cluster are: told by them again and again, read by the ingresses.

It keeps nothing that its engines do not tell it within a second, so it may be lost with its node
and started anew on another at any time: nobody may end because a call to it fails (`RayError`).
An ingress forgets an engine only when that has left, or is known to have ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import ray

from service.cluster.membership.members_file import Listed

NAME: Final = "attnd-directory"
NAMESPACE: Final = "attnd"
REPORT_S: Final = 0.5
"""How often engines report, and ingresses ask."""
SILENT_S: Final = 5.0
"""The directory forgets an engine that has not reported for so long; an ingress that has not heard
of one for so long again looks whether it has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """One engine: its Ray node, and how it is called from there and from elsewhere."""

    name: str
    node: str
    path: str
    address: str
    is_leaving: bool = False

    def listed(self, node: str, lost_after_s: float) -> Listed:
        """How it is called from a node."""
        if self.node == node:
            return Listed(self.name, self.path, is_leaving=self.is_leaving)
        return Listed(self.name, self.address, lost_after_s, self.is_leaving)


class Directory:
    """The actor."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[Place, float]] = {}
        self.is_over = False

    def end(self) -> None:
        """The whole cluster is stopped: engines that go need not be emptied."""
        self.is_over = True

    def has_ended(self) -> bool:
        return self.is_over

    def report(self, place: Place) -> None:
        self.places[place.name] = place, time.monotonic()

    def leave(self, name: str) -> None:
        """It has gone on purpose, and nothing is left there."""
        self.places.pop(name, None)

    def read(self) -> list[Place]:
        """The engines that have reported lately."""
        now = time.monotonic()
        return [place for place, at in self.places.values() if now - at < SILENT_S]


def directory() -> Any:
    """The actor's handle; it is made when there is none."""
    return (
        ray.remote(Directory)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        .remote()
    )
