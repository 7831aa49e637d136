"""A door's calls to the engine: the slots of an answer that is longer than was thought."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from attnd.wire.frames import NO_STAGES

from config.server import ServerSettings
from service.doors.kit.link import Link
from service.errors import AnswerTooLarge, Overloaded
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Mapping, Slot, Slots
from service.tenants import OPEN

MIB = 2**20


@dataclass
class Caller:
    """An engine that says that the answer needs more room; its arena does not grow."""

    slots: Slots
    needed: list[int]
    lost: str = ""
    places: list[Slot] = field(default_factory=list)

    def take(self, size: int) -> Slot:
        return self.slots.take(size)

    async def grow(self, size: int) -> int:
        return self.slots.size

    async def call(self, *given: Any, **how: Any) -> Answered:
        self.places.append(given[3])
        return Answered(200, memoryview(b""), self.needed.pop(0), NO_STAGES)


def asked(*needed: int) -> Any:
    """A call's result, its places, and the arena, when the engine needs these numbers of bytes."""

    async def main() -> Any:
        arena = os.memfd_create("arena")
        os.ftruncate(arena, MIB)
        link: Any = Link(ServerSettings())
        link.caller = caller = Caller(Slots(Mapping(arena, MIB)), list(needed))
        request = await link.slot(100)
        error: Exception | None = None
        try:
            _, place = await link.call(BY_NAME["gather"], request, 100, 8 * MIB, 0, b"", OPEN)
            link.give_back(place)
        except (Overloaded, AnswerTooLarge) as refused:
            error = refused
        taken = [await link.slot(size.size) for size in caller.places]
        link.give_back(request)
        for slot in taken:
            link.give_back(slot)
        link.spare.free()
        return error, caller, [slot.offset for slot in taken]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("needed", "kind"),
    [
        ((0,), type(None)),
        ((200_000, 0), type(None)),
        ((4 * MIB,), Overloaded),
        ((9 * MIB,), AnswerTooLarge),
        ((200_000, 4 * MIB), Overloaded),
    ],
)
def test_every_place_is_given_back_once(needed: tuple[int, ...], kind: type) -> None:
    error, caller, offsets = asked(*needed)
    assert type(error) is kind
    assert len(set(offsets)) == len(offsets) == len(needed)
    assert caller.slots.free() == MIB
