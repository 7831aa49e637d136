"""The state of the service: its description, its pool, namespaces, snapshots and events."""

from __future__ import annotations

import logging
from typing import Any, Final

from service.core.errors import IntegrityError
from service.engine.loop.job import Completed, Cost, Seconds, SlicedWork, Slices, Work, in_slices
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.image.json_text import dump_json
from service.operations.schema.fields import refuse

LOG: Final = logging.getLogger("attnd.engine")
TEXT_BYTES: Final = 1024
"""Room for the numbers, and for the verdict of an integrity check."""
NO_SNAPSHOTS: Final = "the service takes no snapshots: set it to true"
NO_EVENTS: Final = "the service keeps no events: set it to the number of pages to keep events of"
BROKEN: Final = "broken: the service's log has the numbers"


def info(store: Store, request: Request, _: Seconds) -> Work:
    text = dump_json(store.info.model_dump())
    request.place.require(2 * len(text))  # quotes are escaped in the header
    request.place.lay_text(text)
    return Completed()


def engines(store: Store, request: Request, _: Seconds) -> Work:
    """The whole pool's numbers of this moment."""
    numbers = store.numbers()
    fields: dict[str, Any] = {
        "name": "engine",
        "instance_id": store.info.instance_id,
        "free": numbers.free,
        "referenced": numbers.referenced,
        "cached": numbers.cached,
        "pinned": numbers.pinned,
        "sequences": numbers.sequences,
        "leases": numbers.leases,
        "imports": numbers.imports,
        "draining": store.is_draining,
    }
    fields |= page_pace(store)
    if request.fields.counts:
        fields["counts"] = store.counts()
    text = dump_json({"engines": [fields]})
    request.place.require(TEXT_BYTES + 2 * len(text))
    request.place.lay_text(text)
    return Completed()


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
    numbers = store.numbers(namespace)
    fields = {
        "free": numbers.free,
        "referenced": numbers.referenced,
        "cached": numbers.cached,
        "pinned": numbers.pinned,
        "total": numbers.free + numbers.referenced + numbers.cached + numbers.pinned,
        "available": numbers.available,
        "leases": numbers.leases,
        "sequences": numbers.sequences,
        "imports": numbers.imports,
    }
    num_named = store.tree.budget.look(namespace).num_nodes

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
    taken = store.snapshots.newest()
    request.place.require(2 * len(taken.text), taken.shapes)  # quotes are escaped in the header
    laid = request.place.lay_text(taken.text, taken.shapes)
    for name, array in taken.arrays.items():
        laid[name][...] = array
    return Completed()


def events(store: Store, request: Request, _: Seconds) -> Work:
    """A page of the namespace's history."""
    history, fields = store.history, request.fields
    if not history.is_kept:
        refuse("cache.events_history", 0, NO_EVENTS)
    found, following, too_old = history.page(request.tenant.namespace, fields.after, fields.limit)
    text = dump_json({"events": found, "next": following, "too_old": too_old})
    request.place.require(2 * len(text))  # quotes are escaped in the header
    request.place.lay_text(text)
    return Completed()


def get_namespace(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(TEXT_BYTES)
    request.place.lay(namespace_fields(store, request.fields.name))
    return Completed()


def namespace_fields(store: Store, name: str) -> dict[str, Any]:
    """A namespace's quota and use; an unknown namespace has none."""
    held = store.tree.budget.look(name)
    return {
        "name": name,
        "max_pages": held.max_pages,
        "reserved_pages": held.reserved_pages,
        "used": held.used,
        "referenced": held.referenced,
        "cached": held.cached,
        "pinned": held.pinned,
        "leases": held.num_leases,
        "sequences": held.num_sequences - store.imports.count(name),
    }


def list_namespaces(store: Store, request: Request, _: Seconds) -> Work:
    every = store.tree.budget.namespaces.values()
    names = sorted(one.name for one in every if one.used or one.num_sequences)
    request.place.require(TEXT_BYTES + sum(len(name) + 3 for name in names))
    request.place.lay({"namespaces": names})
    return Completed()


def set_namespace(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    request.place.require(TEXT_BYTES)
    store.tree.budget.set_quota(fields.name, fields.max_pages, fields.reserved_pages)
    request.place.lay(namespace_fields(store, fields.name))
    return Completed()
