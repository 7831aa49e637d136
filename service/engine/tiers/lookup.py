"""Where the pages of a prefix are: in the pool, in lower tiers, or on their way between them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from service.core.keys import Prefix, root_key
from service.engine.tiers.loads import Found, Load, LoadLimits, Origin, Record, Steps
from service.engine.tiers.page_records import next_id
from service.engine.tiers.tiers import Tiers
from service.engine.work.work import in_slices

LOOKED_UP: Final = 16
"""Pages looked up in a step: they are loaded while others are looked up."""


class Lookup:
    """Finds pages for the engine's thread. `loads`: loads under way, by the identity of a page."""

    def __init__(self, tiers: Tiers, loads: Mapping[bytes, Load]) -> None:
        self.tiers, self._loads = tiers, loads
        self._tree = tiers.tree

    def has_more(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> bool:
        """Whether a lower tier has the page that the pool lacks first."""
        if limits.max_pages == 0:
            return False
        found = Found()
        next(self.find(namespace, prefix, replace(limits, max_pages=1), found), None)
        self.count_miss(namespace, prefix, found)
        return bool(found.records) or found.loading is not None

    def origin(self, namespace: str, prefix: Prefix, limits: LoadLimits) -> Steps:
        """Where the pages of a prefix are; loads nothing."""
        found = Found()
        yield from in_slices(self.find(namespace, prefix, limits, found))
        self.count_miss(namespace, prefix, found)
        origin = Origin(record.tier for record in found.records)
        origin["pool"] = found.num_cached
        return origin

    def find(
        self, namespace: str, prefix: Prefix, limits: LoadLimits, found: Found
    ) -> Generator[None, None, None]:
        """Fill `found`, some pages a step."""
        tree, names = self._tree, self._tree.cache.named
        match = tree.cache.match(namespace, prefix)
        found.num_cached = match.num_pages
        key = record_id = root_key(namespace, prefix.cache_salt)
        if match.node is not None:
            page = match.node.pages.item(match.num_pages - 1 - match.node.start)
            key, record_id = names.key_of(page), self.tiers.paths.id_of(page)
        stop = prefix.num_pages(names.page_size)
        if limits.max_pages is not None:
            stop = min(stop, match.num_pages + limits.max_pages)
        if match.is_cut:
            return
        keys = prefix.chain(key, names.page_size, match.num_pages)
        for key in islice(keys, max(0, stop - match.num_pages)):
            record_id = next_id(record_id, key)
            found.loading = record_id if record_id in self._loads else None
            if found.loading is not None:
                return
            record = self._record(record_id, key, limits)
            if record is None or (prefix.token_ids is not None and not record.keep[1]):
                found.missing = record_id
                return
            found.records.append(record)
            if not len(found.records) % LOOKED_UP:
                yield

    def _record(self, record_id: bytes, key: bytes, limits: LoadLimits) -> Record | None:
        tiers = self.tiers
        if "host" in limits.tiers and (entry := tiers.host.find(record_id)) is not None:
            return Record(record_id, key, entry, "host")
        if "disk" in limits.tiers and (entry := tiers.disk.find(record_id)) is not None:
            return Record(record_id, key, entry, "disk")
        return None

    def count_miss(self, namespace: str, prefix: Prefix, found: Found) -> None:
        """Count the page at which a prefix ends in all tiers, unless a tier that the request leaves
        out has it."""
        tiers, first = self.tiers, b""
        missing = found.missing
        if missing is None or tiers.host.find(missing) or tiers.disk.find(missing):
            return
        if not found.num_cached and not found.records:
            ids = prefix.ids_of(0, 1, self._tree.page_size)
            first = prefix.key_at(0, b"", 0) if ids is None else ids.tobytes()
        is_foreign = tiers.disk.store is not None and missing in tiers.disk.store.foreign
        root = root_key(namespace, prefix.cache_salt)
        why = tiers.misses.reason(missing, is_foreign, namespace, first, root)
        tiers.reports.miss(why)
