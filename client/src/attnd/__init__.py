"""Client of attnd, attention and KV cache as a service: see `Client`, `AsyncClient`.

`merge_states` merges attention states here, with numpy, when they came from several services.
"""

from attnd.attention import CascadeLevel, Options
from attnd.client import AsyncClient, Client
from attnd.control import NewSequence
from attnd.errors import (
    AttndError,
    BodyTooLarge,
    ConnectionFailed,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    LengthMismatch,
    MalformedBody,
    MethodNotAllowed,
    NotFound,
    NotReady,
    OutOfPages,
    Overloaded,
    ProtocolError,
    ReplyLost,
    SequenceExists,
    ServiceError,
    TimedOut,
    TransportError,
    UnknownSequence,
    UnsupportedMediaType,
)
from attnd.exchange import Retries
from attnd.results import (
    AppendResult,
    AttentionResult,
    GatherResult,
    Health,
    Info,
    MergeResult,
    Meta,
    PageTable,
    PageTableLevel,
    Pool,
    SequenceInfo,
    SequencePage,
)
from attnd.states import AttentionState, LseBase, empty_state, merge_state, merge_states

__version__ = "0.1.0"

__all__ = [
    "AppendResult",
    "AsyncClient",
    "AttentionResult",
    "AttentionState",
    "AttndError",
    "BodyTooLarge",
    "CascadeLevel",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "GatherResult",
    "Health",
    "Info",
    "Internal",
    "InvalidRequest",
    "LengthMismatch",
    "LseBase",
    "MalformedBody",
    "MergeResult",
    "Meta",
    "MethodNotAllowed",
    "NewSequence",
    "NotFound",
    "NotReady",
    "Options",
    "OutOfPages",
    "Overloaded",
    "PageTable",
    "PageTableLevel",
    "Pool",
    "ProtocolError",
    "ReplyLost",
    "Retries",
    "SequenceExists",
    "SequenceInfo",
    "SequencePage",
    "ServiceError",
    "TimedOut",
    "TransportError",
    "UnknownSequence",
    "UnsupportedMediaType",
    "__version__",
    "empty_state",
    "merge_state",
    "merge_states",
]
