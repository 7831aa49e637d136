"""What an engine has to hand to others: sequences by families, and how far that is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from service.cluster.membership.engine import Engine
from service.cluster.migration.transfer import ask
from service.cluster.routing.locator import known_there
from service.cluster.routing.replies import each
from service.operations.sequences import DELETE_SEQUENCES
from service.tenants import Tenant

ANCHOR_TTL_S: Final = 30.0
"""The copies of a door that dies go by themselves; one that lives uses them again before."""


@dataclass(slots=True)
class Progress:
    """Of one engine: sequences moved, and pins and leases; bytes of theirs; and why others were not
    at the last look."""

    moved: int = 0
    holds: int = 0
    num_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        stayed = [f"{count} stayed: {why}" for why, count in self.stayed.items()]
        moved = f"{self.moved} sequences, {self.holds} pins and leases moved"
        moved += f", {self.num_bytes >> 20} MiB"
        return "; ".join([moved, *stayed])


@dataclass(slots=True)
class Family:
    """Sequences that come from one. `anchors` are forks of theirs that nobody changes, there and at
    the `target`: later ones begin with what they share with them."""

    tenant: Tenant
    ids: list[str]
    target: Engine | None = None
    anchors: list[str] = field(default_factory=list)
    all_anchors: list[str] = field(default_factory=list)
    """Those too that have not come to the target."""
    shard: dict[str, int] | None = None
    """Which part of them is there; None: all."""
    tags: list[str] = field(default_factory=list)
    """The engines that have the parts, by rank, of the one that is moved."""


async def keep_anchors(family: Family, engines: Callable[[], Sequence[Engine]]) -> None:
    """Use the copies again and again, so that they stay as long as this goes on."""
    while True:
        await asyncio.sleep(ANCHOR_TTL_S / 4)
        anchors = list(family.all_anchors)
        await each([use(one, anchors, family.tenant) for one in engines() if anchors])


async def use(engine: Engine, ids: Sequence[str], tenant: Tenant) -> None:
    """Begin the time to live of those that are there anew."""
    if there := await known_there(engine, ids, tenant):
        await known_there(engine, there, tenant)


async def drop_anchors(family: Family, engines: Sequence[Engine]) -> None:
    """Delete the copies that were made on the way."""
    anchors = {"ids": family.all_anchors}
    await each([ask(one, DELETE_SEQUENCES, family.tenant, anchors) for one in engines])


def is_callers_own(view: dict[str, Any]) -> bool:
    """Whether it is a part of a sequence that no door knows of."""
    return "shard" in view and view["shard"]["epoch"] == 0


def families_of(tenant: Tenant, views: Sequence[dict[str, Any]]) -> list[Family]:
    """Sequences by the one that they come from at last, which may be gone, parents first; parts by
    themselves."""
    parents = {view["id"]: view["parent"] for view in views}
    families: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    for view in views:
        root, depth, seen = view["id"], 0, {view["id"]}
        while (parent := parents.get(root)) is not None and parent not in seen:
            root, depth = parent, depth + 1
            seen.add(parent)
        part = view.get("shard") or {"rank": 0, "ranks": 1}
        key = (root, part["rank"], part["ranks"])
        families.setdefault(key, []).append((depth, view["id"]))
    return [
        Family(
            tenant,
            [name for _, name in sorted(ids)],
            shard=None if ranks == 1 else {"rank": rank, "ranks": ranks},
        )
        for (_, rank, ranks), ids in families.items()
    ]
