"""Tensors on their way between regions and the door's arena."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Final

from service.doors.oip.answer import read_answer
from service.doors.oip.memory import ClientMemory
from service.doors.oip.request import REGION_SIZE, Call, InRegion, Wanted
from service.doors.oip.shared_object import Opened, SharedObject, Span
from service.doors.upstream import Upstream
from service.errors import BodyTooLarge, InvalidRequest
from service.image.dtypes import Part
from service.road.slots import Slot

INLINE_BYTES: Final = 256 * 2**10
"""More than that is copied by a thread, while the event loop goes on."""
TOOK_EFFECT: Final = "the operation has taken effect, its answer is lost"


async def lay(
    link: Upstream, pieces: Sequence[Part | InRegion], memory: ClientMemory
) -> tuple[Slot, int]:
    """An image's pieces in a slot, and its length; those in regions are read straight into it.

    Raises Overloaded, NotReady, BodyTooLarge, and what `ClientMemory` does.
    """
    parts = [memory.span(one) if isinstance(one, InRegion) else one for one in pieces]
    spans = [one for one in parts if isinstance(one, Span)]
    if not spans:
        return await link.lay([one for one in parts if not isinstance(one, Span)])
    size, limit = sum(map(length, parts)), link.limits.max_body_bytes
    if size > limit:
        told = f"the tensors are {size} bytes, at most {limit} are read: send less at once"
        raise BodyTooLarge(told, size=size, limit=limit)
    slot = await link.slot(size)

    def fill() -> None:
        into, at = slot.view(size), 0
        with closing(memory.opened()) as opened:
            for one in parts:
                place = into[at : at + length(one)]
                if isinstance(one, Span):
                    opened.of(one).read(one, place)
                else:
                    place[:] = one
                at += len(place)

    try:
        await carry_out(fill, slot, size)
    except BaseException:
        link.give_back(slot)
        raise
    return slot, size


def length(one: Part | Span) -> int:
    return one.size if isinstance(one, Span) else len(one)


async def carry_out(copy: Callable[[], None], slot: Slot, size: int) -> None:
    """Do the copying; whoever waits for it may leave, the slot stays taken until it is done."""
    if size <= INLINE_BYTES:
        copy()
        return
    slot.hold()

    def is_done(work: asyncio.Future[None]) -> None:
        slot.free()
        if not work.cancelled():
            work.exception()  # whoever waited has it

    work = asyncio.get_running_loop().run_in_executor(None, copy)
    work.add_done_callback(is_done)
    await asyncio.shield(work)


class Targets:
    """The objects that a request's outputs are to be written to, open from before the call, so that
    all that can be wrong with them is found before anything is changed. To be closed."""

    __slots__ = ("opened", "spans", "wanted")

    def __init__(self, memory: ClientMemory, call: Call) -> None:
        """Raises NotSupported, NoSuchRoute, InvalidRequest."""
        self.wanted = call.wanted
        self.spans = {place.name: memory.span(place) for place in call.wanted.places}
        self.opened = memory.opened()
        if not self.spans:
            return
        check_room(call.wanted, state_bytes(call))
        try:
            check_apart([(self.opened.of(span), span) for span in self.spans.values()])
        except BaseException:
            self.close()
            raise

    async def write(self, slot: Slot, image: memoryview) -> None:
        """The outputs of an answer, from where it lies. Raises InvalidRequest."""
        if not self.spans:
            return
        answer = read_answer(image, self.wanted)
        sizes = {one.entry.name: one.size for one in answer.outputs}
        check_room(self.wanted, sizes)
        outputs = [one for one in answer.outputs if one.place is not None]
        opened, self.opened = self.opened, Opened(())  # closed by who writes, a thread maybe

        def write() -> None:
            try:
                for one in outputs:
                    span = self.spans[one.entry.name]
                    opened.found[span.name].write(span, answer.data(image, one))
            except InvalidRequest as error:
                rule = f"{error.rule}: {TOOK_EFFECT}"
                raise InvalidRequest(error.field, error.value, rule) from None
            finally:
                opened.close()

        await carry_out(write, slot, sum(one.size for one in outputs))

    def close(self) -> None:
        """After `write` there is nothing left to close."""
        self.opened.close()


def state_bytes(call: Call) -> dict[str, int]:
    """How long the outputs of attention will be: o is like q, lse has a float32 for each row and
    head. Of other operations, which change nothing, the answer shows it."""
    for one in call.tensors:
        if one.name == "q" and len(one.shape) == 3:
            return {"o": one.size, "lse": 4 * one.shape[0] * one.shape[1]}
    return {}


def check_room(wanted: Wanted, sizes: Mapping[str, int]) -> None:
    """Each output fits where it is to go. Raises InvalidRequest."""
    for place in wanted.places:
        if (needed := sizes.get(place.name, 0)) > place.size:
            rule = f"the output has {needed} bytes: give it as many"
            raise InvalidRequest(f"{place.name}.{REGION_SIZE}", place.size, rule)


def check_apart(placed: Sequence[tuple[SharedObject, Span]]) -> None:
    """No two outputs have a byte in common, by whichever regions. Raises InvalidRequest."""
    in_order = sorted(placed, key=lambda one: (one[0].identity, one[1].begin))
    for (one, before), (other, span) in pairwise(in_order):
        if one.identity == other.identity and span.begin < before.end:
            raise InvalidRequest(span.field, span.name, "another output is written there as well")
