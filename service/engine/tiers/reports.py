"""Reports of the tiers: pages and bytes that moved, events with their medium, gauges, misses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, Literal

from service.core.pool.named_pages import Removed, Stored
from service.engine.store.event_history import EventHistory
from service.engine.tiers.page_records import PageTag, names_in
from service.metrics import Metrics
from service.tiers.records import RecordLayout
from service.tiers.shelf import Entry

TierName = Literal["host", "disk"]
Way = Literal["in", "out"]
Medium = Literal["CPU", "DISK"]
Reason = Literal["never_stored", "evicted", "other_salt", "other_model"]
MOST: Final = 2**16
"""Pages that are remembered, of each kind; the oldest are forgotten."""


class Reports:
    """Belongs to the engine's thread. `history` receives events, where anybody reads them."""

    def __init__(self, layout: RecordLayout, metrics: Metrics) -> None:
        self.history: EventHistory | None = None
        self._layout, self._metrics = layout, metrics
        self._moved: dict[tuple[TierName, Way], tuple[int, float]] = {}
        """Pages moved to (in) and from (out) each tier, and their seconds."""
        self._latest: dict[tuple[TierName, Way], float] = {}

    def count(self, tier: TierName, way: Way, pages: int, began: float) -> None:
        """Count pages that moved between `began` and now; of moves at the same time, each moment
        counts once."""
        now = time.monotonic()
        seconds = now - max(began, self._latest.get((tier, way), 0.0))
        self._latest[tier, way] = now
        moved, spent = self._moved.get((tier, way), (0, 0.0))
        self._moved[tier, way] = moved + pages, spent + seconds
        self._metrics.add(pages, "tier_pages_moved", tier, way)
        self._metrics.add(pages * self._layout.payload_bytes, "tier_bytes_moved", tier, way)
        self._metrics.add(seconds, "tier_seconds", tier, way)

    def miss(self, reason: str) -> None:
        self._metrics.add(1, "tier_misses", reason)

    def set_gauges(self, num_records: dict[str, int], up: dict[str, bool]) -> None:
        for tier, number in num_records.items():
            self._metrics.set(number, "tier_records", tier)
            self._metrics.set(float(up[tier]), "tier_up", tier)

    def stored(self, entry: Entry, label: bytes, medium: Medium) -> None:
        if self.history is not None:
            self.history.hear(stored_event(entry, label, medium, self.history.page_size))

    def removed(self, entries: Iterable[Entry], medium: Medium) -> None:
        for entry in entries:
            if self.history is not None and entry.tag:
                key = PageTag.read(entry.tag).key
                self.history.hear(Removed(entry.namespace, key, medium))

    def describe(self, sizes: dict[TierName, int | None]) -> list[dict[str, Any]]:
        """Tiers and their bytes for `/v1/info`, without None."""
        return [
            {
                "name": name,
                "total_bytes": total,
                "page_bytes": self._layout.block_bytes,
                "store_s": self._page_s(name, "in"),
                "load_s": self._page_s(name, "out"),
            }
            for name, total in sizes.items()
            if total is not None
        ]

    def _page_s(self, tier: TierName, way: Way) -> float | None:
        pages, seconds = self._moved.get((tier, way), (0, 0.0))
        return seconds / pages if pages else None


def stored_event(entry: Entry, label: bytes, medium: Medium, page_size: int) -> Stored:
    """A page has a record of this label, or tag."""
    tag, (ids, extra) = PageTag.read(label), names_in(label, page_size)
    names = tag.key, tag.before, ids or None, medium
    return Stored(entry.namespace, *names, {0: extra} if extra else None)


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
