"""Operations on sequences themselves: made, cut, and looked at."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from kernels.backend import Done
from service.core.errors import InvalidRequest
from service.core.keys import Prefix
from service.core.sharding import check_epochs
from service.core.shards import Shard
from service.core.values import NewSpec, RowCopies, SequenceView
from service.engine.moving import refuse_new
from service.engine.prefix import most_tokens, prefix_of
from service.engine.request import Request
from service.engine.rows import NUMBER_BYTES
from service.engine.store import Store
from service.engine.unfinished import HIDDEN
from service.engine.work import Answered, Cost, Counts, Seconds, Sliced, Step, Steps, Work
from service.errors import OutOfSequences
from service.tenants import Tenant

MADE_AT_ONCE: Final = 1024
"""Sequences that one slice makes: some 20 ms."""
VIEW_BYTES: Final = 320
"""Room for one sequence in an answer, beside its ids and lengths."""
LONGEST_ID: Final = 128
NO_COST: Final = Cost()


def create_sequences(store: Store, request: Request, _: Seconds) -> Work:
    new = request.fields.sequences
    tree = store.tree
    if any(one.parent is None and one.held is None for one in new):
        refuse_new(store)
    if dealt := [one.ranks for one in new if (one.ranks or 1) > 1]:
        raise InvalidRequest("ranks", max(dealt), "must be at most 1, the engines that there are")
    free = store.max_sequences - tree.num_sequences
    if len(new) > free:
        raise OutOfSequences(len(new), max(free, 0), store.max_sequences)
    tenant = request.tenant
    prefixes = prefixes_of(request, most_tokens(store))
    for at, one in enumerate(new):
        if one.held is not None:
            key = bytes.fromhex(one.held.page_key)
            prefixes[at] = tree.cache.chain(tenant.namespace, key, one.held.cache_salt)
    specs = [
        NewSpec(
            one.id or tenant.prefix + fresh_id(),
            one.parent,
            one.length,
            prefix,
            tenant.namespace,
            one.ttl_s,
            None if one.shard is None else Shard(one.shard.rank, one.shard.ranks),
            one.epoch or 0,
        )
        for one, prefix in zip(new, prefixes, strict=True)
    ]
    names = sum(len(spec.id) + len(spec.parent or "") for spec in specs)
    request.place.require(view_bytes(store) * len(new) + names)
    store.imports.refuse_taken([spec.id for spec in specs])
    refuse_uneven_parents(store, specs, tenant)
    if len(specs) > MADE_AT_ONCE:
        made: list[str] = []
        steps = create_steps(store, request, specs, made)
        fresh = tuple(spec.id for spec, one in zip(specs, new, strict=True) if one.id is None)
        return Sliced(steps, lambda: tree.free(made), made=fresh)
    create(store, specs)
    return Answered(counts=lay_created(store, request, specs))


def refuse_uneven_parents(store: Store, specs: Sequence[NewSpec], tenant: Tenant) -> None:
    """A fork of all of a parent that some layers have more of would silently lose what they have.

    Raises `InvalidRequest` where no length says that this is meant.
    """
    books = store.tree.books
    for spec in specs:
        if spec.parent is None or spec.length is not None or spec.parent not in books:
            continue
        lengths = books.lengths[:, books.leaf(spec.parent).index]
        if lengths.min() != lengths.max():
            least, most = int(lengths.min()), int(lengths.max())
            rule = (
                f"its layers hold {least} to {most} tokens, and a fork holds the same at each: "
                f"append to the other layers first, or say length = {least}"
            )
            raise InvalidRequest("parent", tenant.shown(spec.parent), rule)


def create(store: Store, specs: Sequence[NewSpec]) -> None:
    """All or none."""
    copies = store.tree.create(specs)
    try:
        copy_rows(store, copies)
    except BaseException:
        store.tree.free([spec.id for spec in specs])
        raise


def create_steps(
    store: Store, request: Request, specs: Sequence[NewSpec], made: list[str]
) -> Steps:
    """Many sequences, some at a time; `made` are those there already."""

    def start(some: Sequence[NewSpec]) -> Done[None]:
        create(store, some)
        made.extend(spec.id for spec in some)
        return Done(None)

    for begin in range(0, len(specs), MADE_AT_ONCE):
        yield Step(partial(start, specs[begin : begin + MADE_AT_ONCE]), "create", NO_COST)
    lay_created(store, request, specs)


def lay_created(store: Store, request: Request, specs: Sequence[NewSpec]) -> Counts:
    """The answer, and how many tokens of prefixes were looked up and found."""
    views, looked_up, found = [], 0, 0
    size = store.geometry.page_size
    for spec in specs:
        view = sequence_fields(store.tree.describe(spec.id), request.tenant)
        cached = view["length"] if spec.prefix is not None else 0
        views.append(view | {"cached_len": cached})
        found += cached
        looked_up += 0 if spec.prefix is None else spec.prefix.num_pages(size) * size
    request.place.lay({"sequences": views})
    return Counts(looked_up=looked_up, found=found)


def prefixes_of(request: Request, most: int) -> list[Prefix | None]:
    """The prefix of every sequence to make, from its fields or its part of the tensor."""
    fields, tensors = request.fields, request.tensors
    new = fields.sequences
    spans = fields.prefix_indptr
    if not tensors or spans is None:
        return [None if one.prefix is None else prefix_of(one.prefix, tensors, most) for one in new]
    parts = []
    for index, one in enumerate(new):
        part = {name: rows[spans[index] : spans[index + 1]] for name, rows in tensors.items()}
        parts.append(None if one.prefix is None else prefix_of(one.prefix, part, most))
    return parts


def copy_rows(store: Store, copies: RowCopies) -> None:
    if copies.src_pages.size:
        store.backend.copy_rows(copies.src_pages, copies.dst_pages, copies.num_rows)


def list_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """A page of the list; one more is looked up to know whether there are more."""
    fields, tenant = request.fields, request.tenant
    found = store.tree.list(fields.after or tenant.prefix, fields.limit + 1)
    own = [view for view in found if is_shown(view.id, tenant)]
    shown = [sequence_fields(view, tenant) for view in own[: fields.limit]]
    following = shown[-1]["id"] if len(own) > fields.limit else None
    request.place.require((view_bytes(store) + 2 * LONGEST_ID) * len(shown))
    request.place.lay({"sequences": shown, "next": following})
    return Answered()


def is_shown(name: str, tenant: Tenant) -> bool:
    """Whether a sequence is the tenant's, and is not being imported."""
    return name.startswith(tenant.prefix) and not name.startswith(HIDDEN)


