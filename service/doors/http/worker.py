"""The process that turns long JSON into images and back, in the door's arena: `helper.py` runs it.

It reads orders from a socket until that ends: what to do, the place of what is given and of what is
to be written in the arena, and the fields that path and query gave.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from struct import Struct
from typing import Final

from service.errors import AttndError, Internal, problem
from service.image.json_body import image_of_json, json_of_image
from service.image.json_text import dump_json

ORDER: Final = Struct("<BQQQQI")
"""What to do; offset and length of what is given; offset and length of the room for what is
written; length of the given fields' JSON, which follows."""
OUTCOME: Final = Struct("<BQI")
"""How it went; length of what was written; length of the problem's JSON, which follows."""
TO_IMAGE: Final = 1
TO_JSON: Final = 2
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
        if kind == TO_IMAGE:
            parts = image_of_json(bytes(source), json.loads(given))
        else:
            parts = [json_of_image(source)]
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
    return OUTCOME.pack(DONE, length, 0)


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
