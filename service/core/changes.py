"""What became of cached pages, in records: the seam that events are made of."""

from __future__ import annotations

from dataclasses import dataclass

from service.core.keys import Keys, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Pages can be found from now on: `keys` uint64 [n, 2], in the order of their prompt.

    `parent_key` is the key of the page before them (of the root, for a prompt's first pages).
    `token_ids` uint32 [n * page_size] where they are known.
    """

    namespace: str
    keys: Keys
    parent_key: bytes
    token_ids: TokenIds | None


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """Pages cannot be found any more."""

    namespace: str
    keys: Keys


@dataclass(frozen=True, slots=True, eq=False)
class Cleared:
    """Nothing of the namespace can be found any more, but for what is held."""

    namespace: str


Change = Stored | Removed | Cleared


class Changes:
    """Collects records from one drain to the next, once somebody listens."""

    __slots__ = ("_records", "listened")

    def __init__(self) -> None:
        self._records: list[Change] = []
        self.listened = False

    def add(self, change: Change) -> None:
        if self.listened:
            self._records.append(change)

    def drain(self) -> list[Change]:
        """What has changed since the last time, in order."""
        records, self._records = self._records, []
        return records
