"""What handles each operation on an engine that holds shards, where that is not the plain handler.

Every handler here passes requests that name no shard on to the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from service.engine.handlers.shards import batch, sequences, transfer
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
