"""The handler of every operation, and the sequences that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from service.engine.handlers import (
    attention,
    exports,
    imports,
    prefix,
    records,
    rows,
    sequences,
    states,
    status,
    steps,
    truncate,
)
from service.engine.handlers.prefix import ANSWER_BYTES
from service.engine.handlers.token_ids import has_ids
from service.engine.store.store import Store
from service.engine.work.request import Request
from service.engine.work.work import Answer, Seconds

Names = Callable[[Request], Iterable[str]]
Begin = Callable[[Store, Request, Seconds], Answer]


def ids_of(request: Request) -> Iterable[str]:
    return request.fields.ids  # type: ignore[no-any-return]


def one_id(request: Request) -> Iterable[str]:
    return (request.fields.id,)


def appended_ids(request: Request) -> Iterable[str]:
    """Attention changes its sequences when the request has k and v, or token ids."""
    return ids_of(request) if "k" in request.tensors or has_ids(request) else ()


def level_ids(request: Request) -> Iterable[str]:
    return {name for level in request.fields.levels for name in level.ids}


def parents(request: Request) -> Iterable[str]:
    return [new.parent for new in request.fields.sequences if new.parent is not None]


def made(request: Request) -> Iterable[str]:
    return [new.id for new in request.fields.sequences if new.id is not None]


def id_prefix(request: Request) -> str | None:
    prefix = request.fields.prefix
    return None if prefix is None else request.tenant.prefix + prefix


@dataclass(frozen=True, slots=True)
class Handler:
    """How an operation takes its turn.

    `begin` is its handler: it changes the tree, hands writes to the device, and returns the work
    that is left, or the answer's fields; if it raises, it has changed nothing. `room`: maximum
    size of the answer's fields, checked before anything is changed; None: `begin` checks, or
    changes nothing. `reads` and `writes` name the sequences that
    it locks. `is_barrier`: it frees or renames pages, so everything before it must be answered.
    `is_attention`: it can share a launch with its kind. `launches`: it needs a launch of its own.
    `sweeps`: it writes every sequence whose id has this prefix.
    """

    begin: Begin
    reads: Names = lambda _: ()
    writes: Names = lambda _: ()
    is_barrier: bool = False
    is_attention: bool = False
    launches: bool = False
    sweeps: Callable[[Request], str | None] = lambda _: None
    room: int | None = None


HANDLERS: Final[dict[str, Handler]] = {
    "create_sequences": Handler(sequences.create_sequences, parents, made, is_barrier=True),
    "list_sequences": Handler(sequences.list_sequences),
    "get_sequence": Handler(sequences.get_sequence, reads=one_id),
    "delete_sequence": Handler(truncate.delete_sequence, writes=one_id, is_barrier=True, room=0),
    "truncate": Handler(truncate.truncate, writes=one_id, is_barrier=True),
    "truncate_sequences": Handler(truncate.truncate_sequences, writes=ids_of, is_barrier=True),
    "page_table": Handler(rows.page_table, reads=ids_of),
    "append": Handler(rows.append, ids_of, ids_of),
    "gather": Handler(rows.gather, reads=ids_of, launches=True),
    "decode": Handler(attention.attend, ids_of, appended_ids, is_attention=True),
    "prefill": Handler(attention.attend, ids_of, appended_ids, is_attention=True),
    "ragged_prefill": Handler(states.ragged_prefill, launches=True),
    "cascade": Handler(attention.cascade, reads=level_ids, is_attention=True),
    "merge": Handler(states.merge, launches=True),
    "info": Handler(status.info),
    "pool": Handler(status.pool),
    "engines": Handler(status.engines),
    "step": Handler(steps.step, ids_of, ids_of),
    "delete_sequences": Handler(
        truncate.delete_sequences,
        writes=lambda request: request.fields.names,
        is_barrier=True,
        sweeps=id_prefix,
    ),
    "match_prefix": Handler(prefix.match_prefix, is_barrier=True, room=ANSWER_BYTES),
    "prefetch": Handler(prefix.prefetch, is_barrier=True, room=ANSWER_BYTES),
    "commit": Handler(prefix.commit, writes=one_id, is_barrier=True, room=ANSWER_BYTES),
    "commit_sequences": Handler(prefix.commit_sequences, writes=ids_of, is_barrier=True),
    "renew_lease": Handler(prefix.renew_lease, room=ANSWER_BYTES),
    "release_lease": Handler(prefix.release_lease, is_barrier=True, room=0),
    "pin": Handler(prefix.pin, is_barrier=True, room=ANSWER_BYTES),
    "unpin": Handler(prefix.unpin, is_barrier=True, room=0),
    "evict": Handler(prefix.evict, is_barrier=True, room=ANSWER_BYTES),
    "clear": Handler(prefix.clear, is_barrier=True, room=ANSWER_BYTES),
    "get_namespace": Handler(status.get_namespace),
    "set_namespace": Handler(status.set_namespace, room=ANSWER_BYTES),
    "events": Handler(status.events),
    "export_sequence": Handler(exports.export_sequence, reads=one_id, is_barrier=True),
    "import_sequence": Handler(
        imports.import_sequence, writes=one_id, is_barrier=True, room=ANSWER_BYTES
    ),
    "get_import": Handler(imports.get_import, reads=one_id),
    "cancel_import": Handler(imports.cancel_import, writes=one_id, is_barrier=True, room=0),
    "snapshot": Handler(status.snapshot),
    "drain_engine": Handler(status.drain_engine, room=ANSWER_BYTES),
    "list_namespaces": Handler(status.list_namespaces),
    "holds": Handler(prefix.holds),
    "contains_records": Handler(records.contains_records),
    "put_records": Handler(records.put_records),
    "get_records": Handler(records.get_records),
    "touch_records": Handler(records.touch_records),
    "delete_records": Handler(records.delete_records),
    "clear_records": Handler(records.clear_records, room=ANSWER_BYTES),
    "release_records": Handler(records.release_records, room=0),
}


def sharing_of(request: Request, handler: Handler) -> Hashable | None:
    """The kind of launch that a request needs; equal ones can share it. None: it needs none.

    It is known before the turn, so that a launch of another kind goes out before anything changes.
    """
    if not handler.is_attention:
        return object() if handler.launches else None
    fields, q = request.fields, request.tensors["q"]
    window: Any = getattr(fields, "window_left", -1)
    sharing = (q.dtype, q.shape[1:], fields.sm_scale, fields.logits_soft_cap, window)
    request.known["sharing"] = sharing
    return sharing
