"""Operations on the pool itself: sequences made, cut and dropped, rows appended, and views."""

from __future__ import annotations

import base64
import secrets

import numpy as np

from service.core.errors import IntegrityError
from service.core.values import NewSpec, RowCopies, SequenceView
from service.engine import operations as ops
from service.engine.store import Store, StoreLost
from service.engine.work import Answered, Counts, Work


def create_sequences(store: Store, operation: ops.CreateSequences, _: ops.Timings) -> Work:
    specs = [
        NewSpec(fresh_id() if new.id is None else new.id, new.parent, new.length)
        for new in operation.sequences
    ]
    copies = store.tree.create(specs)
    ids = [spec.id for spec in specs]
    try:
        copy_rows(store, copies)
    except BaseException:
        store.tree.free(ids)
        raise
    return Answered(tuple(sequence_info(store.tree.describe(name)) for name in ids))


def delete_sequence(store: Store, operation: ops.DeleteSequence, _: ops.Timings) -> Work:
    store.tree.free((operation.sequence,))
    return Answered(None)


def truncate(store: Store, operation: ops.Truncate, _: ops.Timings) -> Work:
    copies = store.tree.truncate(operation.sequence, operation.length)
    try:
        copy_rows(store, copies)
    except Exception as error:
        raise StoreLost(f"rows of {operation.sequence} were lost in a truncate") from error
    return Answered(sequence_info(store.tree.describe(operation.sequence)))


def copy_rows(store: Store, copies: RowCopies) -> None:
    if copies.src_pages.size:
        store.backend.copy_rows(copies.src_pages, copies.dst_pages, copies.num_rows)


def list_sequences(store: Store, operation: ops.ListSequences, _: ops.Timings) -> Work:
    views = store.tree.list(operation.after, operation.limit)
    return Answered(tuple(sequence_info(view) for view in views))


def get_sequence(store: Store, operation: ops.GetSequence, _: ops.Timings) -> Work:
    return Answered(sequence_info(store.tree.describe(operation.sequence)))


def page_table(store: Store, operation: ops.PageTable, _: ops.Timings) -> Work:
    """The flat table, and every level the tree has, however little its sharing would save."""
    ids, layer = operation.sequences, operation.layer
    table = store.tree.page_table(ids, layer)
    one_row_each = np.arange(len(ids) + 1, dtype=np.int32)
    plan = store.plans.sequences(ids, layer, one_row_each, causal=False, mode="always").plan
    levels = tuple(
        ops.LevelInfo(level.qo_indptr, level.kv_indptr, level.kv_indices, level.kv_last_page_len)
        for level in plan.levels
    )
    order = one_row_each[:-1] if plan.order is None else plan.order
    return Answered(
        ops.PageTableInfo(table.kv_indptr, table.kv_indices, table.kv_last_page_len, levels, order)
    )


def append(store: Store, operation: ops.Append, timings: ops.Timings) -> Work:
    counts = np.diff(operation.append_indptr)
    rows = (operation.k, operation.v)
    extension = store.append(
        operation.layer, operation.sequences, counts, operation.offsets, rows, timings
    )
    lengths = tuple(extension.lengths.tolist())
    return Answered(ops.Appended(lengths), extension, Counts(appended=extension.slots.size))


def pool_status(store: Store, _operation: ops.PoolStatus, _: ops.Timings) -> Work:
    try:
        store.tree.check_integrity()
        integrity = "ok"
    except IntegrityError as error:
        integrity = str(error)
    numbers = store.numbers()
    return Answered(
        ops.PoolInfo(
            free=numbers.free,
            referenced=numbers.referenced,
            total=store.geometry.num_pages,
            sequences=numbers.sequences,
            nodes=numbers.nodes,
            sharing_ratio=store.tree.sharing_ratio,
            integrity=integrity,
        )
    )


def sequence_info(view: SequenceView) -> ops.SequenceInfo:
    return ops.SequenceInfo(
        view.id, view.length, view.lengths, view.pages, view.last_page_len, view.parent
    )


def fresh_id() -> str:
    """An id that nobody else makes: 80 random bits."""
    return f"seq-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}"
