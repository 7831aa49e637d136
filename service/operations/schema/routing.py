"""How an operation finds its engine where there are several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from service.operations.schema.fields import NAMING

if TYPE_CHECKING:
    from service.operations.schema.spec import Operation

Routing = Literal[
    "sequence",  # the engine of the sequence that `id` names
    "sequences",  # a batch: split by where its sequences are, joined in order
    "together",  # sequences that must all be on one engine
    "placed",  # makes sequences: wherever there is room, and most of their prefix
    "everywhere",  # every engine, their answers made one
    "anywhere",  # any engine: it touches no pool, or all say the same
    "lease",  # the engine that gave the lease, which its id tells
    "engine",  # the engine that its path names
    "imported",  # an import: placed when it begins, then where it was begun
]


def default_routing(operation: Operation) -> Routing:
    """By the operation's fields: the sequence that its path names, or the batch that it is for.

    Raises ValueError where the fields tell neither.
    """
    fields = operation.fields.model_fields
    if "id" in operation.path_names and NAMING in fields["id"].metadata:
        return "sequence"
    if "sequences" in fields and is_ids(fields["sequences"].annotation):
        return "sequences"
    raise ValueError(f"{operation.name}: its fields do not tell where it goes: declare routing")


def is_ids(kind: Any) -> bool:
    """Whether a type is a list of sequences' ids."""
    return any(NAMING in getattr(part, "__metadata__", ()) for part in get_args(kind))
