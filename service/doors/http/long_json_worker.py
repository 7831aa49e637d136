"""The worker process that converts long JSON to images and back, in the door's arena."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from attnd.wire.dtypes import Part

from service.errors import AttndError, Internal, problem
from service.image.json_body import image_of_json, json_of_image
from service.image.json_text import dump_json


@dataclass(frozen=True, slots=True)
class Order:
    """Convert `length` bytes of the arena at `offset` into `room` bytes at `into`. `given`: to an
    image, with these fields of path and query; None: an image to JSON."""

    given: dict[str, Any] | None
    offset: int
    length: int
    room: int
    into: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The length of the output, which was not written if it exceeds the room; or an error's problem
    document."""

    length: int
    problem: str = ""


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
        parts: Sequence[Part]
        if order.given is None:
            parts = [json_of_image(source)]
        else:
            parts = image_of_json(bytes(source), order.given)
    except Exception as error:
        known = error if isinstance(error, AttndError) else Internal(f"{type(error).__name__}")
        return Result(0, problem=dump_json(problem(known)))
    length = sum(map(len, parts))
    if length <= order.room:
        at = order.into
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
    return Result(length)


if __name__ == "__main__":
    # pickled orders name the module, not `__main__`
    from service.doors.http.long_json_worker import main as work

    work(*map(int, sys.argv[1:]))
