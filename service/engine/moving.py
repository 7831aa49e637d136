"""What an engine does when it is emptied, or too small for a sequence: it takes nothing new, and
hands sequences over, or parts of them."""

from __future__ import annotations

from service.core.errors import InvalidRequest
from service.core.sharding import check_epochs
from service.core.shards import WHOLE, Shard
from service.core.transfer import generation
from service.engine.leaving import Mark
from service.engine.request import Request
from service.engine.store import Store, StoreLost
from service.engine.work import Answered, Seconds, Work
from service.errors import NotReady, SequenceChanged, SequenceMoving

EMPTIED = "this engine is being emptied: it takes no new sequences"


def drain_engine(store: Store, request: Request, _: Seconds) -> Work:
    request.place.require(256)
    store.is_draining = not request.fields.stop
    numbers = store.numbers()
    told = {"name": request.fields.name, "draining": store.is_draining}
    request.place.lay(told | {"sequences": numbers.sequences})
    return Answered()


def refuse_new(store: Store) -> None:
    """Raises NotReady while the engine takes no new sequences."""
    if store.is_draining:
        raise NotReady(EMPTIED)


def hand_over(store: Store, request: Request, _: Seconds) -> Work:
    fields, leaving, tree = request.fields, store.leaving, store.tree
    request.place.require(0)
    leaving.expire()
    name, mark = fields.id, leaving.marks.get(fields.id)
    shown = request.tenant.shown(name)
    if fields.state == "leaving":
        if mark is not None:
            raise SequenceMoving([shown])
        may_leave(store, request)
        leaving.marks[name] = Mark(fields.for_s, epoch=fields.epoch or 0)
    elif mark is None or (fields.epoch is not None and fields.epoch != mark.epoch):
        raise InvalidRequest("state", fields.state, "it is not leaving, or has not for too long")
    elif fields.generation is not None:
        present = generation(tree, tree.books.leaf(name), store.info.instance_id)
        if fields.generation != present:
            raise SequenceChanged(shown, present)
        if fields.state == "handed":
            leaving.marks[name] = Mark(fields.for_s, is_handed=True)
        elif not tree.books.leaf(name).shard.is_whole:
            raise InvalidRequest("state", "dealt", "only a part of it is here already")
        else:
            deal_out(store, name, Shard(fields.shard.rank, fields.shard.ranks), fields.epoch)
            del leaving.marks[name]
    else:
        mark.is_handed = fields.state == "gone"
        leaving.end(name)
    request.place.lay({})
    return Answered()


def may_leave(store: Store, request: Request) -> None:
    """Raises `InvalidRequest`, `SequenceTaken` for what is not here as it is believed to be, and
    `OutOfPages` where a part of it was to stay."""
    fields, tree = request.fields, store.tree
    leaf = tree.books.leaf(fields.id)
    part = WHOLE if fields.shard is None else Shard(fields.shard.rank, fields.shard.ranks)
    if leaf.shard.is_whole:
        if not part.is_whole:
            tree.make_room(fields.id, part, fields.room)
    elif leaf.shard != part:
        rule = "only a part of it is here, which leaves as that"
        raise InvalidRequest("id", request.tenant.shown(fields.id), rule)
    else:
        check_epochs(tree, (fields.id,), [fields.epoch])


def deal_out(store: Store, name: str, shard: Shard, epoch: int) -> None:
    """Keep a part of a sequence."""
    copies = store.tree.deal_out(name, shard, epoch)
    try:
        if copies.src_pages.size:
            store.backend.copy_rows(copies.src_pages, copies.dst_pages, copies.num_rows)
    except Exception as error:
        raise StoreLost(f"rows of {name} were lost as it was dealt out") from error
