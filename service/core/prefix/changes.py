"""What became of cached pages, in records: the seam that events are made of.

Keys and ids are bytes of their own, one page's after another's: what they came in may be much
larger, and whoever hears of a change may keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Stored:
    """Pages can be found from now on: `keys` are theirs in the order of their prompt.

    `parent_key` is the key of the page before them (of the root, for a prompt's first pages).
    `token_ids`, uint32, where they are known.
    """

    namespace: str
    keys: bytes
    parent_key: bytes
    token_ids: bytes | None


@dataclass(slots=True, eq=False)
class Removed:
    """Pages cannot be found any more."""

    namespace: str
    keys: bytes


@dataclass(slots=True, eq=False)
class Cleared:
    """Nothing of the namespace can be found any more, but for what is held."""

    namespace: str


Change = Stored | Removed | Cleared
Listener = Callable[[Change], None]
"""Called in the midst of a change of the tree: it keeps what it is told, and looks at nothing."""
