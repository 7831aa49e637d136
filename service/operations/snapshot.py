"""The operation that returns a snapshot of the pool: the state of each page, and the tree."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Count, Fields, NoFields
from service.operations.schema.spec import Operation, TensorSpec

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
    page_step: Count
    """Distance between the pages in `page_states`; above 1 for very large pools."""
    namespaces: list[str]
    """Namespaces of the tree's first rows."""
    engines: list[EnginePages]
    """Engines in the order of `page_states`, with ceil(total / page_step) states each; empty
    without a cluster."""


def of_the_tree(name: str, dtype: str, words: str) -> TensorSpec:
    return TensorSpec(f"tree_{name}", (dtype,), ("N",), words)


SNAPSHOT: Final = Operation(
    name="snapshot",
    number=33,
    route="GET /v1/snapshot",
    summary="Pages by state and the tree's largest parts, of all namespaces",
    description="The data of the live page, updated at most five times a second, for a very large "
    "tree less often. It contains no ids, keys or tokens.",
    tag="service",
    fields=NoFields,
    answer=SnapshotAnswer,
    gives=(
        TensorSpec("page_states", ("U8",), ("P",), STATES),
        of_the_tree("parents", "I32", "parent row; -1 for the rows of the namespaces"),
        of_the_tree("pages", "I32", "own pages"),
        of_the_tree("totals", "I32", "own pages and those of all rows below, shown or not"),
        of_the_tree("sequences", "I32", "sequences that share it"),
        of_the_tree("idle_s", "F32", "seconds since its last use"),
        of_the_tree("states", "U8", f"{STATES}; 0 for a namespace"),
    ),
    scope="admin",
    routing="everywhere",
)
