"""An operation's turn: which function runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

from service.engine import operations as ops
from service.engine.attention import attention, cascade, gather, merge, ragged_prefill
from service.engine.sequences import (
    append,
    create_sequences,
    delete_sequence,
    get_sequence,
    list_sequences,
    page_table,
    pool_status,
    truncate,
)
from service.engine.store import Store
from service.engine.work import Work

HANDLERS: Final[dict[type, Callable[[Store, Any, ops.Timings], Work]]] = {
    ops.CreateSequences: create_sequences,
    ops.ListSequences: list_sequences,
    ops.GetSequence: get_sequence,
    ops.DeleteSequence: delete_sequence,
    ops.Truncate: truncate,
    ops.PageTable: page_table,
    ops.Append: append,
    ops.Attention: attention,
    ops.RaggedPrefill: ragged_prefill,
    ops.Cascade: cascade,
    ops.Merge: merge,
    ops.Gather: gather,
    ops.PoolStatus: pool_status,
}

BARRIERS: Final = (ops.CreateSequences, ops.DeleteSequence, ops.Truncate)
"""What gives pages away or renames them: everything before it must be settled, for good."""


def sharing_of(operation: ops.Operation) -> Hashable | None:
    """Operations with equal values may share a launch; None: it needs none.

    Known before its turn, so that a launch that it does not share goes out before it changes
    anything.
    """
    match operation:
        case ops.Attention() | ops.Cascade():
            options = operation.options
            numbers = (options.sm_scale, options.logits_soft_cap, options.window_left)
            return (operation.q.dtype, operation.q.shape[1:], *numbers)
        case ops.RaggedPrefill() | ops.Merge() | ops.Gather():
            return id(operation)
        case _:
            return None


def begin(store: Store, operation: ops.Operation, timings: ops.Timings) -> Work:
    """Give `operation` its turn: change the tree, hand writes to the device; return what is left.

    Seconds spent are added to `timings`. Having raised, it has changed nothing: `CoreError`,
    `kernels.backend.Unsupported`, `DeviceLost`, `StoreLost`, or whatever a bug raises.
    """
    return HANDLERS[type(operation)](store, operation, timings)
