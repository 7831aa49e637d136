"""Ids that callers choose exist once, whichever doors make them.

A door looks before it makes a sequence and again afterwards, so of two doors that make the same id
at once at least one sees the other's. Meanwhile a drain may move the new sequence: then its first
engine does not have it any more, and the one elsewhere is not another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from service.cluster.membership.engine import Call, Home
from service.cluster.routing.outcomes import Outcome, outcome_of
from service.cluster.routing.replies import gather_all
from service.cluster.routing.sequence_calls import SequenceCalls, joint_error
from service.cluster.routing.tags import tags_of
from service.doors.kit.problems import ProblemText
from service.errors import (
    AttndError,
    DeadlineExceeded,
    LostSequence,
    SequenceExists,
    UnknownSequence,
)
from service.operations.sequences import DELETE_SEQUENCE

UNDO_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """Keeps the ids of one router's new sequences unique, for one call."""

    calls: SequenceCalls
    call: Call

    async def refuse_taken(self, ids: Collection[str]) -> None:
        """Raises SequenceExists where an engine has one of these, NotReady where one that may have
        some does not reply."""
        members = self.calls.members
        members.check_all_respond()
        names = list(ids)
        if taken := await self.calls.locator.holders(names, self.call.tenant, members.engines):
            raise SequenceExists([name for name in names if name in taken])

    async def confirm(self, made: Mapping[str, Home], chosen: Collection[str]) -> None:
        """Looks for other sequences of the chosen ones of the ids just made, and remembers where
        all are. Where there are others, or that cannot be known, deletes all that were made and
        raises SequenceExists, NotReady."""
        left = dict(made)
        try:
            if twice := await self.twice({name: made[name] for name in chosen}):
                for name in twice:
                    del left[name]
                raise SequenceExists(twice)
            self.calls.members.check_reachable()
        except BaseException as error:
            if done := await self.undo(left):
                raise joint_error([error], done) from None
            raise

    async def twice(self, made: Mapping[str, Home]) -> list[str]:
        """The ids of which there were others; their new sequences are deleted."""
        twice: list[str] = []
        there = await self.elsewhere(made)
        for name, home in made.items():
            if name not in there:
                self.calls.locator.learn(self.call, [name], home)
            elif await self.delete_at(home, name):
                twice.append(name)
            else:  # a drain has moved it
                with suppress(UnknownSequence, LostSequence):
                    await self.calls.locator.find([name], self.call.tenant)
        return twice

    async def elsewhere(self, made: Mapping[str, Home]) -> set[str]:
        """The ids that other engines than those of `made` have as well. Looks twice while sequences
        may be moving from an engine that is asked late to one that is asked early."""
        engines = self.calls.members.engines
        found: set[str] = set()
        for _ in range(1 if all(engine.takes_new for engine in engines) else 2):
            looks = []
            for engine in engines:
                others = [one for one, home in made.items() if engine.tag not in tags_of(home.tag)]
                if others:
                    looks.append(self.calls.locator.holders(others, self.call.tenant, [engine]))
            for holders in await gather_all(looks):
                found |= holders.keys()
        return found

    async def delete_at(self, home: Home, name: str) -> bool:
        """Deletes a new sequence at its first engine; False where a drain has moved it away. Raises
        what engines raise."""
        delete = self.deletion(home)
        while True:
            try:
                await home.ask(delete, {"id": name})
                return True
            except (ProblemText, AttndError) as error:
                outcome = outcome_of(error)
                if outcome in (Outcome.UNKNOWN, Outcome.STALE):
                    return False
                if outcome is not Outcome.MOVING or not delete.may_retry():
                    raise
                await self.calls.retries.wait_for_move(delete, error)

    def deletion(self, home: Home) -> Call:
        tenant = self.calls.members.acting_for(self.call.tenant)
        # a silent engine has the sequence, too
        return home.own(DELETE_SEQUENCE, tenant, UNDO_S, is_poll=True)

    async def undo(self, made: Mapping[str, Home]) -> list[str]:
        """Deletes sequences of a call that has failed. Returns those that had left their engines:
        others have used or deleted them, or a drain has moved them. Raises DeadlineExceeded where
        an engine does not reply in time; the deletion goes on."""
        members = self.calls.members

        async def delete(name: str, home: Home) -> bool:
            try:
                return await self.delete_at(home, name)
            except (ProblemText, AttndError) as error:
                await members.wait_for_fate(tags_of(home.tag))
                if any(map(members.is_dead, tags_of(home.tag))):
                    return True
                text = f"{name} was made, and its engine does not reply: it may have been applied"
                raise DeadlineExceeded(text) from error

        deleting = [delete(name, home) for name, home in made.items()]
        deleted = await asyncio.shield(gather_all(deleting))
        return [name for name, is_deleted in zip(made, deleted, strict=True) if not is_deleted]
