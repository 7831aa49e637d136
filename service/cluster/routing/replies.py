"""Replies that the router writes itself, from the replies of several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from attnd.wire.dtypes import Array
from attnd.wire.frames import NO_STAGES
from attnd.wire.images import RESPONSE

from service.cluster.membership.engine import DoorCall, EngineSession, RawReply
from service.doors.kit.arena import DoorArena
from service.doors.kit.link import LESS
from service.doors.kit.problems import ProblemText
from service.errors import AnswerTooLarge, NotReady
from service.image.json_text import dump_json
from service.image.writing import image
from service.road.caller_end.caller import Answered

OUT_OF_PAGES: Final = "out_of_pages"
Stages = tuple[float, ...]
Result = TypeVar("Result")


def reply(
    arena: DoorArena,
    call: DoorCall,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Array] | None = None,
    stages: Stages = NO_STAGES,
) -> RawReply:
    """A successful reply in a slot. Raises AnswerTooLarge, Overloaded."""
    parts = image(RESPONSE, dump_json(fields), arrays or {})
    size = sum(map(len, parts))
    if size > call.most:
        raise AnswerTooLarge(size, call.most, LESS)
    slot, length = arena.lay(parts)
    return Answered(call.operation.status, slot.view(length), 0, stages), slot


def with_full_engine(error: ProblemText, name: str) -> ProblemText:
    """Adds the engine's name to an out-of-pages error; returns any other as it is."""
    problem = error.problem
    if problem["code"] != OUT_OF_PAGES or "engine" in problem:
        return error
    return ProblemText(dump_json(problem | {"engine": name}))


def with_room(error: ProblemText, engines: Sequence[EngineSession]) -> ProblemText:
    """Adds the engines that have room to an out-of-pages error; returns any other as it is."""
    problem = error.problem
    if problem["code"] != OUT_OF_PAGES or "engines_with_room" in problem or len(engines) < 2:
        return error
    full = problem.get("engine")
    names = [
        one.name
        for one in engines
        if one.name != full and one.takes_new and one.load_now.room >= problem["needed"]
    ]
    detail = f"{problem['detail']}; " + ("" if full is None else f"engine {full} is full; ")
    if names:
        has = "has" if len(names) == 1 else "have"
        detail += f"{' and '.join(names)} {has} room: create new sequences, which are placed there"
    else:
        detail += "no other engine has room"
    return ProblemText(dump_json(problem | {"engines_with_room": names, "detail": detail}))


def longest(stages: Iterable[Stages]) -> Stages:
    """The stages of calls that ran side by side."""
    return tuple(map(max, zip(*stages, strict=True))) or NO_STAGES


async def results_of(awaitables: Sequence[Awaitable[Result]]) -> list[Result | BaseException]:
    """The result or the error of each, when all are done; cancelling this cancels them."""
    return await asyncio.gather(*awaitables, return_exceptions=True)


def whole(results: Sequence[Result | BaseException]) -> list[Result]:
    """All results. Raises the first error, that of an engine without a session before others."""
    errors = [one for one in results if isinstance(one, BaseException)]
    if errors:
        raise next((one for one in errors if isinstance(one, NotReady)), errors[0])
    return [one for one in results if not isinstance(one, BaseException)]


async def gather_all(awaitables: Sequence[Awaitable[Result]]) -> list[Result]:
    """The results of all. Raises as `whole`, when all are done."""
    return whole(await results_of(awaitables))


def run_in_background(work: Coroutine[Any, Any, Any]) -> None:
    """Starts work without waiting for it."""
    task = asyncio.ensure_future(work)
    BACKGROUND.add(task)
    task.add_done_callback(BACKGROUND.discard)


BACKGROUND: Final[set[asyncio.Future[Any]]] = set()
"""The event loop keeps weak references only."""
