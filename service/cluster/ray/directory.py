"""The addresses of a Ray cluster's engines, reported by the engines and read by the ingresses.

All of it is reported again within a second, so the directory may be lost with its node and
restarted on another: no process may end because a call to it fails (`RayError`). An ingress removes
an engine only when that has left, or there is proof that it has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import ray

from service.cluster.membership.members_file import MemberEntry

NAME: Final = "attnd-directory"
NAMESPACE: Final = "attnd"
REPORT_S: Final = 0.5
"""How often engines report, and ingresses read."""
SILENT_S: Final = 5.0
"""The directory removes an engine without a report for so long; an ingress that has not read of an
engine for so long again checks whether it has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """One engine: its Ray node, and its address on that node and elsewhere."""

    name: str
    node: str
    path: str
    address: str
    is_leaving: bool = False

    def entry(self, node: str, lost_after_s: float) -> MemberEntry:
        """Its entry in the members file of a node."""
        if self.node == node:
            return MemberEntry(self.name, self.path, is_leaving=self.is_leaving)
        return MemberEntry(self.name, self.address, lost_after_s, self.is_leaving)


class Directory:
    """The actor."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[Place, float]] = {}
        self.is_over = False

    def end(self) -> None:
        """The whole cluster stops: engines need not be drained."""
        self.is_over = True

    def has_ended(self) -> bool:
        return self.is_over

    def report(self, place: Place) -> None:
        self.places[place.name] = place, time.monotonic()

    def leave(self, name: str) -> None:
        """The engine is drained and stops."""
        self.places.pop(name, None)

    def read(self) -> list[Place]:
        now = time.monotonic()
        return [place for place, at in self.places.values() if now - at < SILENT_S]


def directory() -> Any:
    """The actor's handle; starts the actor where there is none."""
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
