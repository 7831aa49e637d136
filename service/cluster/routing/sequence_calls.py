"""Calls for sequences that exist: forwarded where all are on one engine, else split and joined."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
from attnd.wire.bounds import MAX_VALUES
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import DoorCall, EngineSession, RawReply
from service.cluster.membership.members import Members
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.cluster.routing.batch_split import Piece, has_mask, join, row_sums, split_batch
from service.cluster.routing.ids import Ids, Places
from service.cluster.routing.outcomes import Outcome, outcome_of, unknown_ids
from service.cluster.routing.replies import gather_all, longest, reply, results_of, with_full_engine
from service.doors.kit.problems import ProblemText, document_of
from service.doors.kit.upstream import EngineReply
from service.errors import AttndError, DeadlineExceeded, InvalidRequest, LostSequence, NotReady
from service.image.json_text import dump_json
from service.image.reading import split
from service.operations.schema.fields import Int32
from service.operations.schema.spec import Operation, Prepared
from service.operations.sequences import GET_SEQUENCE
from service.road.caller_end.caller import AnswerLost

Arrays = dict[str, Array]
Fields = dict[str, Any]
T = TypeVar("T")
COMMITS: Final = frozenset({"commit", "commit_sequences"})
ID_FIELD: Final = {"sequence": "id", "sequences": "sequences"}
"""The field with the ids, by the operation's routing."""
MAX_TRIES: Final = 64
"""Attempts of a call, more than engines: ids may go between two looks."""
MAX_REMEMBERED_BYTES: Final = 16 * 2**10
MAX_REMEMBERED: Final = 512
"""Headers whose ids are remembered, as decodes repeat them, and the size of one."""


class SequenceCalls:
    """Delivers calls to the engines of their sequences, for one router."""

    def __init__(
        self,
        members: Members,
        ids: Ids,
        prompts: InflightPrompts,
        prepare: Callable[[DoorCall, bytes], Prepared],
    ) -> None:
        """`prepare` checks a request that cannot be forwarded unread."""
        self.members = members
        self.ids = ids
        self.prompts = prompts
        self.prepare = prepare
        self.remembered = lru_cache(MAX_REMEMBERED)(ids_in)

    async def call(self, call: DoorCall, header: bytes) -> RawReply:
        """The reply to a call for the sequences that its header names. A request is checked before
        engines are asked for its sequences; the engine checks it where they are known."""
        is_short = len(header) <= MAX_REMEMBERED_BYTES
        ids = (self.remembered if is_short else ids_in)(call.operation, header)
        if not ids or self.ids.known_places(ids, call.tenant) is None:
            ids = ids_of(call.operation, self.prepare(call, header))

        async def apart(places: Places) -> RawReply:
            """Sends each engine its part."""
            prepared = self.prepare(call, header)
            arrays = call.arrays(prepared.layout)
            changes = call.operation.scope == "append" or call.operation.appended_with in arrays
            fields = prepared.fields.model_dump(exclude_unset=True)
            whole = await self.ask_each(call, ids, places, fields, arrays, changes=changes)
            self.succeeded(call, ids, 0)
            return reply(self.members.arena, call, whole.fields, whole.arrays, whole.stages)

        return await self.at_home(call, ids, lambda home: self.forward(call, ids, home), apart)

    async def together(self, call: DoorCall, prepared: Prepared) -> RawReply:
        """The reply of the one engine that all the sequences are on. Raises InvalidRequest."""
        levels = getattr(prepared.fields, "levels", None)
        named = prepared.fields.ids if levels is None else [i for one in levels for i in one.ids]
        ids = tuple(dict.fromkeys(named))

        async def apart(places: Places) -> RawReply:
            _, (other, *_), *_ = places.values()
            rule = f"is on another engine than {ids[0]}: fork both from one sequence"
            raise InvalidRequest("sequences", ids[other], rule)

        return await self.at_home(call, ids, lambda home: self.forward(call, ids, home), apart)

    async def ask(
        self, call: DoorCall, ids: Sequence[str], fields: Fields, arrays: Arrays, *, changes: bool
    ) -> EngineReply:
        """The joined reply to other fields and tensors for these sequences. `changes`: an error
        lists the sequences that were changed all the same."""
        return await self.at_home(
            call,
            ids,
            lambda home: home.ask(call, fields, arrays),
            lambda places: self.ask_each(call, ids, places, fields, arrays, changes=changes),
        )

    async def at_home(
        self,
        call: DoorCall,
        ids: Sequence[str],
        send: Callable[[EngineSession], Awaitable[T]],
        apart: Callable[[Places], Awaitable[T]],
    ) -> T:
        """What `send` returns for the engine of all these sequences, or `apart` for several."""
        for left in reversed(range(MAX_TRIES)):
            places = await self.ids.locate(ids, call.tenant)
            if len(places) > 1:
                return await apart(places)
            (home,) = places
            try:
                return await send(home)
            except (ProblemText, AttndError) as error:
                if not left:
                    raise
                await self.recover(call, ids, home, error)
        raise RuntimeError("the last attempt returns or raises: this is a bug")

    async def forward(self, call: DoorCall, ids: Sequence[str], home: EngineSession) -> RawReply:
        """The reply of an engine to the call as it is."""
        since = self.ids.clock
        prompts = self.prompts.computed_by(call.operation, call.tenant.namespace, ids)
        try:
            answered, slot = await home.call(call)
        finally:
            for one in prompts:
                one.num_calls -= 1
        self.succeeded(call, ids, since)
        return answered, slot

    async def ask_each(
        self,
        call: DoorCall,
        ids: Sequence[str],
        places: Places,
        fields: Fields,
        arrays: Arrays,
        *,
        changes: bool,
    ) -> EngineReply:
        """Sends each engine its piece, all at once, and joins the replies. Each piece is retried by
        itself, since others may have taken effect."""
        kv_lens = None
        if has_mask(arrays):
            kv_lens = await self.masked_lengths(call, ids, fields, appends="k" in arrays)
        pieces = split_batch(fields, arrays, list(places.values()), kv_lens)
        parts = [[ids[at] for at in piece.positions] for piece in pieces]

        def ask(part: Sequence[str], piece: Piece) -> Awaitable[EngineReply]:
            return self.ask(call, part, piece.fields, piece.arrays, changes=changes)

        results = await results_of([ask(*both) for both in zip(parts, pieces, strict=True)])
        whole = [one for one in results if isinstance(one, EngineReply)]
        if len(whole) < len(results):
            both = zip(parts, results, strict=True)
            done = [name for part, one in both if isinstance(one, EngineReply) for name in part]
            errors = [one for one in results if isinstance(one, BaseException)]
            raise joint_error(errors, done if changes else [])
        joined, tensors = join(pieces, [(one.fields, one.arrays) for one in whole])
        return EngineReply(joined, tensors, longest(one.stages for one in whole))

    async def masked_lengths(
        self, call: DoorCall, ids: Sequence[str], fields: Fields, *, appends: bool
    ) -> Int32:
        """The tokens of each sequence that a prefill's mask covers: those at the layer, and those
        that the call appends. The engines check them."""
        tenant = self.members.acting_for(call.tenant)
        look = replace(call, operation=GET_SEQUENCE, tenant=tenant)
        asking = [self.ask(look, [one], {"id": one}, {}, changes=False) for one in ids]
        layer = fields["layer"]
        lengths = [view.fields["lengths"][layer] for view in await gather_all(asking)]
        appended = np.diff(row_sums(fields, len(ids))) if appends else 0
        return np.array(lengths, np.int32) + appended

    def succeeded(self, call: DoorCall, ids: Sequence[str], since: int) -> None:
        """Forgets sequences that were deleted after `since`; ends waits for committed prompts."""
        name = call.operation.name
        if name == "delete_sequence":
            self.ids.forget(call.tenant, ids, since)
        if name == "delete_sequence" or name in COMMITS:
            self.prompts.end(call.tenant.namespace, ids)

    # where an attempt has failed

    async def recover(
        self, call: DoorCall, ids: Sequence[str], home: EngineSession, error: Exception
    ) -> None:
        """Finds the sequences that `home` does not have; raises for all other outcomes."""
        match outcome_of(error), error:
            case Outcome.UNKNOWN, _:
                await self.ids.find(unknown_ids(error), call.tenant)
            case Outcome.LOST, _:
                raise await self.lost(call, home, ids, error) from error
            case _, ProblemText():
                raise with_full_engine(error, home.name) from None
            case _:
                raise error

    async def lost(
        self, call: DoorCall, home: EngineSession, ids: Sequence[str], error: Exception
    ) -> Exception:
        """The error of a call during which the session was lost: NotReady while the engine may come
        back, or has; DeadlineExceeded where it may then have the call's change, since clients
        repeat calls that are not ready."""
        if self.members.by_tag.get(home.tag) is home:
            return error
        await self.members.wait_for_fate([home.tag])
        if home.tag not in self.members.by_tag:
            try:
                self.members.check_reachable([home.tag])
            except NotReady as why:
                error = why if not isinstance(error, AnswerLost) else error
            else:
                return LostSequence(ids)
        if isinstance(error, AnswerLost) and may_change(call):
            text = f"the session with {home.name} ended during the call; it may have been applied"
            return DeadlineExceeded(text)
        return error


