"""Operations on the service's state: info, pool, snapshot, engines, drains, and quotas."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Count, Fields, NoFields
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation, TensorSpec


class PoolAnswer(Fields):
    free: Count
    """Pages that the caller's namespace can allocate without evictions."""
    referenced: Count
    """Pages of the caller's namespace held by sequences or leases."""
    cached: Count
    """Committed pages that nothing holds; they can be matched, and evicted."""
    pinned: Count
    """Pages held by hard pins only."""
    total: Count
    """Sum of the above."""
    available: Count
    """Pages that the caller can allocate within its quota, evictions included. In a cluster, of all
    engines together."""
    leases: Count
    sequences: Count
    imports: Count
    """Unfinished imports, which hold pages and are not sequences yet."""
    nodes: Count
    sharing_ratio: float
    """Tokens seen by sequences / tokens stored; 1: nothing shared."""
    integrity: str
    """"ok", or a reference to the service's log, which has the error. Covers the whole pool for
    keys with the scope `admin`, else the namespace's sequences and cached pages."""


class EngineAnswer(Fields):
    name: str
    """Name in the cluster; "engine" without one."""
    instance_id: str
    free: Count
    """Free pages; this and the other states count all namespaces."""
    referenced: Count
    cached: Count
    pinned: Count
    sequences: Count
    leases: Count
    imports: Count
    draining: bool
    """Whether it is draining: it accepts no new sequences."""
    page_s: float
    """Measured seconds to prefill one page at all layers, without earlier pages."""
    pair_s: float
    """Measured seconds that each earlier page adds to that."""
    read_s: float
    """Measured seconds to read one page for the next token."""
    counts: dict[str, list[float]] | None = None
    """Counters since the start, by the names of `/metrics` without `attnd_`, labels after a `/`. A
    histogram has its counts by bucket, then the sum; zeros are omitted."""


class EnginesFields(Fields):
    counts: bool = False
    """Whether the reply has each engine's counters."""


class EnginesAnswer(Fields):
    engines: list[EngineAnswer]


ENGINE_NAME: Final = "engine"
"""Name of an engine in its own replies; a cluster has names of its own."""
UNKNOWN_ENGINE: Final = "unknown engine: GET /v1/engines lists the names"


class DrainFields(Fields):
    name: Annotated[str, Field(max_length=256)]
    """Engine's name, as in `GET /v1/engines`."""
    stop: bool = False
    """Whether to stop draining: the engine accepts new sequences again; moved ones stay where they
    are."""


class DrainAnswer(Fields):
    name: str
    draining: bool
    sequences: Count
    """Sequences still on the engine."""


NAMESPACE_PATTERN: Final = r"^[A-Za-z0-9._-]{1,64}$"
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
NamespaceName = Annotated[str, Field(pattern=NAMESPACE_PATTERN)]


class NamespaceFields(Fields):
    """The namespace named by the path."""

    name: NamespaceName
    """Namespace; it need not exist."""


class QuotaFields(Fields):
    name: NamespaceName
    """Namespace; it need not exist."""
    max_pages: Count | None = None
    """Maximum pages of the namespace, cached ones included; null: no limit."""
    reserved_pages: Count = 0
    """Pages reserved for the namespace."""
    max_host_bytes: Bytes | None = None
    """Maximum bytes of the namespace's pages in host memory; null: no limit."""
    max_disk_bytes: Bytes | None = None
    """Maximum bytes of the namespace's pages on disk; null: no limit."""


class NamespacesAnswer(Fields):
    namespaces: list[str]


class NamespaceAnswer(Fields):
    name: NamespaceName
    max_pages: Count | None
    reserved_pages: Count
    used: Count
    """Referenced, cached and pinned pages together."""
    referenced: Count
    cached: Count
    pinned: Count
    leases: Count
    sequences: Count
    max_host_bytes: Bytes | None = None
    max_disk_bytes: Bytes | None = None


operation = partial(Operation, tag="service")
of_namespaces = partial(Operation, tag="prefix cache", scope="admin", routing="everywhere")

