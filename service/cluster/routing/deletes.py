"""Deletes many sequences over all engines, also while some are moving.

Each engine deletes its sequences, and lists those that are moving, which are deleted one by one. A
sequence may reach an engine after that was asked and leave another before that is, so the engines
are asked again until nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from service.cluster.membership.engine import Call, RawReply
from service.cluster.membership.members import Members
from service.cluster.routing.broadcast import ask_all
from service.cluster.routing.replies import reply, results_in_turn
from service.cluster.routing.sequence_calls import SequenceCalls, joint_error
from service.errors import InvalidRequest, LostSequence, UnknownSequence
from service.operations.schema.spec import Prepared
from service.operations.sequences import DELETE_SEQUENCE, MAX_LISTED

MAX_PARALLEL: Final = 64
"""Sequences that are deleted one by one at the same time."""
MAX_LOOKS: Final = 4
"""Others may keep making sequences with this prefix."""


@dataclass(frozen=True, slots=True)
class Deletes:
    """The `delete_sequences` of one router."""

    members: Members
    calls: SequenceCalls

    async def call(self, call: Call, prepared: Prepared) -> RawReply:
        """The number of deleted sequences. After an error each is there or is not, and the same
        call deletes the rest."""
        fields = prepared.fields
        if fields.skip:
            rule = "is for one engine: a cluster deletes whole sequences"
            raise InvalidRequest("skip", True, rule)
        wanted = None if fields.prefix is not None else len(fields.names)
        request = fields.model_dump(exclude_unset=True) | {"skip": True}
        total = looks = 0
        if fields.prefix is not None:
            self.members.check_all_respond()
        while total != wanted and looks < MAX_LOOKS:
            changes = self.members.changes
            replies = [one.fields for _, one in await ask_all(self.members, call, request)]
            skipped = sorted({name for one in replies for name in one["skipped"]})
            deleted = sum(one["num_deleted"] for one in replies)
            total += deleted + await self.one_by_one(call, skipped)
            has_changed = self.members.changes != changes  # an engine may have come unasked
            if looks and not (deleted or skipped or has_changed):
                break
            looks += all(len(one["skipped"]) < MAX_LISTED for one in replies)
        if total != wanted:
            self.members.check_reachable()
        self.calls.locator.forget(call, fields.names)
        self.calls.prompts.end(call.tenant.namespace, fields.names)
        return reply(self.members.arena, call, {"num_deleted": total})

    async def one_by_one(self, call: Call, names: Sequence[str]) -> int:
        """The number of these that existed. Raises an error when all have been tried."""
        results = await results_in_turn(MAX_PARALLEL, self.delete, [(call, name) for name in names])
        if errors := [one for one in results if isinstance(one, BaseException)]:
            done = [name for name, one in zip(names, results, strict=True) if one is True]
            raise joint_error(errors, done)
        return sum(one is True for one in results)

    async def delete(self, call: Call, name: str) -> bool:
        """Deletes a sequence; whether it existed."""
        single = replace(call, operation=DELETE_SEQUENCE)
        try:
            await self.calls.ask(single, [name], {"id": name}, {}, changes=True)
        except (UnknownSequence, LostSequence):
            return False
        self.calls.locator.forget(call, [name])
        return True
