"""The state of the service: its description, drain, pool, namespaces, snapshots and events."""

from __future__ import annotations

import logging
from typing import Any, Final

from service.core.errors import IntegrityError
from service.engine.store.event_history import Page
from service.engine.store.store import Store
from service.engine.tiers.setup import QUOTA, keep_quota
from service.engine.work.request import Request
from service.engine.work.work import (
    Completed,
    Cost,
    Fields,
    Seconds,
    SlicedWork,
    Slices,
    Work,
    in_slices,
)
from service.operations.schema.fields import refuse
from service.operations.status import ENGINE_NAME, UNKNOWN_ENGINE

LOG: Final = logging.getLogger("attnd.engine")
TEXT_BYTES: Final = 1024
"""Room for the numbers, and for the verdict of an integrity check."""
NO_SNAPSHOTS: Final = "the service takes no snapshots: set it to true"
NO_EVENTS: Final = "the service keeps no events: set it to the number of pages to keep events of"
NO_TIERS: Final = "the service has the pool alone: set cache.host_bytes or cache.disk_path first"
NO_DISK: Final = "the service has no disk tier: set cache.disk_path first"
BROKEN: Final = "broken: the service's log has the numbers"


def info(store: Store, request: Request, _: Seconds) -> Fields:
    fields = store.info.model_dump()
    if store.loading is not None:
        fields["tiers"] = store.loading.tiers.describe()
    if store.records is not None:
        fields["records"] = store.records.describe()
    return fields


def engines(store: Store, request: Request, _: Seconds) -> Fields:
    """The whole pool's numbers of this moment."""
    numbers = store.numbers()
    del numbers["available"]
    fields: dict[str, Any] = {
        "name": ENGINE_NAME,
        "instance_id": store.info.instance_id,
        "draining": store.is_draining,
    }
    fields |= numbers | page_pace(store)
    if request.fields.counts:
        fields["counts"] = store.counts()
    return {"engines": [fields]}


def drain_engine(store: Store, request: Request, _: Seconds) -> Fields:
    if request.fields.name != ENGINE_NAME:
        refuse("name", request.fields.name, UNKNOWN_ENGINE)
    store.is_draining = not request.fields.stop
    state = {"name": request.fields.name, "draining": store.is_draining}
    return state | {"sequences": store.numbers()["sequences"]}


def page_pace(store: Store) -> dict[str, float]:
    """Estimated seconds for pages of prompts at all layers, by the measured pace."""
    geometry, pace = store.geometry, store.pace
    page_bytes, layers = float(geometry.page_bytes), geometry.num_layers
    pair = Cost(flops=4.0 * store.num_qo_heads * geometry.head_dim * geometry.page_size**2)
    written_s = pace.seconds("append", Cost(num_bytes=2 * page_bytes))
    return {
        "page_s": layers * written_s,
        "pair_s": layers * pace.seconds("attend", pair),
        "read_s": layers * pace.seconds("attend", Cost(num_bytes=page_bytes)),
    }


def pool(store: Store, request: Request, _: Seconds) -> Work:
    """The namespace's numbers of this moment, and the verdict of an integrity check in slices: of
    the whole pool for the scope `admin`, else of the caller's namespace."""
    request.place.require(TEXT_BYTES)
    namespace = request.tenant.namespace
    fields: dict[str, Any] = dict(store.numbers(namespace))
    fields["total"] = sum(fields[name] for name in ("free", "referenced", "cached", "pinned"))
    own = store.tree.budget.look(namespace)
    fields["reserved"] = own.reserved
    fields["available_tokens"] = store.tree.tokens_in(fields["available"])
    fields |= limits_of(store, namespace) | store.shares
    num_named = own.num_nodes

    def slices() -> Slices:
        sharing = yield from in_slices(store.tree.sharing_steps(namespace))
        look = {"nodes": num_named + sharing.num_unnamed, "sharing_ratio": sharing.ratio}
        integrity = "ok"
        whole = "admin" in request.tenant.scopes
        try:
            yield from in_slices(store.tree.integrity_steps(None if whole else namespace))
        except IntegrityError as error:
            LOG.error("the integrity check of the pool: %s", error)
            integrity = BROKEN
        request.place.lay(fields | look | {"integrity": integrity})

    return SlicedWork(slices())


def snapshot(store: Store, request: Request, _: Seconds) -> Work:
    if store.snapshots is None:
        refuse("server.live", False, NO_SNAPSHOTS)
    taken = store.snapshots.newest(store.now)
    request.place.require(2 * len(taken.text), taken.shapes)  # quotes are escaped in the header
    laid = request.place.lay_text(taken.text, taken.shapes)
    for name, array in taken.arrays.items():
        laid[name][...] = array
    return Completed()


def events(store: Store, request: Request, _: Seconds) -> Work | Fields:
    history, fields = store.history, request.fields
    if not history.is_kept:
        refuse("cache.events_history", 0, NO_EVENTS)
    reading = history.read(request.tenant.namespace, fields.after, fields.limit)
    try:
        next(reading)
    except StopIteration as end:  # all of them are kept
        return events_fields(end.value)

    def slices() -> Slices:
        request.place.lay(events_fields((yield from in_slices(reading))))

    return SlicedWork(slices())


def events_fields(page: Page) -> Fields:
    events, following, too_old = page
    return {"events": events, "next": following, "too_old": too_old}


def get_namespace(store: Store, request: Request, _: Seconds) -> Fields:
    return namespace_fields(store, request.fields.name)


def namespace_fields(store: Store, name: str) -> dict[str, Any]:
    """A namespace's quota and use; an unknown namespace has none."""
    held = store.tree.budget.look(name)
    return (
        {
            "name": name,
            "used": held.used,
            "sequences": held.num_sequences - store.imports.count(name) - store.num_hidden(name),
        }
        | held.held
        | limits_of(store, name)
    )


def limits_of(store: Store, name: str) -> dict[str, int | None]:
    """A namespace's quota, in all tiers."""
    held, lower = store.tree.budget.look(name), store.lower
    quota = {"max_pages": held.max_pages, "reserved_pages": held.reserved_pages}
    return quota | (lower[0].limits_of(name) if lower else {})


def list_namespaces(store: Store, request: Request, _: Seconds) -> Fields:
    every = store.tree.budget.namespaces.values()
    names = {one.name for one in every if one.used or one.num_sequences}
    if store.records is not None:
        names |= store.records.namespaces
    return {"namespaces": sorted(names)}


def set_namespace(store: Store, request: Request, _: Seconds) -> Fields:
    fields, lower = request.fields, store.lower
    limits = fields.max_host_bytes, fields.max_disk_bytes
    if not lower:
        if limits != (None, None):
            name = "max_disk_bytes" if limits[0] is None else "max_host_bytes"
            refuse(name, getattr(fields, name), NO_TIERS)
    elif limits[1] is not None and lower[0].disk.total_bytes is None:
        refuse("max_disk_bytes", limits[1], NO_DISK)
    else:
        lower[0].disk.refuse_note(request.tenant.namespace, QUOTA + fields.name)
    store.tree.budget.set_quota(fields.name, fields.max_pages, fields.reserved_pages)
    for one in lower:
        one.set_limits(fields.name, *limits)
    keep_quota(store, request.tenant.namespace, fields.name)
    return namespace_fields(store, fields.name)
