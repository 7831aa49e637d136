"""The operation that shows the whole pool at one moment: the state of each page, and the tree."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import Count, Fields, NoFields
from service.operations.schema.spec import Operation, TensorSpec

STATES: Final = "0 free, 1 referenced, 2 pinned, 3 cached"


class EnginePages(Fields):
    """One engine's share of a cluster's snapshot."""

    name: str
    """The engine's name, as in `GET /v1/engines`."""
    total: Count
    referenced: Count
    pinned: Count
    cached: Count


class SnapshotAnswer(Fields):
    free: Count
    """Free pages of the pool, whoever may have them; this and the counts below are of all
    namespaces together."""
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
    """`page_states` tells of each so manyth page: 1, or more for a pool that is very large."""
    namespaces: list[str]
    """Those that the tree begins with."""
    engines: list[EnginePages]
    """Pages by engine, in the order of `page_states`: ceil(total / page_step) states each. Empty
    without a cluster."""


def of_the_tree(name: str, dtype: str, words: str) -> TensorSpec:
    return TensorSpec(f"tree_{name}", (dtype,), ("N",), words)


SNAPSHOT: Final = Operation(
    name="snapshot",
    number=33,
    method="GET",
    path="/v1/snapshot",
    summary="Pages by state and the tree's largest parts, of all namespaces",
    description="What the live page shows. It is taken at most five times a second, whoever asks, "
    "and the tree less often where it is very large. No ids, keys or tokens are in it.",
    tag="service",
    fields=NoFields,
    answer=SnapshotAnswer,
    gives=(
        TensorSpec("page_states", ("U8",), ("P",), STATES),
        of_the_tree("parents", "I32", "the row above each; -1 for the rows of the namespaces"),
        of_the_tree("pages", "I32", "pages of its own"),
        of_the_tree("totals", "I32", "with those of all rows below it, shown or not"),
        of_the_tree("sequences", "I32", "sequences that share it"),
        of_the_tree("idle_s", "F32", "seconds since it was used last"),
        of_the_tree("states", "U8", f"{STATES}; 0 for a namespace"),
    ),
    scope="admin",
    routing="everywhere",
)
