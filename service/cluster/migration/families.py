"""Families of sequences that are moved together, and the progress of a drain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from service.cluster.membership.engine import Engine
from service.cluster.membership.members import Members
from service.cluster.migration.transfer import ask
from service.cluster.routing.locator import known_at
from service.cluster.routing.replies import results_of
from service.operations.sequences import DELETE_SEQUENCES
from service.tenants import Tenant

ANCHOR_TTL_S: Final = 30.0
"""Copies left behind by a door that died are deleted after this; a living door keeps using them."""


@dataclass(slots=True)
class Progress:
    """The progress of draining one engine: counts of what was moved, and at the last attempt the
    reasons of what stayed."""

    moved: int = 0
    """Sequences."""
    holds: int = 0
    """Pins and leases."""
    num_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)
    """Number of sequences, pins, leases and imports, by the reason."""

    def __str__(self) -> str:
        moved = f"moved {self.moved} sequences, {self.holds} pins and leases, "
        moved += f"{self.num_bytes >> 20} MiB"
        return "; ".join([moved, *(f"{count} stay: {why}" for why, count in self.stayed.items())])


@dataclass(slots=True)
class Family:
    """Sequences with a common ancestor. `anchors` are forks of them that never change, at the
    source and at the `target`: what shares pages with an anchor is not copied again."""

    tenant: Tenant
    ids: list[str]
    """Parents first."""
    target: Engine | None = None
    anchors: list[str] = field(default_factory=list)
    all_anchors: list[str] = field(default_factory=list)
    """Includes anchors that have not reached the target."""
    shard: dict[str, int] | None = None
    """Which shard of them the source has; None: all."""
    tags: list[str] = field(default_factory=list)
    """The engines of all shards of the sequence that is being moved, by rank."""

    async def keep_anchors(self, members: Members) -> None:
        """Uses the anchors regularly, so that they do not expire."""
        while True:
            await asyncio.sleep(ANCHOR_TTL_S / 4)
            anchors = list(self.all_anchors)
            await results_of([use(one, anchors, self.tenant) for one in members.engines if anchors])

    async def delete_anchors(self, members: Members) -> None:
        ids = {"ids": self.all_anchors}
        deleting = [ask(one, DELETE_SEQUENCES, self.tenant, ids) for one in members.engines]
        await results_of(deleting)


async def use(engine: Engine, ids: Sequence[str], tenant: Tenant) -> None:
    """Restarts the time to live of those sequences that the engine has."""
    if there := await known_at(engine, ids, tenant):
        await known_at(engine, there, tenant)


def is_foreign_shard(view: dict[str, Any]) -> bool:
    """Whether a view is of a shard that a caller made by itself, and no router knows."""
    return "shard" in view and view["shard"]["epoch"] == 0


def families_of(tenant: Tenant, views: Sequence[dict[str, Any]]) -> list[Family]:
    """Sequences grouped by their oldest known ancestor, parents first; shards apart by rank."""
    parents = {view["id"]: view["parent"] for view in views}
    families: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    for view in views:
        root, depth, seen = view["id"], 0, {view["id"]}
        while (parent := parents.get(root)) is not None and parent not in seen:
            root, depth = parent, depth + 1
            seen.add(parent)
        shard = view.get("shard") or {"rank": 0, "ranks": 1}
        key = (root, shard["rank"], shard["ranks"])
        families.setdefault(key, []).append((depth, view["id"]))
    return [
        Family(
            tenant,
            [name for _, name in sorted(ids)],
            shard=None if ranks == 1 else {"rank": rank, "ranks": ranks},
        )
        for (_, rank, ranks), ids in families.items()
    ]
