"""Opens the pool of records that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from config.sections import CacheSettings
from service.engine.records.pool import LAYOUT, RANK, RecordPool, key_of
from service.engine.store.ledger import Ledger
from service.engine.tiers.reports import MOST
from service.engine.tiers.setup import check_sizes
from service.metrics import Metrics
from service.tiers.record_store import RecordStore

STAGING_BYTES: Final = 2**28
"""Without a tier in host memory, records on their way to the disk take so much there."""
DIRECTORY: Final = "records"
"""Below the directory of pages."""


def open_records(
    ledger: Ledger, cache: CacheSettings, share: float, metrics: Metrics, wake: Callable[[], None]
) -> RecordPool | None:
    """The pool with its `share` of the tiers; None without any. Raises `StoreUnavailable`."""
    host_bytes, disk_bytes = int(share * cache.host_bytes), int(share * cache.disk_bytes)
    has_disk = cache.disk_path is not None
    if not share or not (host_bytes or has_disk):
        return None
    check_sizes(cache, LAYOUT.block_bytes)
    memory = host_bytes or STAGING_BYTES
    pool = RecordPool(memory, wake, metrics, ledger, share=share, keeps_host=bool(host_bytes))
    if cache.disk_path is not None:
        path = Path(cache.disk_path) / DIRECTORY
        disk = RecordStore(path, disk_bytes, LAYOUT, evicted=pool.disk.evicted)
        for entry in disk.pinned():  # jobs of an earlier start hold nothing
            disk.use(entry, RANK)
        for entry in disk.records()[-MOST:]:
            pool.misses.named(entry.namespace, *key_of(entry.key))
        pool.disk.open(disk)
    pool.report()
    return pool