INFO: Final = operation(
    name="info",
    summary="Geometry, dtypes, backend, device, limits, version",
    description="Constant until the process ends.",
    fields=NoFields,
    answer=InfoAnswer,
    scope="read",
    routing="everywhere",
)

POOL: Final = operation(
    name="pool",
    summary="Counts of pages, sequences and nodes, and the result of the integrity check",
    fields=NoFields,
    answer=PoolAnswer,
    scope="read",
    routing="everywhere",
)

ENGINES: Final = operation(
    name="engines",
    summary="List the engines of the service, with their pages and sequences",
    fields=EnginesFields,
    answer=EnginesAnswer,
    scope="admin",
    routing="everywhere",
)

DRAIN_ENGINE: Final = operation(
    name="drain_engine",
    summary="Drain an engine of a cluster: move its sequences to the others",
    description="Returns at once; `GET /v1/engines` shows the progress. The engine accepts no new "
    "sequences until a call with `stop`. Without a cluster, nothing is moved.",
    fields=DrainFields,
    answer=DrainAnswer,
    scope="admin",
    routing="engine",
    example={"stop": False},
)

LIST_NAMESPACES: Final = of_namespaces(
    name="list_namespaces",
    summary="List the namespaces that have sequences or pages",
    fields=NoFields,
    answer=NamespacesAnswer,
)

GET_NAMESPACE: Final = of_namespaces(
    name="get_namespace",
    summary="Pages, sequences and quota of a namespace",
    fields=NamespaceFields,
    answer=NamespaceAnswer,
)

SET_NAMESPACE: Final = of_namespaces(
    name="set_namespace",
    summary="Set the quota of a namespace",
    description="Pages above a lower quota are kept until they are deleted or evicted.",
    fields=QuotaFields,
    answer=NamespaceAnswer,
)


STATES: Final = "0 free, 1 referenced, 2 pinned, 3 cached"


class EnginePages(Fields):
    """One engine's part of a cluster's snapshot."""

    name: str
    """Engine's name, as in `GET /v1/engines`."""
    total: Count
    referenced: Count
    pinned: Count
    cached: Count


class SnapshotAnswer(Fields):
    free: Count
    """Free pages of the pool; this and the counts below cover all namespaces."""
    referenced: Count
    cached: Count
    pinned: Count
    total: Count
    leases: Count
    sequences: Count
    nodes: Count
    evicted: Annotated[int, Field(ge=0)]
    """Pages evicted since the start."""
    host: Count = 0
    """Pages in host memory, behind the pool."""
    disk: Count = 0
    """Pages on disk."""
    page_step: Count
    """Distance between the pages in `page_states`; above 1 for very large pools."""
    namespaces: list[str]
    """Namespaces of the tree's first rows."""
    engines: list[EnginePages]
    """Engines in the order of `page_states`, with ceil(total / page_step) states each; empty
    without a cluster."""


def of_the_tree(name: str, dtype: str, words: str) -> TensorSpec:
    return TensorSpec(f"tree_{name}", (dtype,), ("N",), words)


SNAPSHOT: Final = operation(
    name="snapshot",
    summary="Pages by state and the tree's largest parts, of all namespaces",
    description="The data of the live page, updated at most five times a second, for a very large "
    "tree less often. It contains no ids, keys or tokens.",
    fields=NoFields,
    answer=SnapshotAnswer,
    gives=(
        TensorSpec("page_states", ("U8",), ("P",), STATES),
        of_the_tree("parents", "I32", "parent row; -1 for the rows of the namespaces"),
        of_the_tree("pages", "I32", "own pages"),
        of_the_tree("totals", "I32", "own pages and all pages of rows below, shown or not"),
        of_the_tree("sequences", "I32", "sequences that share it"),
        of_the_tree("idle_s", "F32", "seconds since its last use"),
        of_the_tree("states", "U8", f"{STATES}; 0 for a namespace"),
    ),
    scope="admin",
    routing="everywhere",
)
