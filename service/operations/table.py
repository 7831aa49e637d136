"""The table of all operations: by name, and by the number that the road's frames carry."""

from __future__ import annotations

from typing import Final

from service.operations.attention import CASCADE, DECODE, PREFILL, RAGGED_PREFILL
from service.operations.events import EVENTS
from service.operations.internal import CLAIM, HAND_OVER
from service.operations.merge import MERGE
from service.operations.prefix import (
    CLEAR,
    COMMIT,
    COMMIT_SEQUENCES,
    EVICT,
    GET_NAMESPACE,
    HOLDS,
    LIST_NAMESPACES,
    MATCH,
    PIN,
    RELEASE_LEASE,
    RENEW_LEASE,
    SET_NAMESPACE,
    UNPIN,
)
from service.operations.rows import APPEND, GATHER
from service.operations.schema.spec import Operation
from service.operations.sequences import (
    CREATE_SEQUENCES,
    DELETE_SEQUENCE,
    DELETE_SEQUENCES,
    GET_SEQUENCE,
    LIST_SEQUENCES,
    PAGE_TABLE,
    TRUNCATE,
    TRUNCATE_SEQUENCES,
)
from service.operations.snapshot import SNAPSHOT
from service.operations.status import DRAIN_ENGINE, ENGINES, INFO, POOL
from service.operations.transfer import CANCEL_IMPORT, EXPORT, GET_IMPORT, IMPORT

OPERATIONS: Final[tuple[Operation, ...]] = (
    CREATE_SEQUENCES,
    LIST_SEQUENCES,
    GET_SEQUENCE,
    DELETE_SEQUENCE,
    TRUNCATE,
    PAGE_TABLE,
    APPEND,
    GATHER,
    DECODE,
    PREFILL,
    RAGGED_PREFILL,
    CASCADE,
    MERGE,
    INFO,
    POOL,
    MATCH,
    COMMIT,
    RENEW_LEASE,
    RELEASE_LEASE,
    PIN,
    UNPIN,
    EVICT,
    CLEAR,
    GET_NAMESPACE,
    SET_NAMESPACE,
    DELETE_SEQUENCES,
    EVENTS,
    EXPORT,
    IMPORT,
    GET_IMPORT,
    CANCEL_IMPORT,
    ENGINES,
    SNAPSHOT,
    CLAIM,
    HAND_OVER,
    DRAIN_ENGINE,
    LIST_NAMESPACES,
    HOLDS,
    TRUNCATE_SEQUENCES,
    COMMIT_SEQUENCES,
)
BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}
BY_NUMBER: Final = {operation.number: operation for operation in OPERATIONS}
