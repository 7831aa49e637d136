"""Answers that a router writes itself, from those of several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_STAGES

from service.cluster.membership.engine import Call, Engine
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import LESS
from service.doors.kit.problems import ProblemText
from service.errors import AnswerTooLarge
from service.image.json_text import dump_json
from service.image.writing import RESPONSE, image
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

MOVING: Final = "sequence_moving"
FULL: Final = "out_of_pages"
OF: Final = "engine"
ROOM: Final = "engines_with_room"
MOVING_PAUSE_S: Final = 0.003
Stages = tuple[float, ...]
Result = TypeVar("Result")


def reply(
    arena: DoorArena,
    call: Call,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Array] | None = None,
    stages: Stages = NO_STAGES,
) -> tuple[Answered, Slot]:
    """A successful answer in a slot. Raises AnswerTooLarge, Overloaded."""
    parts = image(RESPONSE, dump_json(fields), arrays or {})
    size = sum(map(len, parts))
    if size > call.most:
        raise AnswerTooLarge(size, call.most, LESS)
    slot, length = arena.lay(parts)
    return Answered(call.operation.status, slot.view(length), 0, stages), slot


def is_moving(refused: BaseException) -> bool:
    """Whether nothing was done because a sequence is on its way to another engine."""
    if not isinstance(refused, ProblemText):
        return False
    problem = refused.problem
    return problem["code"] == MOVING and "done" not in problem


def with_room(refused: ProblemText, engines: Sequence[Engine]) -> ProblemText:
    """A refusal for want of pages, with the engines that have as many; any other as it is."""
    problem = refused.problem
    if problem["code"] != FULL or ROOM in problem or len(engines) < 2:
        return refused
    full = problem.get(OF)
    names = [
        one.name
        for one in engines
        if one.name != full and one.takes_new and one.load_now.room >= problem["needed"]
    ]
    told = "" if full is None else f"engine {full} is full; "
    if names:
        told += f"{' and '.join(names)} has room: new sequences go there, and sequences move there "
        told += "from an engine that is drained"
    else:
        told += "no other engine has room"
    document = problem | {ROOM: names, "detail": f"{problem['detail']}; {told}"}
    return ProblemText(dump_json(document))


def full_engine(refused: ProblemText, name: str) -> ProblemText:
    """A refusal for want of pages, with the engine's name; any other as it is."""
    problem = refused.problem
    if problem["code"] != FULL or OF in problem:
        return refused
    return ProblemText(dump_json(problem | {OF: name}))


def longest(stages: Iterable[Stages]) -> Stages:
    """The stages of calls that ran side by side."""
    return tuple(map(max, zip(*stages, strict=True))) or NO_STAGES


async def each(awaitables: Sequence[Awaitable[Result]]) -> list[Result | BaseException]:
    """What each gives or raises, when all are done; where this is cancelled, they are too."""
    return await asyncio.gather(*awaitables, return_exceptions=True)


def unwaited(work: Coroutine[Any, Any, Any]) -> None:
    """Run work in the background."""
    task = asyncio.ensure_future(work)
    UNWAITED.add(task)
    task.add_done_callback(UNWAITED.discard)


UNWAITED: Final[set[asyncio.Future[Any]]] = set()
"""The event loop keeps weak references only."""


def unknown_in(problem: dict[str, Any]) -> list[str]:
    """The sequences that an engine does not know, or has a part of and asks for their epoch."""
    if problem["code"] == "sequence_taken":
        return list(problem["epochs"])
    return list(problem["sequences"]) if problem["code"] == "unknown_sequence" else []
