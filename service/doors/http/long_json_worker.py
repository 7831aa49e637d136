"""The process that converts long JSON to images and back, in the door's arena (`long_json.py`).

It reads orders from a socket until that ends: what to do, the place of what is given and of what is
to be written in the arena, and what else there is to know (the fields that path and query gave).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from attnd.wire.dtypes import Part

from service.errors import AttndError, Internal, problem
from service.image.json_body import image_of_json, json_of_image
from service.image.json_text import dump_json

ORDER: Final = Struct("<BQQQQI")
"""What to do; offset and length of what is given; offset and length of the room for what is
written; length of the given fields' JSON, which follows."""
OUTCOME: Final = Struct("<BQI")
"""How it went; length of what was written; length of the JSON that follows: the problem's, or what
else is told."""
TO_IMAGE: Final = 1
TO_JSON: Final = 2
INFERENCE_TO_IMAGE: Final = 3
IMAGE_TO_INFERENCE: Final = 4
DONE: Final = 0
FAILED: Final = 1
TOO_LONG: Final = 2
"""Nothing was written: the length is what it would have taken."""


def main(orders: int, arena: int) -> None:
    """Work until the door closes its end."""
    memory = memoryview(b"")
    with socket.socket(fileno=orders) as door:
        while head := receive(door, ORDER.size):
            kind, offset, length, place, room, size = ORDER.unpack(head)
            given = receive(door, size)
            if max(offset + length, place + room) > len(memory):  # the arena has grown
                memory = memoryview(mmap.mmap(arena, os.fstat(arena).st_size))
            source = memory[offset : offset + length]
            door.sendall(work(kind, source, memory[place : place + room], given))


def work(kind: int, source: memoryview, into: memoryview, given: bytes) -> bytes:
    """Carry out one order; its outcome as bytes to send."""
    try:
        parts, told = convert(kind, source, json.loads(given) if given else {})
    except Exception as error:
        known = error if isinstance(error, AttndError) else Internal(f"{type(error).__name__}")
        text = dump_json(problem(known)).encode()
        return OUTCOME.pack(FAILED, 0, len(text)) + text
    length = sum(map(len, parts))
    if length > len(into):
        return OUTCOME.pack(TOO_LONG, length, 0)
    at = 0
    for part in parts:
        into[at : at + len(part)] = part
        at += len(part)
    text = dump_json(told).encode()
    return OUTCOME.pack(DONE, length, len(text)) + text


def convert(
    kind: int, source: memoryview, given: dict[str, Any]
) -> tuple[Sequence[Part], dict[str, Any]]:
    """What is to be written, in parts, and what is to be told of it."""
    if kind == TO_IMAGE:
        return image_of_json(bytes(source), given), {}
    if kind == TO_JSON:
        return [json_of_image(source)], {}
    from service.doors.oip.long_json import answer_of_image, image_of_request

    return (image_of_request if kind == INFERENCE_TO_IMAGE else answer_of_image)(source, given)


def receive(door: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; none at the end."""
    data = b""
    while len(data) < size:
        piece = door.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
