"""Calls for sequences that exist: forwarded where all are on one engine, else split and joined."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, EngineReply, RawReply
from service.cluster.membership.members import Members
from service.cluster.placement.inflight_prompts import InflightPrompts
from service.cluster.routing.batch_split import Piece, has_mask, join, row_sums, split_batch
from service.cluster.routing.fast_path import FastPath, ids_of
from service.cluster.routing.ids import Ids
from service.cluster.routing.outcomes import Outcome, retried, unknown_ids
from service.cluster.routing.replies import gather_all, longest, reply, results_of, with_full_engine
from service.doors.kit.problems import ProblemText, document_of
from service.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LostSequence,
    NotReady,
)
from service.image.json_text import dump_json
from service.image.reading import split
from service.operations.schema.fields import Int32
from service.operations.schema.spec import Prepared
from service.operations.sequences import GET_SEQUENCE
from service.road.caller_end.caller import AnswerLost

Arrays = dict[str, Array]
Fields = dict[str, Any]
COMMITS: Final = frozenset({"commit", "commit_sequences"})


class SequenceCalls:
    """Delivers calls to the engines of their sequences, for one router."""

    def __init__(
        self,
        members: Members,
        ids: Ids,
        prompts: InflightPrompts,
        prepare: Callable[[Call, bytes], Awaitable[Prepared]],
    ) -> None:
        """`prepare` checks a request that cannot be forwarded unread."""
        self.members = members
        self.ids = ids
        self.prompts = prompts
        self.prepare = prepare
        self.fast_path = FastPath()

    async def call(self, call: Call, header: bytes) -> RawReply:
        """The reply to a call for the sequences that its header names."""
        return await retried(Forwarded(self, call, self.fast_path.ids(call, header), header))

    async def together(self, call: Call, prepared: Prepared) -> RawReply:
        """The reply of the one engine that all the sequences are on. Raises InvalidRequest."""
        levels = getattr(prepared.fields, "levels", None)
        ids = prepared.fields.ids if levels is None else [i for one in levels for i in one.ids]
        return await retried(Forwarded(self, call, tuple(dict.fromkeys(ids)), None))

    async def ask(
        self, call: Call, ids: Sequence[str], fields: Fields, arrays: Arrays, *, changes: bool
    ) -> EngineReply:
        """The joined reply to other fields and tensors for these sequences. `changes`: an error
        lists the sequences that were changed all the same."""
        return await retried(Piecewise(self, call, ids, fields, arrays, changes))

    # where an attempt has failed

    async def recover(
        self, call: Call, ids: Sequence[str], home: Engine, outcome: Outcome, error: Exception
    ) -> None:
        """Finds the sequences that `home` does not have; raises for all other outcomes."""
        match outcome, error:
            case Outcome.UNKNOWN, _:
                await self.ids.find(unknown_ids(error), call.tenant)
            case Outcome.LOST, _:
                raise await self.lost(call, home, ids, error) from error
            case _, ProblemText():
                raise with_full_engine(error, home.name) from None
            case _:
                raise error

    async def lost(
        self, call: Call, home: Engine, ids: Sequence[str], error: Exception
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

    def succeeded(self, call: Call, ids: Sequence[str], since: int) -> None:
        """Forgets sequences that were deleted after `since`; ends waits for committed prompts."""
        name = call.operation.name
        if name == "delete_sequence":
            self.ids.forget(call.tenant, ids, since)
        if name == "delete_sequence" or name in COMMITS:
            self.prompts.end(call.tenant.namespace, ids)


@dataclass(slots=True)
class Forwarded:
    """A call sent as it is, where one engine has all its sequences."""

    calls: SequenceCalls
    call: Call
    ids: Sequence[str]
    """Empty: they are not known before the header is checked."""
    header: bytes | None
    """None: the request was checked, and the sequences must be on one engine."""
    home: Engine | None = None

    async def attempt(self) -> RawReply:
        self.home = None
        known, tenant = self.calls.ids, self.call.tenant
        places = known.known_places(self.ids, tenant) if self.ids else None
        if places is None:  # a request is checked before engines are asked for its sequences
            if self.header is not None:
                prepared = await self.calls.prepare(self.call, self.header)
                self.ids = ids_of(self.call.operation, prepared)
            places = await known.locate(self.ids, tenant)
        if len(places) > 1:
            _, (other, *_), *_ = places.values()
            return await self.scatter(self.ids[other])
        (self.home,) = places
        return await self.forward(self.home)

    async def forward(self, home: Engine) -> RawReply:
        call, calls = self.call, self.calls
        since = calls.ids.clock
        prompts = calls.prompts.computed_by(call.operation, call.tenant.namespace, self.ids)
        try:
            answered, slot = await home.call(call)
        finally:
            for one in prompts:
                one.num_calls -= 1
        calls.succeeded(call, self.ids, since)
        return answered, slot

    async def scatter(self, other: str) -> RawReply:
        """Sends each engine its part. `other` is not on the engine of the first sequence."""
        call, calls = self.call, self.calls
        if self.header is None:
            rule = f"is on another engine than {self.ids[0]}: fork both from one sequence"
            raise InvalidRequest("sequences", other, rule)
        prepared = await calls.prepare(call, self.header)
        arrays = call.arrays(prepared.layout)
        changes = call.operation.scope == "append" or call.operation.appended_with in arrays
        fields = prepared.fields.model_dump(exclude_unset=True)
        whole = await calls.ask(call, self.ids, fields, arrays, changes=changes)
        calls.succeeded(call, self.ids, 0)
        return reply(calls.members.arena, call, whole.fields, whole.arrays, whole.stages)

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        if self.home is None:  # `locate` or a piece has failed
            raise error
        await self.calls.recover(self.call, self.ids, self.home, outcome, error)


@dataclass(slots=True)
class Piecewise:
    """Fields and tensors for sequences of any number of engines. Each piece is retried by itself,
    since others may have taken effect."""

    calls: SequenceCalls
    call: Call
    ids: Sequence[str]
    fields: Fields
    arrays: Arrays
    changes: bool
    home: Engine | None = None

    async def attempt(self) -> EngineReply:
        self.home = None
        places = await self.calls.ids.locate(self.ids, self.call.tenant)
        if len(places) > 1:
            return await self.scatter(list(places.values()))
        (self.home,) = places
        return await self.home.ask(self.call, self.fields, self.arrays)

    async def scatter(self, groups: Sequence[Sequence[int]]) -> EngineReply:
        """Sends each engine its piece, all at once, and joins the replies."""
        has = has_mask(self.arrays)
        kv_lens = await self.masked_lengths() if has else None
        pieces = split_batch(self.fields, self.arrays, groups, kv_lens)
        parts = [[self.ids[at] for at in piece.positions] for piece in pieces]
        asking = [self.ask(part, piece) for part, piece in zip(parts, pieces, strict=True)]
        results = await results_of(asking)
        whole = [one for one in results if isinstance(one, EngineReply)]
        if len(whole) < len(results):
            both = zip(parts, results, strict=True)
            done = [name for part, one in both if isinstance(one, EngineReply) for name in part]
            errors = [one for one in results if isinstance(one, BaseException)]
            raise joint_error(errors, done if self.changes else [])
        fields, joined = join(pieces, [(one.fields, one.arrays) for one in whole])
        return EngineReply(fields, joined, longest(one.stages for one in whole))

    async def ask(self, ids: Sequence[str], piece: Piece) -> EngineReply:
        changes = self.changes
        return await self.calls.ask(self.call, ids, piece.fields, piece.arrays, changes=changes)

    async def masked_lengths(self) -> Int32:
        """The tokens of each sequence that a prefill's mask covers: those at the layer, and those
        that the call appends. The engines check them."""
        tenant = self.calls.members.acting_for(self.call.tenant)
        look = replace(self.call, operation=GET_SEQUENCE, tenant=tenant)
        asking = [self.calls.ask(look, [one], {"id": one}, {}, changes=False) for one in self.ids]
        layer = self.fields["layer"]
        lengths = [view.fields["lengths"][layer] for view in await gather_all(asking)]
        appends = "k" in self.arrays
        appended = np.diff(row_sums(self.fields, len(self.ids))) if appends else 0
        return np.array(lengths, np.int32) + appended

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        if self.home is None:
            raise error
        await self.calls.recover(self.call, self.ids, self.home, outcome, error)


def may_change(call: Call) -> bool:
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
