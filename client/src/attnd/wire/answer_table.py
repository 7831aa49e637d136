"""The answer of each operation, and where it has the fields of its class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Final, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from attnd.wire.answers import (
    AppendResult,
    AttentionResult,
    CommitResult,
    EngineInfo,
    EventPage,
    GatherResult,
    Hold,
    ImportState,
    Info,
    Lease,
    MergeResult,
    Namespace,
    PageTable,
    Pool,
    PrefixMatch,
    RecordLookup,
    RecordsStored,
    SequenceInfo,
    SequencePage,
    Snapshot,
)
from attnd.wire.meta import Meta
from attnd.wire.states import AttentionState

TEXT: Final = re.compile(r"^`(\w+)`: (.+?)(?=^`|\Z)", re.DOTALL | re.MULTILINE)
"""A field's text in the docstring of a class."""
ARRAYS: Final = (np.ndarray, NDArray)
"""What a type of arrays is one of: from numpy 2.5 on `NDArray[...]` is a name of its own."""
Answer = type[Any] | Mapping[str, Any] | None
"""A class, the types of members by name, or None: no members."""
SEQUENCES: Final = {"sequences": tuple[SequenceInfo, ...]}
PAGES: Final = {"num_pages": int}
ANSWERS: Final[Mapping[str, Answer]] = {
    "create_sequences": SEQUENCES,
    "list_sequences": SequencePage,
    "get_sequence": SequenceInfo,
    "delete_sequence": None,
    "delete_sequences": {"num_deleted": int},
    "truncate": SequenceInfo,
    "truncate_sequences": SEQUENCES,
    "page_table": PageTable,
    "append": AppendResult,
    "gather": GatherResult,
    "decode": AttentionResult,
    "prefill": AttentionResult,
    "ragged_prefill": AttentionResult,
    "cascade": AttentionResult,
    "merge": MergeResult,
    "match_prefix": PrefixMatch,
    "prefetch": PrefixMatch,
    "commit": CommitResult,
    "commit_sequences": {
        "committed_lens": tuple[int, ...],
        "num_pages": tuple[int, ...],
        "last_keys": tuple[str | None, ...],
        "durable": bool | None,
    },
    "renew_lease": Lease,
    "release_lease": None,
    "pin": PAGES,
    "unpin": None,
    "holds": {"holds": tuple[Hold, ...]},
    "evict": PAGES,
    "clear": PAGES,
    "list_namespaces": {"namespaces": tuple[str, ...]},
    "get_namespace": Namespace,
    "set_namespace": Namespace,
    "events": EventPage,
    "import_sequence": ImportState,
    "get_import": ImportState,
    "cancel_import": None,
    "info": Info,
    "pool": Pool,
    "engines": {"engines": tuple[EngineInfo, ...]},
    "drain_engine": {"name": str, "draining": bool, "sequences": int},
    "snapshot": Snapshot,
    "contains_records": RecordLookup,
    "put_records": RecordsStored,
    "get_records": {"outcomes": tuple[str, ...], "num_bytes": tuple[int, ...]},
    "touch_records": RecordLookup,
    "delete_records": RecordLookup,
    "clear_records": {"num_records": int},
    "release_records": None,
}
"""The answer of each operation but exports, whose header is the importer's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Types by name: of members of the JSON, of tensors, and of fields that are classes with
    tensors, whose JSON members are the answer's own. Tensors there have the field's name before
    theirs, as in `tree_pages`."""

    members: dict[str, Any]
    tensors: tuple[str, ...]
    nested: dict[str, Any]
    has_meta: bool

    @property
    def all_members(self) -> dict[str, Any]:
        found = dict(self.members)
        for kind in self.nested.values():
            found |= layout_of(kind).members
        return found


@cache
def layout_of(kind: Any) -> Layout:
    hints = get_type_hints(kind, include_extras=True)
    members, nested, tensors = dict[str, Any](), dict[str, Any](), []
    for name, hint in hints.items():
        if hint in (Meta, tuple[AttentionState, ...]):
            continue
        if get_origin(hint) in ARRAYS:
            tensors.append(name)
        elif is_dataclass(hint) and layout_of(hint).tensors:  # type: ignore[arg-type]
            nested[name] = hint
        else:
            members[name] = hint
    return Layout(members, tuple(tensors), nested, Meta in hints.values())
