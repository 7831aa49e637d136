"""Handlers of an engine that holds shards, by operation; other operations keep their plain handler.

Every handler here forwards requests without shards to the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from service.core.shards import check_epochs
from service.engine.handlers.shards import batch, sequences
from service.engine.handlers.shards.batch import refuse_shards
from service.engine.handlers.table import HANDLERS, Begin
from service.engine.loop.job import Answer, Seconds
from service.engine.loop.request import Request
from service.engine.store.store import Store

Check = Callable[[Store, Request], None]


def checked(operation: str, check: Check) -> Begin:
    """The plain handler of an operation, after a check."""
    plain = HANDLERS[operation].begin

    def begin(store: Store, request: Request, seconds: Seconds) -> Answer:
        check(store, request)
        return plain(store, request, seconds)

    return begin


SHARD_HANDLERS: Final[Mapping[str, Begin]] = {
    "append": batch.append,
    "gather": batch.gather,
    "decode": batch.attend,
    "prefill": batch.attend,
    "cascade": checked("cascade", batch.check_cascade),
    "step": batch.step,
    "create_sequences": sequences.create_sequences,
    "claim": sequences.claim,
    "truncate": sequences.truncate_sequence,
    "truncate_sequences": checked(
        "truncate_sequences",
        lambda store, one: refuse_shards(store, one.fields.ids, "a truncation of many"),
    ),
    "delete_sequence": checked(
        "delete_sequence", lambda store, one: check_epochs(store.tree, (one.fields.id,), None)
    ),
    "delete_sequences": sequences.delete_sequences,
    "page_table": checked(
        "page_table", lambda store, one: check_epochs(store.tree, one.fields.ids, None)
    ),
    "commit": checked(
        "commit", lambda store, one: refuse_shards(store, (one.fields.id,), "a commit", "id")
    ),
    "commit_sequences": checked(
        "commit_sequences",
        lambda store, one: refuse_shards(store, one.fields.ids, "a commit of many"),
    ),
    "export_sequence": sequences.export_sequence,
    "import_sequence": sequences.import_sequence,
    "hand_over": checked("hand_over", sequences.check_mark),
}
