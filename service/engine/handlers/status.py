"""What the service says of itself: what it serves, and the state of its pool."""

from __future__ import annotations

import logging
from typing import Any, Final

from service.core.errors import IntegrityError
from service.engine.loop.job import Answered, Cost, Seconds, Sliced, Steps, Work, in_slices
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.image.json_text import dump_json

LOG: Final = logging.getLogger("attnd.engine")
TEXT_BYTES: Final = 1024
"""Room for the numbers, and for the verdict of an integrity check."""
BROKEN: Final = "broken: the service's log has the numbers"


def info(store: Store, request: Request, _: Seconds) -> Work:
    text = dump_json(store.info.model_dump())
    request.place.require(2 * len(text))  # quotes are escaped in the header
    request.place.lay_text(text)
    return Answered()


def engines(store: Store, request: Request, _: Seconds) -> Work:
    """The whole pool's numbers of this moment."""
    numbers = store.numbers()
    told: dict[str, Any] = {
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
    told |= page_pace(store)
    if request.fields.counts:
        told["counts"] = store.counts()
    text = dump_json({"engines": [told]})
    request.place.require(TEXT_BYTES + 2 * len(text))
    request.place.lay_text(text)
    return Answered()


def page_pace(store: Store) -> dict[str, float]:
    """Seconds that pages of prompts take at all layers, by what work has taken so far."""
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
    """The caller's numbers of this moment, and the verdict of a check with others in between: of
    the whole pool for the scope `admin`, else of what the caller's namespace has."""
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
    held = store.tree.budget.namespaces.get(namespace)
    num_named = 0 if held is None else held.num_nodes

    def steps() -> Steps:
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

    return Sliced(steps(), lambda: None)