def ids_of(operation: Operation, prepared: Prepared) -> tuple[str, ...]:
    """The sequences that a checked request names."""
    given = getattr(prepared.fields, ID_FIELD[operation.routed], ())
    return (given,) if isinstance(given, str) else tuple(given or ())


def ids_in(operation: Operation, header: bytes) -> tuple[str, ...]:
    """The sequences that a header names; none where it is malformed."""
    if header.count(b",") > MAX_VALUES:
        return ()
    try:
        request = json.loads(json.loads(header)["__metadata__"]["request"])
        given = request[ID_FIELD[operation.routed]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    ids = (given,) if isinstance(given, str) else given
    if not isinstance(ids, list | tuple) or not all(isinstance(name, str) for name in ids):
        return ()
    return tuple(ids)


def may_change(call: DoorCall) -> bool:
    """Whether a call changes sequences."""
    operation = call.operation
    if operation.scope != "read" or not operation.appended_with:
        return operation.scope != "read"
    return f'"{operation.appended_with}"'.encode() in split(call.image)[0]


def joint_error(errors: Sequence[BaseException], done: Sequence[str]) -> BaseException:
    """The first error after which a piece may have been applied, else the loss of all lost
    sequences, else the first error; its `done` lists the sequences that were changed all the same,
    by `done` here and in each error."""
    for error in errors:
        if isinstance(error, asyncio.CancelledError):
            return error
    documents = [document_of(error, b"") for error in errors]
    lost = [one for one in documents if one["code"] == "lost_sequence"]
    names = list(dict.fromkeys(name for one in lost for name in one["sequences"]))
    every = dict.fromkeys([*done, *(name for one in documents for name in one.get("done", ()))])
    unclear = [at for at, one in enumerate(documents) if one["code"] == "deadline_exceeded"]
    error = errors[unclear[0]] if unclear else LostSequence(names) if lost else errors[0]
    if not every:
        return error
    return ProblemText(dump_json(document_of(error, b"") | {"done": list(every)}))
