"""Calls about sequences: passed on whole where all are on one engine, else cut and joined."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, Told, problem_in, refusal_in
from service.cluster.migration.recovery import wait_for_move
from service.cluster.routing.batch_split import cut, has_mask, join, row_sums
from service.cluster.routing.replies import (
    MOVING_PAUSE_S,
    each,
    full_engine,
    is_moving,
    longest,
    reply,
    unknown_in,
)
from service.cluster.routing.tags import tags_of
from service.doors.kit.problems import ProblemText, document_of
from service.errors import InvalidRequest, LostSequence, NotReady, SequenceMoving
from service.image.json_text import dump_json
from service.image.reading import read_layout, split
from service.image.writing import RESPONSE
from service.operations.schema.fields import Int32
from service.operations.schema.spec import Prepared
from service.operations.sequences import GET_SEQUENCE
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot

if TYPE_CHECKING:
    from service.cluster.routing.router import Router
    from service.cluster.sharded.ranks import Home

Answer = tuple[Answered, Slot]
LOST: Final = "lost_sequence"
FULL_STATUS: Final = 507


async def ask_batch(router: Router, call: Call, prepared: Prepared, ids: Sequence[str]) -> Answer:
    """Ask the engines that these sequences are on. Raises UnknownSequence, LostSequence."""
    while True:
        engines = await router.homes.of(ids, call.tenant)
        if any(one is not engines[0] for one in engines):
            return await ask_several(router, call, prepared, ids)
        if (answer := await ask_one(router, call, ids, engines[0])) is not None:
            return answer


async def ask_one(router: Router, call: Call, ids: Sequence[str], engine: Home) -> Answer | None:
    """Ask the one engine that all are on. None where it does not know them, and they have been
    found elsewhere: ask there."""
    try:
        answered, slot = await pass_on(router, call, ids, engine)
    except ProblemText as refused:  # of engines that sequences are dealt out over
        if not await have_moved(router, call, engine, refused.problem):
            raise
        return None
    if answered.status < 300:
        done(router, call, ids)
    elif answered.status == FULL_STATUS:
        full = full_engine(refusal_in(answered), engine.name)
        router.give_back(slot)
        raise full
    problem = problem_of(call, engine, ids, answered)
    if not unknown_in(problem):
        return answered, slot
    router.give_back(slot)
    await have_moved(router, call, engine, problem)
    return None


async def have_moved(router: Router, call: Call, home: Home, problem: dict[str, Any]) -> bool:
    """Whether an engine refused a call because sequences are not there any more; then they have
    been found. Raises UnknownSequence, LostSequence for those that nobody has, and SequenceMoving
    for those that go on changing their engine."""
    unknown = unknown_in(problem)
    if not unknown or "done" in problem:
        return False
    if not isinstance(home, Engine):
        home.forget(call, unknown)
    may_wait = call.may_wait()
    await router.homes.find(unknown, call.tenant)
    if not may_wait:
        raise SequenceMoving(unknown)
    await asyncio.sleep(MOVING_PAUSE_S)
    return True


def done(router: Router, call: Call, ids: Sequence[str]) -> None:
    """What a call that succeeded means to others."""
    match call.operation.name:
        case "delete_sequence":
            router.homes.forget(call, ids)
            router.prompts.end(call.tenant.namespace, ids)
        case "commit" | "commit_sequences":
            router.prompts.end(call.tenant.namespace, ids)


def problem_of(call: Call, engine: Home, ids: Sequence[str], answered: Answered) -> dict[str, Any]:
    """What is to be done about an answer: its problem; that of a view that tells of a part only."""
    if answered.status in (404, 409):
        return problem_in(answered)
    if (
        call.operation.name == "get_sequence"
        and answered.status < 300
        and isinstance(engine, Engine)
    ):
        header, start = split(answered.image)
        if b"shard" in header:
            layout = read_layout(header, len(answered.image) - start, RESPONSE)
            if "shard" in layout.fields:
                return {"code": "unknown_sequence", "sequences": ids}
    return {"code": ""}


async def pass_on(router: Router, call: Call, ids: Sequence[str], engine: Home) -> Answer:
    """The call as it is. Raises LostSequence when the engine is lost over it."""
    prompts = router.prompts.computed_by(call.operation, call.tenant.namespace, ids)
    try:
        return await engine.call(call)
    except NotReady as error:
        raise await lost(router, engine, ids, error) from error
    finally:
        for one in prompts:
            one.num_calls -= 1


async def lost(router: Router, engine: Home, ids: Sequence[str], error: NotReady) -> Exception:
    """What to answer for a call that an engine was lost over. Raises NotReady where that may come
    back."""
    if router.members.home(engine.tag) is engine:
        return error
    tags = tags_of(engine.tag)
    await router.members.fate_of(tags)
    router.members.check_reachable(tags)
    return LostSequence(ids)


async def ask_together(router: Router, call: Call, prepared: Prepared) -> Answer:
    """The one engine that all the sequences are on. Raises InvalidRequest."""
    fields = prepared.fields
    levels = getattr(fields, "levels", None)
    ids = fields.ids if levels is None else list({one: 0 for level in levels for one in level.ids})
    while True:
        engines = await router.homes.of(ids, call.tenant)
        if any(one is not engines[0] for one in engines):
            other = next(i for i, one in enumerate(engines) if one is not engines[0])
            rule = f"is on another engine than {ids[0]}: fork what goes together from one sequence"
            raise InvalidRequest("sequences", ids[other], rule)
        if (answer := await ask_one(router, call, ids, engines[0])) is not None:
            return answer


async def ask_several(router: Router, call: Call, prepared: Prepared, ids: Sequence[str]) -> Answer:
    """Ask each engine for its part, all at once, and join the answers.

    Where one refuses, the problem's `done` names the sequences that others have changed already.
    """
    arrays = call.arrays(prepared.layout)
    operation = call.operation
    changes = operation.scope == "append" or operation.appended_with in arrays
    given = prepared.fields.model_dump(exclude_unset=True)
    told = await ask_parts(router, call, ids, given, arrays, changes=changes)
    done(router, call, ids)
    return reply(router.arena, call, told.fields, told.arrays, told.stages)


async def ask_parts(
    router: Router,
    call: Call,
    ids: Sequence[str],
    given: dict[str, Any],
    arrays: dict[str, Array],
    *,
    changes: bool,
) -> Told:
    """The joined answer to a batch's fields and tensors. Each part waits by itself for sequences
    that change their engine, since other parts may be done."""
    while True:
        groups: dict[Home, list[int]] = {}
        for at, engine in enumerate(await router.homes.of(ids, call.tenant)):
            groups.setdefault(engine, []).append(at)
        if len(groups) > 1:
            return await ask_pieces(router, call, ids, given, arrays, groups, changes=changes)
        home = next(iter(groups))
        try:
            return await home.ask(call, given, arrays)
        except NotReady as error:
            raise await lost(router, home, ids, error) from error
        except ProblemText as refused:
            if is_moving(refused) and call.may_wait():
                await wait_for_move(router, call, refused)
            elif not await have_moved(router, call, home, refused.problem):
                raise full_engine(refused, home.name) from None


async def ask_pieces(
    router: Router,
    call: Call,
    ids: Sequence[str],
    given: dict[str, Any],
    arrays: dict[str, Array],
    groups: Mapping[Home, list[int]],
    *,
    changes: bool,
) -> Told:
    """As `ask_parts`, of a batch whose positions are on several engines."""
    kv_lens = await masked_lengths(router, call, given, arrays) if has_mask(arrays) else None
    pieces = cut(given, arrays, list(groups.values()), kv_lens)
    parts = [[ids[at] for at in piece.positions] for piece in pieces]
    asked = [
        ask_parts(router, call, part, piece.fields, piece.arrays, changes=changes)
        for part, piece in zip(parts, pieces, strict=True)
    ]
    told = await each(asked)
    whole = [one for one in told if isinstance(one, Told)]
    if len(whole) < len(told):
        both = zip(parts, told, strict=True)
        done = [name for part, one in both if isinstance(one, Told) for name in part]
        errors = [one for one in told if not isinstance(one, Told)]
        raise refusal(errors, done if changes else [])
    fields, joined = join(pieces, [(one.fields, one.arrays) for one in whole])
    return Told(fields, joined, longest(one.stages for one in whole))


async def masked_lengths(
    router: Router, call: Call, given: dict[str, Any], arrays: dict[str, Array]
) -> Int32:
    """How many tokens a prefill's mask covers of each sequence: those that it has at the layer, and
    those that the call appends. The engines check that they are right."""
    ids, tenant = given["sequences"], router.members.acting_for(call.tenant)
    look = replace(call, operation=GET_SEQUENCE, tenant=tenant)
    asked = [ask_parts(router, look, [one], {"id": one}, {}, changes=False) for one in ids]
    lengths = []
    for told in await each(asked):
        if isinstance(told, BaseException):
            raise told
        lengths.append(told.fields["lengths"][given["layer"]])
    appended = np.diff(row_sums(given, len(ids))) if "k" in arrays else 0
    return np.array(lengths, np.int32) + appended


def refusal(errors: Sequence[BaseException], done: Sequence[str]) -> BaseException:
    """The first error, with what is done all the same, by these and by the parts of each; the lost
    sequences of all."""
    for error in errors:
        if isinstance(error, asyncio.CancelledError):
            return error
    documents = [document_of(error, b"") for error in errors]
    gone = [one for one in documents if one["code"] == LOST]
    names = list(dict.fromkeys(name for one in gone for name in one["sequences"]))
    every = dict.fromkeys([*done, *(name for one in documents for name in one.get("done", ()))])
    if not every:
        return LostSequence(names) if gone else errors[0]
    first = document_of(LostSequence(names), b"") if gone else documents[0]
    return ProblemText(dump_json(first | {"done": list(every)}))
