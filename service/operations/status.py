"""What the service says of itself: `info` and `pool`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Count, Fields, NoFields
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation


class PoolAnswer(Fields):
    free: Count
    """Pages that the caller's namespace can have without an eviction."""
    referenced: Count
    """Pages of the caller's namespace that sequences or leases hold."""
    cached: Count
    """Committed pages that nothing holds: they are found again, or evicted for others."""
    pinned: Count
    """Pages that nothing but hard pins holds."""
    total: Count
    """All of these together."""
    available: Count
    """Pages that the caller could get now: `free` ones, and those that would be evicted for it, its
    own and others', within its quota. In a cluster, of all engines together."""
    leases: Count
    sequences: Count
    imports: Count
    """Sequences that are being imported: they hold pages, and are no sequences yet."""
    nodes: Count
    sharing_ratio: float
    """Tokens seen by sequences over tokens stored; 1 when nothing is shared."""
    integrity: str
    """"ok", or that the service's log says what is broken. Of the whole pool for a key with the
    scope `admin`, else of the namespace's own sequences and cached pages."""


class EngineAnswer(Fields):
    name: str
    """In a cluster; "engine" where there is one."""
    instance_id: str
    free: Count
    """Pages, of all namespaces, like the other states of `pool`."""
    referenced: Count
    cached: Count
    pinned: Count
    sequences: Count
    leases: Count
    imports: Count
    draining: bool
    """It takes no new sequences: it is being emptied."""
    page_s: float
    """Its pace, as it has measured it: seconds for a page of a prompt, all layers, by itself,"""
    pair_s: float
    """for every page before that one on top, which attention reads,"""
    read_s: float
    """and to read a page for the next token."""
    counts: dict[str, list[float]] | None = None
    """Since its start, by the names of `/metrics` without `attnd_`, labels behind a `/`. Of a
    histogram the counts by bucket, and the sum; what is 0 is left out."""


class EnginesFields(Fields):
    counts: bool = False
    """With what each has counted."""


class EnginesAnswer(Fields):
    engines: list[EngineAnswer]


class DrainFields(Fields):
    name: Annotated[str, Field(max_length=256)]
    """The engine, as `GET /v1/engines` calls it."""
    stop: bool = False
    """Have it take new sequences again; those that were moved stay where they are."""


class DrainAnswer(Fields):
    name: str
    draining: bool
    sequences: Count
    """How many it has still."""


INFO: Final = Operation(
    name="info",
    number=14,
    method="GET",
    path="/v1/info",
    summary="Geometry, dtypes, backend, device, limits, version",
    description="Constant while the process lives.",
    tag="service",
    fields=NoFields,
    answer=InfoAnswer,
    scope="read",
    routing="everywhere",
)

POOL: Final = Operation(
    name="pool",
    number=15,
    method="GET",
    path="/v1/pool",
    summary="Pages, sequences and nodes, and whether they are consistent",
    tag="service",
    fields=NoFields,
    answer=PoolAnswer,
    scope="read",
    routing="everywhere",
)

ENGINES: Final = Operation(
    name="engines",
    number=32,
    method="GET",
    path="/v1/engines",
    summary="The engines of the service, and what each of them has",
    tag="service",
    fields=EnginesFields,
    answer=EnginesAnswer,
    scope="admin",
    routing="everywhere",
)

DRAIN_ENGINE: Final = Operation(
    name="drain_engine",
    number=36,
    method="POST",
    path="/v1/engines/{name}/drain",
    summary="Empty an engine of a cluster: its sequences are moved to the others",
    description="Answers at once; `GET /v1/engines` tells how far it is. The engine takes no new "
    "sequences until this is called with `stop`. One engine by itself only does that.",
    tag="service",
    fields=DrainFields,
    answer=DrainAnswer,
    scope="admin",
    routing="engine",
    example={"stop": False},
)
