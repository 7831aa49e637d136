"""What operations on the prefix cache do with the tiers below the pool, where there are any."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from service.core.keys import Prefix
from service.engine.store.store import Store
from service.engine.tiers.loads import ALL_TIERS, LoadLimits, Origin, waiting
from service.engine.work.request import Request
from service.engine.work.work import Completed, Counts, SlicedWork, Slices, Work
from service.operations.schema.page_names import SoughtPages

RESERVE: Final = 0.1
"""Share of the time until an operation's deadline that is left for all but its loads."""


def limits_of(store: Store, fields: SoughtPages) -> LoadLimits:
    tiers = ALL_TIERS if fields.tiers is None else frozenset(fields.tiers)
    return LoadLimits(tiers, fields.max_load_pages, end_of_waits(store))


def end_of_waits(store: Store) -> float:
    """When the operation whose turn it is must go on, by `time.monotonic()`."""
    now = time.monotonic()
    return now + (1.0 - RESERVE) * (store.deadline - now)


def after_loading(
    store: Store,
    request: Request,
    prefix: Prefix,
    finish: Callable[[Origin | None], Counts],
    *,
    loads: bool,
    most: int | None = None,
) -> Work:
    """Load what lower tiers have of `prefix`, `most` pages of it (None: all), or with `loads` False
    find it there; then `finish`, which gets the origin of the pages, or None where lower tiers have
    none of them."""
    loading, namespace = store.loading, request.tenant.namespace
    if loading is None:
        return Completed(counts=finish(None))
    limits = limits_of(store, request.fields)
    if most is not None:
        given = limits.max_pages
        limits = replace(limits, max_pages=most if given is None else min(given, most))
    if not loading.lookup.has_more(namespace, prefix, limits):
        return Completed(counts=finish(None))

    def slices() -> Slices:
        how = loading.load if loads else loading.lookup.origin
        origin = yield from how(namespace, prefix, limits)
        loading.count(namespace, finish(origin))

    return SlicedWork(slices())


def cached_by_tier(store: Store, num_pages: int, origin: Origin | None) -> dict[str, Any]:
    """The field `cached` for `num_pages` found pages, on an engine with tiers."""
    if store.loading is None:
        return {}
    below, size = origin or Origin(), store.geometry.page_size
    pages = {"host": below["host"], "disk": below["disk"]}
    pages["pool"] = max(0, num_pages - sum(pages.values()))
    return {"cached": {tier: size * number for tier, number in pages.items()}}


def until_durable(
    store: Store,
    namespace: str,
    names: Sequence[str],
    pages: Sequence[int],
    lay: Callable[[bool | None], None],
) -> Work:
    """`lay` the answer to a commit of the first `pages[i]` pages of each sequence: at once, or when
    they are on disk, where commits are written there."""
    loading = store.loading
    if loading is None or not loading.tiers.writes_commits:
        lay(None)
        return Completed()
    books, tiers = store.tree.books, loading.tiers
    tables = [books.leaf(name).table.read(0, num) for name, num in zip(names, pages, strict=True)]
    numbers = np.concatenate(tables)
    ids = tiers.paths.ids_of(numbers)
    ends = end_of_waits(store)
    if tiers.request_copies(namespace, ids, numbers.tolist()):
        lay(True)
        return Completed()

    def slices() -> Slices:
        left = ids.copy()
        while left and time.monotonic() < ends:
            yield waiting()
            while left and not tiers.copier.is_pending(namespace, left[-1]):
                left.pop()
        lay(None not in map(tiers.disk.find, ids))

    return SlicedWork(slices(), must_finish=lambda: True)
