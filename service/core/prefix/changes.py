"""Records of changes to cached pages, from which the engine makes events.

Keys and token ids are concatenated bytes of their own, so a listener can keep them without keeping
the larger buffers they came in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Stored:
    """Pages were stored: `keys` in the order of their prompt.

    `parent_key` is the key of the page before them (the root's, for a prompt's first pages).
    `token_ids` are uint32, None where unknown.
    """

    namespace: str
    keys: bytes
    parent_key: bytes
    token_ids: bytes | None


@dataclass(slots=True, eq=False)
class Removed:
    """Pages were evicted."""

    namespace: str
    keys: bytes


@dataclass(slots=True, eq=False)
class Cleared:
    """All pages of the namespace that nothing holds were evicted."""

    namespace: str


Change = Stored | Removed | Cleared
Listener = Callable[[Change], None]
"""Called during a change of the tree: it may keep the record and must not read the tree."""
