"""The worker process that converts long JSON to images and back, in the door's arena."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from attnd.wire.dtypes import Part

from service.errors import AttndError, Internal, problem
from service.image.json_body import image_of_json, json_of_image
from service.image.json_text import dump_json

Converted = tuple[Sequence[Part], dict[str, Any]]
"""The output in parts, and what else the door needs to know."""


@dataclass(frozen=True, slots=True)
class Order:
    """Convert `length` bytes of the arena at `offset` into `room` bytes at `into`. `given` are the
    fields in path and query, or parameters of the Open Inference Protocol."""

    conversion: str
    offset: int
    length: int
    room: int
    given: dict[str, Any]
    into: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The length of the output, which was not written if it exceeds the room; or an error's problem
    document."""

    length: int
    found: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def inference(name: str) -> Callable[[memoryview, dict[str, Any]], Converted]:
    """A conversion of the Open Inference Protocol, whose import takes 0.3 s."""

    def convert(source: memoryview, given: dict[str, Any]) -> Converted:
        from service.doors.oip import answer

        found: Converted = getattr(answer, name)(source, given)
        return found

    return convert


CONVERSIONS: Final[dict[str, Callable[[memoryview, dict[str, Any]], Converted]]] = {
    "image_of_json": lambda source, given: (image_of_json(bytes(source), given), {}),
    "json_of_image": lambda source, given: ([json_of_image(source)], {}),
    "image_of_inference": inference("image_of_request"),
    "inference_of_image": inference("answer_of_image"),
}


def main(orders: int, arena: int) -> None:
    memory = memoryview(b"")
    with Connection(orders) as door:
        while True:
            try:
                order: Order = door.recv()
            except EOFError:
                return
            if max(order.offset + order.length, order.into + order.room) > len(memory):
                memory = memoryview(mmap.mmap(arena, os.fstat(arena).st_size))  # it has grown
            door.send(run(order, memory))


def run(order: Order, memory: memoryview) -> Result:
    source = memory[order.offset : order.offset + order.length]
    try:
        parts, found = CONVERSIONS[order.conversion](source, order.given)
    except Exception as error:
        known = error if isinstance(error, AttndError) else Internal(f"{type(error).__name__}")
        return Result(0, problem=dump_json(problem(known)))
    length = sum(map(len, parts))
    if length <= order.room:
        at = order.into
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
    return Result(length, found)


if __name__ == "__main__":
    # pickled orders name the module, not `__main__`
    from service.doors.http.long_json_worker import main as work

    work(*map(int, sys.argv[1:]))
