"""Opens the tiers that the settings ask for."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from config.sections import CacheSettings
from kernels.memory import free_bytes
from service.core.errors import CoreError
from service.engine.store.store import Store
from service.engine.tiers.loading import Loading
from service.engine.tiers.page_records import layout_of
from service.engine.tiers.tiers import Tiers
from service.metrics import Metrics
from service.tiers.files import sizes_of
from service.tiers.record_store import RecordStore, StoreUnavailable

LOG: Final = logging.getLogger("attnd.tiers")
STAGING_BYTES: Final = 64 * 2**20
LEAST_STAGING: Final = 16
"""Without a tier in host memory, pages on their way to the disk take `STAGING_BYTES` there, and
the bytes of `LEAST_STAGING` pages at least."""
MOST_HOST: Final = 0.9
"""Maximum share of the free memory for records: they are never swapped out where a device reads
them."""
QUOTA: Final = "quota/"
"""Notes of quotas begin so, followed by the namespace."""


def open_tiers(
    store: Store, cache: CacheSettings, metrics: Metrics, wake: Callable[[], None]
) -> Loading | None:
    """The tiers of a store, or None without any. Raises `StoreUnavailable`."""
    if not cache.host_bytes and cache.disk_path is None:
        return None
    layout = layout_of(store.geometry, cache.model or "")
    host_slots = cache.host_bytes // layout.block_bytes
    if not cache.host_bytes:
        host_slots = max(LEAST_STAGING, STAGING_BYTES // layout.block_bytes)
    check_sizes(cache, layout.block_bytes)
    tiers = Tiers(
        store.tree,
        store.backend.page_copies,
        layout,
        host_slots,
        wake,
        metrics,
        keeps_host=bool(cache.host_bytes),
        ledger=store.ledger,
    )
    tiers.writes_commits = cache.write == "commit"
    if store.history.is_kept:
        tiers.reports.history = store.history
        store.history.inventories.append(tiers.inventory)
    if cache.disk_path is not None:
        path = Path(cache.disk_path)
        disk = RecordStore(path, cache.disk_bytes, layout, evicted=tiers.disk.evicted)
        tiers.disk.open(disk)
        store.history.begins_empty = not disk.count()
    return Loading(tiers, wake)


def check_sizes(cache: CacheSettings, block_bytes: int) -> None:
    """Raises `StoreUnavailable` for host memory without a page, or more than the machine has."""
    if 0 < cache.host_bytes < block_bytes:
        reason = f"one page with its header takes {block_bytes}: raise it"
        raise StoreUnavailable(f"cache.host_bytes = {cache.host_bytes}: {reason}")
    most = int(MOST_HOST * (free := free_bytes("cpu")))
    if cache.host_bytes > most:
        reason = f"at most {most} of the machine's {free} free bytes: lower it"
        raise StoreUnavailable(f"cache.host_bytes = {cache.host_bytes}: {reason}")
    if cache.disk_path is not None:
        path = Path(cache.disk_path)
        try:
            above = next((one for one in (path, *path.parents) if one.is_dir()), Path("/"))
            free = shutil.disk_usage(above).free + sizes_of(path)
        except (OSError, ValueError) as error:
            reason = f"{getattr(error, 'strerror', error)}: name another path"
            raise StoreUnavailable(f"cache.disk_path = {path}: {reason}") from error
        if cache.disk_bytes > free:
            reason = f"{free} are free at {path}: lower it, or name another path"
            raise StoreUnavailable(f"cache.disk_bytes = {cache.disk_bytes}: {reason}")


def restore_quotas(store: Store) -> None:
    """Set the quotas that were kept for this start."""
    disk = next((one.disk.store for one in store.lower if one.disk.store is not None), None)
    for name, value in {} if disk is None else disk.notes().items():
        if name.startswith(QUOTA):
            namespace, quota = name.removeprefix(QUOTA), json.loads(value)
            for one in store.lower:
                one.set_limits(namespace, quota["max_host_bytes"], quota["max_disk_bytes"])
            try:
                numbers = quota["max_pages"], quota["reserved_pages"]
                store.tree.budget.set_quota(namespace, *numbers)
            except CoreError as error:
                LOG.warning("the quota of namespace %s does not fit the pool: %s", namespace, error)


def keep_quota(store: Store, caller: str, namespace: str) -> None:
    """Keep a namespace's quotas for the next start; the note counts for the caller's."""
    if not (lower := store.lower):
        return
    held = store.tree.budget.look(namespace)
    quota = {"max_pages": held.max_pages, "reserved_pages": held.reserved_pages}
    quota |= lower[0].limits_of(namespace)
    value = json.dumps(quota) if any(quota.values()) else None
    lower[0].disk.note(caller, QUOTA + namespace, value)
