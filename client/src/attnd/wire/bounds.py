"""Bounds of a request: within them a processor reads and checks it in about 5 ms, at once."""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 256 * 2**10
"""Header of a request's image: room for 4,096 sequences with ids of 60 characters."""
MAX_VALUES: Final = 2**15
"""Commas in a header, which bound it too, for many short values."""
MAX_JSON_BYTES: Final = 512 * 2**10
"""Body of JSON, with tensors in it or without."""
MAX_JSON_VALUES: Final = 2**16
"""Commas in a body of JSON."""
MAX_TOUCHED_BYTES: Final = 16 * 2**20
"""Bytes of tensors that are checked (BOOL) or copied (unaligned) when a request is read."""
MAX_SEQUENCES: Final = 4096
"""Sequences that one call reads, or appends to."""
MAX_NEW: Final = 1024
"""Sequences that one call creates."""
MAX_DELETED: Final = 1024
"""Ids of sequences that one call deletes."""
MAX_BATCH: Final = 512
"""Sequences that one call truncates or commits: all or none of them, in one turn of the engine."""
MAX_NAMES: Final = 2**17
"""Token ids or page keys in a call."""
MAX_RECORDS: Final = 1024
"""Records in a call."""
MAX_KEPT: Final = 2**14
"""Tokens that one call moves up behind a cut."""
