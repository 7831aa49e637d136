"""How a cluster finds the engines for an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from service.operations.schema.fields import NAMING

if TYPE_CHECKING:
    from service.operations.schema.spec import Operation

Routing = Literal[
    "sequence",  # the engine of the sequence that `id` names
    "sequences",  # a batch: split by where its sequences are, joined in order
    "together",  # sequences that must all be on one engine
    "placed",  # creates sequences: on an engine with free pages and most of their prefix
    "everywhere",  # all engines; their replies are combined
    "anywhere",  # any engine: it does not use the pool
    "lease",  # the engine that gave the lease, as the lease's id says
    "engine",  # the engine named by the path
    "imported",  # an import: placed at its start, then the engine where it started
]


def default_routing(operation: Operation) -> Routing:
    """The routing that the fields imply: by the sequence in the path, or by the batch.

    Raises ValueError if they imply neither.
    """
    fields = operation.fields.model_fields
    if "id" in operation.path_names and NAMING in fields["id"].metadata:
        return "sequence"
    if "sequences" in fields and is_ids(fields["sequences"].annotation):
        return "sequences"
    raise ValueError(f"{operation.name}: its fields imply no routing: declare it")


def is_ids(kind: Any) -> bool:
    """Whether a type is a list of sequence ids."""
    return any(NAMING in getattr(part, "__metadata__", ()) for part in get_args(kind))
