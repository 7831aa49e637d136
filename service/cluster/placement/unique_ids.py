"""Ids that callers choose exist once, whichever doors make them.

A door looks for an id before it makes the sequence and again afterwards, so of two doors that make
the same id at once at least one sees the other's. Meanwhile the new sequence answers no calls, and
no drain moves it: then the door confirms it, or deletes it and looks again, after a random pause.
Where the door dies, it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from service.cluster.membership.engine import ASK_S, Call, Engine, EngineReply
from service.cluster.routing.locator import state_at
from service.cluster.routing.outcomes import RETRY_PAUSE_S, Outcome, outcome_of
from service.cluster.routing.replies import gather_all, results_in_turn, whole
from service.cluster.routing.sequence_calls import SequenceCalls
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    DeadlineExceeded,
    NotReady,
    SequenceExists,
    SequenceMoving,
)
from service.operations.internal import HAND_OVER
from service.operations.sequences import DELETE_SEQUENCES

LONGEST_S: Final = 3600.0
LOOK_S: Final = 1.0
"""Between two looks for an engine that may come back."""
MAX_PARALLEL: Final = 64
"""Sequences of one call about which engines are asked one by one at the same time."""


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """Keeps the ids of one router's new sequences unique, for one call."""

    calls: SequenceCalls
    call: Call

    @property
    def confirming(self) -> dict[str, float]:
        """The field of a request for sequences that wait for their confirmation. Those that get
        none expire, later than the call can end."""
        deadline_s = self.call.deadline_us * 1e-6 or self.calls.members.limits.deadline_s
        return {"confirm_s": min(deadline_s, LONGEST_S) + ASK_S}

    async def refuse_taken(self, ids: Collection[str]) -> None:
        """Raises SequenceExists where an engine has one of these, NotReady where one that may have
        some does not reply, SequenceMoving where another door makes or moves one for long."""
        members = self.calls.members
        members.check_all_respond()
        if taken := await self.taken(list(ids), members.engines, waits=True):
            raise SequenceExists([name for name in ids if name in taken])

    async def confirm(self, made: Mapping[str, Engine], chosen: Collection[str]) -> None:
        """Looks for other sequences of the chosen ones of the ids just made; then others may call
        all of them. Where there are others, or that cannot be known, deletes all that were made and
        raises SequenceExists, NotReady. Raises DeadlineExceeded where an engine does not reply to
        the confirmation."""
        try:
            if twice := await self.elsewhere({name: made[name] for name in chosen}):
                raise SequenceExists([name for name in made if name in twice])
            self.calls.members.check_reachable()
        except BaseException:
            await self.undo(made)
            raise
        confirmed = await asyncio.shield(self.set_state(made, "back"))
        for error in confirmed:
            if not isinstance(error, EngineReply):
                text = f"new sequences were not confirmed within {ASK_S:g} s"
                raise DeadlineExceeded(f"{text}: they may have been made") from error

    async def undo(self, made: Mapping[str, Engine]) -> None:
        """Deletes sequences of a call that has failed; at an engine that does not reply they
        expire."""
        await asyncio.shield(self.set_state(made, "gone"))

    async def undo_when_back(self, tag: str, names: list[str]) -> None:
        """Deletes sequences that an engine may have made before its session ended, once it comes
        back with them. Only for ids that no caller knows: a chosen one may be in use again."""
        members, tenant = self.calls.members, self.calls.members.acting_for(self.call.tenant)
        while not members.is_dead(tag):
            if (engine := members.by_tag.get(tag)) is not None:
                with suppress(ProblemText, AttndError):
                    await engine.question(DELETE_SEQUENCES, tenant, {"ids": names}, is_poll=True)
                    return
            await asyncio.sleep(LOOK_S)

    async def set_state(
        self, made: Mapping[str, Engine], state: str
    ) -> list[EngineReply | BaseException]:
        """Has the engines of new sequences keep them (`back`) or delete them (`gone`)."""
        asked = [(home.tag, {"id": name, "state": state}) for name, home in made.items()]
        return await results_in_turn(MAX_PARALLEL, self.ask, asked)

    async def ask(self, tag: str, fields: Mapping[str, Any]) -> EngineReply:
        """The reply of the engine of a tag, also of a silent one; asked again while its queue is
        full."""
        members = self.calls.members
        engine = members.by_tag.get(tag)
        if engine is None:
            raise NotReady("the session with its engine has ended")
        tenant = members.acting_for(self.call.tenant)
        call = engine.own(HAND_OVER, tenant, is_poll=True)
        while True:
            try:
                return await engine.ask(call, fields)
            except (ProblemText, AttndError) as error:
                if outcome_of(error) is not Outcome.FULL or not call.may_retry():
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def elsewhere(self, made: Mapping[str, Engine]) -> set[str]:
        """The ids that other engines than those of `made` have as well. Looks twice while sequences
        may be moving from an engine that is asked late to one that is asked early."""
        engines = self.calls.members.engines
        found: set[str] = set()
        for _ in range(1 if all(engine.takes_new for engine in engines) else 2):
            looks = []
            for engine in engines:
                others = [one for one, home in made.items() if engine is not home]
                if others:
                    looks.append(self.taken(others, [engine], waits=False))
            for names in await gather_all(looks):
                found |= names
        return found

    async def taken(self, names: list[str], engines: Iterable[Engine], *, waits: bool) -> set[str]:
        """Those of the ids that some of `engines` have. `waits` until those that others make or
        move are there or are not."""
        locator, tenant = self.calls.locator, self.call.tenant
        acting = self.calls.members.acting_for(tenant)
        holders = await locator.holders(names, tenant, engines)

        async def is_there(name: str, engine: Engine) -> bool:
            while (state := await state_at(engine, name, acting)) == "moving" and waits:
                if not self.call.may_retry():
                    raise SequenceMoving([name])
                await asyncio.sleep(RETRY_PAUSE_S)
            return state is not None

        there = whole(await results_in_turn(MAX_PARALLEL, is_there, holders.items()))
        return {name for name, is_taken in zip(holders, there, strict=True) if is_taken}
