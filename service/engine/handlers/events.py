"""The operation `events`: a page of the namespace's history."""

from __future__ import annotations

from service.engine.loop.job import Answered, Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.store import Store
from service.image.json_text import dump_json
from service.operations.schema.fields import refuse

NOT_KEPT = "the service keeps no events: set it to how many pages they may tell of"


def events(store: Store, request: Request, _: Seconds) -> Work:
    history, fields = store.history, request.fields
    if not history.is_kept:
        refuse("cache.events_history", 0, NOT_KEPT)
    told, following, too_old = history.page(request.tenant.namespace, fields.after, fields.limit)
    text = dump_json({"events": told, "next": following, "too_old": too_old})
    request.place.require(2 * len(text))  # quotes are escaped in the header
    request.place.lay_text(text)
    return Answered()
