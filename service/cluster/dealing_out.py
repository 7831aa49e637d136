"""One whole sequence dealt out over several engines while callers go on.

The engine that it is on becomes rank 0: its part stays where it is, those of the others are copied
while calls for the sequence are held up. One turn of that engine makes a shard of what was whole
until then; the other parts, complete but without a name, get theirs after it, from this door or
from any that looks for the sequence. So whoever dies, it is whole or dealt out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from service.cluster.answering import each
from service.cluster.copying import Begun, ask, begin_part, copy, end_copy
from service.cluster.engine import Engine, Told
from service.cluster.epochs import later
from service.cluster.handing import hand, is_dead
from service.cluster.names import BETWEEN
from service.doors.problems import ProblemText
from service.operations.sequences import GET_SEQUENCE
from service.operations.transfer import CANCEL_IMPORT
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.router import Router

LOG: Final = logging.getLogger("attnd.cluster")
NAMED: Final = frozenset({"sequence_exists", "unknown_import"})
"""What an engine says of a part that another door has given its name."""


async def deal_out(
    router: Router, tenant: Tenant, sequence: str, engines: Sequence[Engine], room: int
) -> int:
    """Make shards of a whole sequence that is on the first of the engines, which must have `room`
    for so many pages then; how many bytes went. Raises what engines refuse: then it is whole."""
    source, *others = engines
    shards = [{"rank": rank, "ranks": len(engines)} for rank in range(len(engines))]
    stay: dict[str, Any] = {"shard": shards[0], "epoch": later(0)}
    parts: list[Begun] = []
    await hand(source, tenant, sequence, "leaving", room=room, **stay)
    try:
        bringing = [
            bring(source, target, tenant, sequence, shard, stay["epoch"])
            for target, shard in zip(others, shards[1:], strict=True)
        ]
        parts = [part if isinstance(part, Begun) else failed(part) for part in await each(bringing)]
        generation = parts[0].header["generation"]
        await hand(source, tenant, sequence, "dealt", generation=generation, **stay)
    except BaseException:
        if await asyncio.shield(stays(router, engines, tenant, sequence, stay["epoch"])):
            raise
    if await asyncio.shield(end(parts)):
        tag = BETWEEN.join(engine.tag for engine in engines)
        router.homes.names.learn((tenant.namespace, sequence), tag)
    return sum(part.num_bytes for part in parts)


def failed(error: Begun | BaseException) -> Begun:
    """Raises what one of several has raised."""
    if isinstance(error, BaseException):
        raise error
    return error


async def bring(
    source: Engine, target: Engine, tenant: Tenant, sequence: str, shard: dict[str, int], epoch: int
) -> Begun:
    """All of a rank's part, which has no name there yet."""
    begun = await begin_part(source, target, tenant, sequence, shard, epoch)
    await copy(source, begun)
    return begun


async def stays(
    router: Router, engines: Sequence[Engine], tenant: Tenant, sequence: str, epoch: int
) -> bool:
    """Whether a sequence that could not be dealt out by this door is left to others; then it is
    whole, as it was, unless another door was faster. Where nobody can say, the parts are kept for
    whoever finds out."""
    source, *others = engines
    (back,) = await each([hand(source, tenant, sequence, "back")])
    if isinstance(back, ProblemText):  # it is dealt out, or was not held up any more
        (view,) = await each([ask(source, GET_SEQUENCE, tenant, {"id": sequence})])
        shard = view.fields.get("shard") if isinstance(view, Told) else None
        if shard is not None:
            return bool(shard["epoch"] != epoch)
    elif isinstance(back, BaseException) and not await is_dead(router, source):
        LOG.warning("nobody knows whether %s is dealt out: %s", sequence, back)
        return True
    await each([ask(one, CANCEL_IMPORT, tenant, {"id": sequence}) for one in others])
    return True


async def end(parts: Sequence[Begun]) -> bool:
    """The parts get their name; whether all have it."""
    has_all = True
    for part, told in zip(parts, await each([end_copy(part) for part in parts]), strict=True):
        if isinstance(told, ProblemText) and told.problem["code"] in NAMED:
            continue
        if isinstance(told, BaseException):
            LOG.warning("%s has no part of %s: %s", part.target.name, part.sequence, told)
            has_all = False
    return has_all
