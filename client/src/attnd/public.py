"""The names of `attnd`; its `__init__` loads this module at the first use of one of them."""

# ruff: noqa: I001
# Type checkers know names as exported by such aliases; sorting would split their lists.

from attnd.calls.attention import CascadeLevel as CascadeLevel, Options as Options
from attnd.calls.control import NewSequence as NewSequence
from attnd.calls.prefix import Prefix as Prefix
from attnd.calls.transfer import (
    ExportHeader as ExportHeader,
    ExportPart as ExportPart,
    ImportState as ImportState,
)
from attnd.client import AsyncClient as AsyncClient, Client as Client
from attnd.errors import (
    AnswerTooLarge as AnswerTooLarge,
    ArenaFull as ArenaFull,
    AttndError as AttndError,
    BodyTooLarge as BodyTooLarge,
    Cancelled as Cancelled,
    ConnectionFailed as ConnectionFailed,
    DeadlineExceeded as DeadlineExceeded,
    DigestMismatch as DigestMismatch,
    Forbidden as Forbidden,
    HeadersTooLarge as HeadersTooLarge,
    ImportExists as ImportExists,
    Internal as Internal,
    InvalidRequest as InvalidRequest,
    KeyMismatch as KeyMismatch,
    LengthMismatch as LengthMismatch,
    LostSequence as LostSequence,
    MalformedBody as MalformedBody,
    MalformedRequest as MalformedRequest,
    MethodNotAllowed as MethodNotAllowed,
    NeverReady as NeverReady,
    NotFound as NotFound,
    NotReady as NotReady,
    NotSupported as NotSupported,
    OutOfPages as OutOfPages,
    OutOfSequences as OutOfSequences,
    Overloaded as Overloaded,
    PartMismatch as PartMismatch,
    ProtocolError as ProtocolError,
    ReplyLost as ReplyLost,
    RequestTimeout as RequestTimeout,
    SequenceChanged as SequenceChanged,
    SequenceExists as SequenceExists,
    SequenceMoving as SequenceMoving,
    SequenceTaken as SequenceTaken,
    ServiceError as ServiceError,
    TimedOut as TimedOut,
    TransportError as TransportError,
    Unauthorized as Unauthorized,
    UnknownImport as UnknownImport,
    UnknownLease as UnknownLease,
    UnknownPage as UnknownPage,
    UnknownSequence as UnknownSequence,
    UnsupportedMediaType as UnsupportedMediaType,
)
from attnd.export_file import (
    ExportFileError as ExportFileError,
    InterruptedExport as InterruptedExport,
)
from attnd.moving import ImportOptions as ImportOptions, copy_sequence as copy_sequence
from attnd.results import (
    AppendResult as AppendResult,
    AttentionResult as AttentionResult,
    CacheEvent as CacheEvent,
    CommitResult as CommitResult,
    EngineInfo as EngineInfo,
    EnginePages as EnginePages,
    EventPage as EventPage,
    GatherResult as GatherResult,
    Health as Health,
    Hold as Hold,
    Info as Info,
    Lease as Lease,
    MergeResult as MergeResult,
    Meta as Meta,
    Namespace as Namespace,
    PageTable as PageTable,
    PageTableLevel as PageTableLevel,
    Pool as Pool,
    PrefixMatch as PrefixMatch,
    SequenceInfo as SequenceInfo,
    SequencePage as SequencePage,
    Snapshot as Snapshot,
    SnapshotTree as SnapshotTree,
)
from attnd.retries import Retries as Retries
from attnd.session import Session as Session
from attnd.wire.states import (
    AttentionState as AttentionState,
    LseBase as LseBase,
    empty_state as empty_state,
    merge_state as merge_state,
    merge_states as merge_states,
)
