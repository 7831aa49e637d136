"""Operations on the service's state: info, pool, snapshot, engines, drains, and quotas."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Count, Fields, InfoAnswer, NoFields
from service.operations.schema.spec import Operation, TensorSpec


class EnginesFields(Fields):
    counts: bool = False
    """Whether the reply has each engine's counters."""


ENGINE_NAME: Final = "engine"
"""Name of an engine in its own replies; a cluster has names of its own."""
UNKNOWN_ENGINE: Final = "unknown engine: GET /v1/engines lists the names"


class DrainFields(Fields):
    name: Annotated[str, Field(max_length=256)]
    """Engine's name, as in `GET /v1/engines`."""
    stop: bool = False
    """Whether to stop draining: the engine accepts new sequences again; moved ones stay where they
    are."""


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
    scope="read",
    routing="everywhere",
)

ENGINES: Final = operation(
    name="engines",
    summary="List the engines of the service, with their pages and sequences",
    fields=EnginesFields,
    scope="admin",
    routing="everywhere",
)

DRAIN_ENGINE: Final = operation(
    name="drain_engine",
    summary="Drain an engine of a cluster: move its sequences to the others",
    description="Returns at once; `GET /v1/engines` shows the progress. The engine accepts no new "
    "sequences until a call with `stop`. Without a cluster, nothing is moved.",
    fields=DrainFields,
    scope="admin",
    routing="engine",
)

LIST_NAMESPACES: Final = of_namespaces(
    name="list_namespaces",
    summary="List the namespaces that have sequences or pages",
    fields=NoFields,
)

GET_NAMESPACE: Final = of_namespaces(
    name="get_namespace",
    summary="Pages, sequences and quota of a namespace",
    fields=NamespaceFields,
)

SET_NAMESPACE: Final = of_namespaces(
    name="set_namespace",
    summary="Set the quota of a namespace",
    description="Pages above a lower quota are kept until they are deleted or evicted.",
    fields=QuotaFields,
)


STATES: Final = "0 free, 1 referenced, 2 pinned, 3 cached"


def of_the_tree(name: str, dtype: str, words: str) -> TensorSpec:
    return TensorSpec(f"tree_{name}", (dtype,), ("N",), words)


SNAPSHOT: Final = operation(
    name="snapshot",
    summary="Pages by state and the tree's largest parts, of all namespaces",
    description="The data of the live page, updated at most five times a second, for a very large "
    "tree less often. It contains no ids, keys or tokens.",
    fields=NoFields,
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
