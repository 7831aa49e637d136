"""What the service says of itself: `info` and `pool`."""

from __future__ import annotations

from typing import Final

from service.operations.common import Count, Fields, NoFields
from service.operations.info import InfoAnswer
from service.operations.spec import Operation


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
    leases: Count
    sequences: Count
    imports: Count
    """Sequences that are being imported: they hold pages, and are no sequences yet."""
    nodes: Count
    sharing_ratio: float
    """Tokens seen by sequences over tokens stored; 1 when nothing is shared."""
    integrity: str
    """"ok", or what is broken."""


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


class EnginesAnswer(Fields):
    engines: list[EngineAnswer]


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
    fields=NoFields,
    answer=EnginesAnswer,
    scope="admin",
    routing="everywhere",
)
