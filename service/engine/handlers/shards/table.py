"""Handlers of an engine that holds shards, by operation; other operations keep their plain handler.

Every handler here forwards requests without shards to the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from service.engine.handlers.shards import batch, sequences, transfer

if TYPE_CHECKING:
    from service.engine.handlers.table import Begin

SHARD_HANDLERS: Final[Mapping[str, Begin]] = {
    "append": batch.append,
    "gather": batch.gather,
    "decode": batch.attend,
    "prefill": batch.attend,
    "cascade": batch.cascade,
    "step": batch.step,
    "create_sequences": sequences.create_sequences,
    "claim": sequences.claim,
    "truncate": sequences.truncate_sequence,
    "truncate_sequences": sequences.truncate_sequences,
    "delete_sequence": sequences.delete_sequence,
    "delete_sequences": sequences.delete_sequences,
    "page_table": sequences.page_table,
    "commit": sequences.commit,
    "commit_sequences": sequences.commit_sequences,
    "export_sequence": transfer.export_sequence,
    "import_sequence": transfer.import_sequence,
    "hand_over": transfer.hand_over,
}
