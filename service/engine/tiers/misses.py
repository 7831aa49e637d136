"""Why a page of a prefix is in no tier, for the metrics."""

from __future__ import annotations

from typing import Final, Literal

MOST: Final = 2**16
"""Pages that are remembered, of each kind; the oldest are forgotten."""
Reason = Literal["never_stored", "evicted", "other_salt", "other_model"]


class Misses:
    """Remembers pages that every tier gave up, and the salts of first pages."""

    def __init__(self) -> None:
        self._removed: dict[bytes, None] = {}
        self._roots: dict[tuple[str, bytes], bytes] = {}

    def removed(self, record_id: bytes) -> None:
        """A page left its last tier."""
        self._removed[record_id] = None
        if len(self._removed) > MOST:
            del self._removed[next(iter(self._removed))]

    def named(self, namespace: str, first: bytes, root: bytes) -> None:
        """A prompt's first page, its token ids or key, was committed below a root."""
        self._roots[namespace, first] = root
        if len(self._roots) > MOST:
            del self._roots[next(iter(self._roots))]

    def forget(self, namespace: str) -> None:
        """The namespace was cleared."""
        for one in [one for one in self._roots if one[0] == namespace]:
            del self._roots[one]

    def reason(
        self, record_id: bytes, is_foreign: bool, namespace: str, first: bytes, root: bytes
    ) -> Reason:
        """Why a page is a miss; `first` is empty unless it is its prompt's first page."""
        if is_foreign:
            return "other_model"
        if record_id in self._removed:
            return "evicted"
        is_salted = self._roots.get((namespace, first), root) != root
        return "other_salt" if first and is_salted else "never_stored"
