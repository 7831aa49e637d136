"""What an engine does when it is emptied: it takes nothing new, and hands sequences over."""

from __future__ import annotations

from service.core.errors import InvalidRequest
from service.core.sequences.transfer import generation
from service.engine.loop.job import Completed, Seconds, Work
from service.engine.loop.request import Request
from service.engine.store.move_marks import Mark
from service.engine.store.store import Store
from service.errors import NotReady, SequenceChanged, SequenceMoving

EMPTIED = "this engine is being emptied: it takes no new sequences"


def drain_engine(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(256)
    store.is_draining = not request.fields.stop
    numbers = store.numbers()
    told = {"name": request.fields.name, "draining": store.is_draining}
    request.place.lay(told | {"sequences": numbers.sequences})
    return Completed()


def refuse_new(store: Store) -> None:
    """Raises NotReady while the engine takes no new sequences."""
    if store.is_draining:
        raise NotReady(EMPTIED)


def hand_over(store: Store, request: Request, _: Seconds) -> Work:
    fields, leaving, tree = request.fields, store.move_marks, store.tree
    request.place.require(0)
    name, mark = fields.id, leaving.marks.get(fields.id)
    shown = request.tenant.shown(name)
    if fields.state == "leaving":
        if mark is not None:
            raise SequenceMoving([shown], [shown] if mark.is_handed else [])
        tree.books.leaf(name)
        leaving.put(name, Mark(fields.for_s))
    elif mark is None:
        tree.books.leaf(name)  # an unknown sequence is refused as such, whatever the state
        raise InvalidRequest("state", fields.state, "it is not leaving, or has not for too long")
    elif fields.generation is not None:
        present = generation(tree, tree.books.leaf(name), store.info.instance_id)
        if fields.generation != present:
            raise SequenceChanged(shown, present)
        leaving.put(name, Mark(fields.for_s, is_handed=True))
    else:
        mark.is_handed = fields.state == "gone"
        leaving.end(name)
    request.place.lay({})
    return Completed()
