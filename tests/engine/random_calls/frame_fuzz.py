"""Conversations of hostile callers: streams of frames, most of them right, the rest broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from attnd.wire import frames as f

ROUTES: Final = tuple(range(1, 16))
EDGES: Final = (0, 1, 63, 64, 2**16 - 64, 2**16, 2**18, 2**31, 2**32, 2**63 - 64, 2**63, 2**64 - 64)
RUBBISH: Final = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"version":1}',
    b'{"version":2,"name":"","door":false,"arena_bytes":4096}',
    b'{"version":true,"name":"x","door":false,"arena_bytes":4096}',
    b'{"version":1,"name":"a\\nb","door":false,"arena_bytes":4096}',
    b'{"version":1,"name":"x","door":1,"arena_bytes":4096}',
    b'{"version":1,"name":"x","door":false,"arena_bytes":-1}',
    b'{"version":1,"name":"x","door":false,"arena_bytes":1e3}',
    b'{"version":1,"arena_bytes":1,"arena_bytes":2}',
    b'{"arena_bytes":NaN}',
    b'{"arena_bytes":' + b"9" * 5000 + b"}",
    b"[" * 3000,
    b'{"a":' * 2000,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A caller's frames, and the pieces in which their bytes arrive."""

    frames: tuple[bytes, ...]
    pieces: tuple[bytes, ...]


def conversation(seed: int, arena_bytes: int) -> Conversation:
    """One caller's life, the same for the same seed; up to 100 frames."""
    rng = random.Random(seed)
    frames = [hello(arena_bytes)] if rng.random() < 0.95 else []
    for move in rng.choices([*MIX], [*MIX.values()], k=rng.randrange(1, 100)):
        frames.append(move(rng, arena_bytes))
    return Conversation(tuple(frames), tuple(cut(rng, b"".join(frames))))


def hello(arena_bytes: int) -> bytes:
    text = {"version": 1, "name": "fuzz", "door": False, "arena_bytes": arena_bytes}
    return f.frame(f.HELLO, json.dumps(text).encode())


def cut(rng: random.Random, stream: bytes) -> list[bytes]:
    """The stream in pieces, some of a byte, some of many frames; a third ends in mid-frame."""
    if rng.random() < 0.3:
        stream = stream[: rng.randrange(len(stream) + 1)]
    pieces = []
    while stream:
        size = rng.choice((1, 7, 8, 72, 73, 200, 1000, 5000))
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


def call_frame(rng: random.Random, arena_bytes: int, **broken: int) -> bytes:
    """A CALL whose places are in the arena, apart from `broken`."""
    places = arena_bytes // 64
    request, answer = rng.randrange(places) * 64, rng.randrange(places) * 64
    values = {
        "id": rng.getrandbits(64),
        "route": rng.choice(ROUTES),
        "reserved": 0,
        "deadline_us": rng.choice((0, 0, 1, 1000, 2**32 - 1)),
        "request": request,
        "length": rng.randrange(arena_bytes - request + 1),
        "answer": answer,
        "capacity": rng.randrange(arena_bytes - answer + 1),
    } | broken
    return f.frame(f.CALL, f.CALL_PAYLOAD.pack(*values.values(), rng.randbytes(16)))


def misplaced_call(rng: random.Random, arena_bytes: int) -> bytes:
    field = rng.choice(("request", "length", "answer", "capacity"))
    value = rng.choice((*EDGES, rng.getrandbits(64), rng.getrandbits(17)))
    return call_frame(rng, arena_bytes, **{field: value})


def lost_call(rng: random.Random, arena_bytes: int) -> bytes:
    return call_frame(rng, arena_bytes, route=rng.choice((0, 99, 2**16 - 1, rng.getrandbits(16))))


def repeated_call(rng: random.Random, arena_bytes: int) -> bytes:
    """One of a few ids: right when the one before is answered."""
    return call_frame(rng, arena_bytes, id=rng.randrange(3))


def reserved_call(rng: random.Random, arena_bytes: int) -> bytes:
    return call_frame(rng, arena_bytes, reserved=rng.randrange(1, 2**16))


def cancel(rng: random.Random, _: int) -> bytes:
    return f.frame(f.CANCEL, f.CALL_ID.pack(rng.choice((0, 1, 2, rng.getrandbits(64)))))


def grow(rng: random.Random, arena_bytes: int) -> bytes:
    size = rng.choice((0, 1, arena_bytes + 1, arena_bytes * 2, 2**62))
    return f.frame(f.GROW, b'{"arena_bytes":%d}' % size)


def second_hello(_: random.Random, arena_bytes: int) -> bytes:
    return hello(arena_bytes)


def rubbish(rng: random.Random, _: int) -> bytes:
    text = rng.choice((*RUBBISH, rng.randbytes(rng.randrange(64))))
    return f.frame(rng.choice((f.HELLO, f.GROW)), text)


def wrong_size(rng: random.Random, _: int) -> bytes:
    return f.frame(
        rng.choice((f.CALL, f.CANCEL)), rng.randbytes(rng.choice((0, 7, 9, 63, 65, 4096)))
    )


def wrong_header(rng: random.Random, _: int) -> bytes:
    kind = rng.choice((0, 2, 4, 15, 17, 19, 20, 21, 22, f.HELLO, f.GROW, 2**16 - 1))
    size = rng.choice((0, 8, 64, f.MAX_JSON_BYTES + 1, 2**31, 2**32 - 1))
    return f.HEADER.pack(kind, rng.choice((0, 0, 1, 2**15)), size) + rng.randbytes(8)


def flipped(rng: random.Random, arena_bytes: int) -> bytes:
    data = bytearray(call_frame(rng, arena_bytes))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def noise(rng: random.Random, _: int) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


MIX: Final[dict[Callable[[random.Random, int], bytes], float]] = {
    call_frame: 600,
    misplaced_call: 150,
    lost_call: 50,
    cancel: 80,
    repeated_call: 3,
    grow: 20,
    reserved_call: 1,
    second_hello: 1,
    rubbish: 2,
    wrong_size: 2,
    wrong_header: 3,
    flipped: 4,
    noise: 1,
}