def get_sequence(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(view_bytes(store) + 2 * LONGEST_ID)
    request.place.lay(sequence_fields(store.tree.describe(request.fields.id), request.tenant))
    return Answered()


def page_table(store: Store, request: Request, _: Seconds) -> Work:
    """The flat table, and every level the tree has, however little its sharing would save."""
    ids, layer = request.fields.ids, request.fields.layer
    check_epochs(store.tree, ids, None)
    table = store.tree.page_table(ids, layer)
    one_row_each = np.arange(len(ids) + 1, dtype=np.int32)
    plan = store.plans.sequences(ids, layer, one_row_each, causal=False, mode="always").plan
    order = one_row_each[:-1] if plan.order is None else plan.order
    levels = [
        {"qo_indptr": level.qo_indptr.tolist()} | table_fields(level) for level in plan.levels
    ]
    numbers = table.kv_indices.size + 4 * len(ids)
    numbers += sum(level.kv_indices.size + 4 * level.qo_indptr.size for level in plan.levels)
    request.place.require(NUMBER_BYTES * numbers + 256)
    request.place.lay(table_fields(table) | {"levels": levels, "order": order.tolist()})
    return Answered()


def table_fields(table: Any) -> dict[str, Any]:
    """The three arrays of a CSR page table."""
    return {
        "kv_indptr": table.kv_indptr.tolist(),
        "kv_indices": table.kv_indices.tolist(),
        "kv_last_page_len": table.kv_last_page_len.tolist(),
    }


def sequence_fields(view: SequenceView, tenant: Tenant) -> dict[str, Any]:
    shard = view.shard
    part = {}
    if not shard.is_whole:
        known = {"epoch": view.epoch, "lengths": list(view.whole_lengths)}
        part["shard"] = {"rank": shard.rank, "ranks": shard.ranks} | known
    return {
        "id": tenant.shown(view.id),
        "length": view.length,
        "lengths": list(view.lengths),
        "pages": view.pages,
        "last_page_len": view.last_page_len,
        "parent": None if view.parent is None else tenant.shown(view.parent),
        "ttl_s": view.ttl_s,
        **part,
    }


def view_bytes(store: Store) -> int:
    return VIEW_BYTES + 2 * NUMBER_BYTES * store.geometry.num_layers


def fresh_id() -> str:
    """An id that nobody else makes: 80 random bits."""
    return f"seq-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}"
