"""Reports of the tiers: pages and bytes that moved, events with their medium, gauges."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

from service.core.prefix.named_pages import Removed, Stored
from service.engine.store.event_history import EventHistory
from service.engine.tiers.page_records import TAG, PageTag
from service.metrics import Metrics
from service.tiers.records import RecordLayout
from service.tiers.shelf import Entry

TierName = Literal["host", "disk"]
Way = Literal["in", "out"]
Medium = Literal["CPU", "DISK"]


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
        """A page has a record of this label, or tag."""
        if self.history is not None:
            tag, ids = PageTag.read(label), label[TAG.size :] or None
            self.history.hear(Stored(entry.namespace, tag.key, tag.before, ids, medium))

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
