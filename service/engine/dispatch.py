"""`handle`: finds the handler of a request and calls it."""

from __future__ import annotations

from service.engine.handlers.table import HANDLERS
from service.engine.loop.job import Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.store import Store


def handle(store: Store, request: Request, seconds: Seconds) -> Work:
    """Call a request's handler.

    On an engine that has held shards, and for requests with a field for shards, that is the one in
    `handlers/shards`. It passes requests for whole sequences on to the plain handler.
    """
    name = request.operation.name
    if not (store.has_shards or request.is_for_shards):
        return HANDLERS[name].begin(store, request, seconds)
    from service.engine.handlers.shards.table import SHARD_HANDLERS

    return SHARD_HANDLERS.get(name, HANDLERS[name].begin)(store, request, seconds)
