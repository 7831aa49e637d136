"""Names of `attnd`, whose `__init__` loads this module, and adds the classes of `CLASSES_OF`."""

# ruff: noqa: I001
# Type checkers know names as exported by such aliases; sorting would split their lists.

from attnd.calls.attention import CascadeLevel as CascadeLevel, Options as Options
from attnd.calls.control import NewSequence as NewSequence
from attnd.calls.prefix import Prefix as Prefix
from attnd.client import AsyncClient as AsyncClient, Client as Client
from attnd.export_file import ExportFileError as ExportFileError
from attnd.export_file import InterruptedExport as InterruptedExport
from attnd.moving import ImportOptions as ImportOptions, copy_sequence as copy_sequence
from attnd.retries import Retries as Retries
from attnd.session import Session as Session
from attnd.wire.states import (
    AttentionState as AttentionState,
    LseBase as LseBase,
    empty_state as empty_state,
    merge_state as merge_state,
    merge_states as merge_states,
)
