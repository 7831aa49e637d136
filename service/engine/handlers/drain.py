"""Draining an engine: it accepts no new sequences, and transfers ownership of its own."""

from __future__ import annotations

from service.core.errors import InvalidRequest
from service.core.sequences.transfer import generation
from service.engine.loop.job import Fields, Seconds
from service.engine.loop.request import Request
from service.engine.store.moves import Mark
from service.engine.store.store import Store
from service.errors import NotReady, SequenceChanged, SequenceMoving, UnknownImport
from service.operations.status import ENGINE_NAME, UNKNOWN_ENGINE

DRAINING = "engine is draining and accepts no new sequences"


def drain_engine(store: Store, request: Request, _: Seconds) -> Fields:
    if request.fields.name != ENGINE_NAME:
        raise InvalidRequest("name", request.fields.name, UNKNOWN_ENGINE)
    store.is_draining = not request.fields.stop
    state = {"name": request.fields.name, "draining": store.is_draining}
    return state | {"sequences": store.numbers()["sequences"]}


def refuse_new(store: Store) -> None:
    """Raises NotReady while the engine is draining."""
    if store.is_draining:
        raise NotReady(DRAINING)


def hand_over(store: Store, request: Request, _: Seconds) -> Fields:
    """Mark a sequence for transfer, transfer its ownership, or end the mark."""
    fields, marks, tree = request.fields, store.move_marks, store.tree
    name, mark = fields.id, marks.marks.get(fields.id)
    shown = request.tenant.shown(name)
    if fields.state == "arrived":
        if (name, fields.generation) not in store.imports.finished:
            raise UnknownImport(shown)
    elif fields.state == "leaving":
        if mark is not None:
            raise SequenceMoving([shown], [shown] if mark.is_handed else [])
        tree.books.leaf(name)
        marks.put(name, Mark(fields.for_s))
    elif mark is None:
        tree.books.leaf(name)  # an unknown sequence is refused as such, whatever the state
        raise InvalidRequest(
            "state", fields.state, "not marked for transfer or as new, or the mark has expired"
        )
    elif fields.generation is not None:
        present = generation(tree, tree.books.leaf(name), store.info.instance_id)
        if fields.generation != present:
            raise SequenceChanged(shown, present)
        marks.put(name, Mark(fields.for_s, is_handed=True))
    else:
        tree.books.leaf(name)  # it counts as used
        marks.end(name, deletes=fields.state == "gone")
    return {}
