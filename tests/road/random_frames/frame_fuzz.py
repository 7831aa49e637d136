"""Conversations of hostile callers: streams of frames, most of them right, the rest broken.

`conversation` makes one from a seed and knows no engine, so it can be sent to a real one as well as
to a session by itself (`fuzz.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from attnd.wire import frames as f

ARENA_BYTES: Final = 2**16
NUMBERS: Final = tuple(range(1, 16))
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
class Sent:
    """One frame of a conversation. `fatal`: the session must end on it; None: either."""

    data: bytes
    fatal: bool | None = False
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A caller's frames, and the pieces in which their bytes arrive."""

    frames: tuple[Sent, ...]
    pieces: tuple[bytes, ...]


def conversation(
    seed: int, *, numbers: Sequence[int] = NUMBERS, arena_bytes: int = ARENA_BYTES
) -> Conversation:
    """One caller's life, the same for the same seed; up to 100 frames."""
    rng = random.Random(seed)
    frames = [Sent(hello(arena_bytes))] if rng.random() < 0.95 else []
    for _ in range(rng.randrange(1, 100)):
        move = rng.choices(MOVES, WEIGHTS)[0]
        frames.append(move(rng, numbers, arena_bytes))
    return Conversation(tuple(frames), tuple(cut(rng, b"".join(one.data for one in frames))))


def with_images(
    talk: Conversation, secret: str, max_arena_bytes: int, rng: random.Random
) -> Conversation:
    """The same over TCP: HELLO is a door's, and the image of every CALL follows its frame."""
    frames = []
    for sent in talk.frames:
        kind = int.from_bytes(sent.data[:2], "little")
        if sent.data == hello(ARENA_BYTES):
            text = {"version": 1, "door": True, "secret": secret, "arena_bytes": ARENA_BYTES}
            frames.append(Sent(f.frame(f.HELLO, json.dumps(text).encode()), sent.fatal))
        elif kind == f.CALL and len(sent.data) == f.CALL_FRAME.size and sent.is_call:
            length = f.CALL_PAYLOAD.unpack_from(sent.data, f.HEADER_BYTES)[5]
            too_long = length > max_arena_bytes
            image = b"" if too_long else rng.randbytes(min(length, 64)).ljust(length, b"\0")
            fatal = True if too_long and sent.fatal is False else sent.fatal
            frames.append(Sent(sent.data + image, fatal, is_call=not too_long))
        else:
            frames.append(sent)
    return Conversation(tuple(frames), tuple(cut(rng, b"".join(one.data for one in frames))))


def hello(arena_bytes: int) -> bytes:
    text = {"version": 1, "name": "fuzz", "door": False, "arena_bytes": arena_bytes}
    return f.frame(f.HELLO, json.dumps(text).encode())


def cut(rng: random.Random, stream: bytes) -> list[bytes]:
    """The stream in pieces, some of a byte, some of many frames; a third ends in mid-frame."""
    if rng.random() < 0.3:
        stream = stream[: rng.randrange(len(stream) + 1)]
    pieces = []
    begin = 0
    while begin < len(stream):
        size = rng.choice((1, 7, 8, 72, 73, 200, 1000, 5000))
        pieces.append(stream[begin : begin + size])
        begin += size
    return pieces


def call_frame(
    rng: random.Random, numbers: Sequence[int], arena_bytes: int, **broken: int
) -> bytes:
    """A CALL whose places are in the arena, apart from `broken`."""
    places = arena_bytes // 64
    request, answer = rng.randrange(places) * 64, rng.randrange(places) * 64
    values = {
        "id": rng.getrandbits(64),
        "route": rng.choice(numbers),
        "reserved": 0,
        "deadline_us": rng.choice((0, 0, 1, 1000, 2**32 - 1)),
        "request": request,
        "length": rng.randrange(arena_bytes - request + 1),
        "answer": answer,
        "capacity": rng.randrange(arena_bytes - answer + 1),
    } | broken
    return f.frame(f.CALL, f.CALL_PAYLOAD.pack(*values.values(), rng.randbytes(16)))


def good_call(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    return Sent(call_frame(rng, numbers, arena_bytes), is_call=True)


def misplaced_call(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    field = rng.choice(("request", "length", "answer", "capacity"))
    value = rng.choice((*EDGES, rng.getrandbits(64), rng.getrandbits(17)))
    return Sent(call_frame(rng, numbers, arena_bytes, **{field: value}), is_call=True)


def lost_call(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    route = rng.choice((0, 99, 2**16 - 1, rng.getrandbits(16)))
    return Sent(call_frame(rng, numbers, arena_bytes, route=route), is_call=True)


def repeated_call(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    """One of a few ids: right when the one before is answered, fatal when it still waits."""
    data = call_frame(rng, numbers, arena_bytes, id=rng.randrange(3))
    return Sent(data, fatal=None, is_call=True)


def reserved_call(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    data = call_frame(rng, numbers, arena_bytes, reserved=rng.randrange(1, 2**16))
    return Sent(data, fatal=True)


def cancel(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    number = rng.choice((0, 1, 2, rng.getrandbits(64)))
    return Sent(f.frame(f.CANCEL, f.CALL_ID.pack(number)))


def grow(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    size = rng.choice((0, 1, arena_bytes + 1, arena_bytes * 2, 2**62))
    return Sent(f.frame(f.GROW, b'{"arena_bytes":%d}' % size))


def second_hello(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    return Sent(hello(arena_bytes), fatal=None)  # the first one, when none came before


def rubbish(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    text = rng.choice((*RUBBISH, rng.randbytes(rng.randrange(64))))
    kind = rng.choice((f.HELLO, f.GROW))
    harmless = kind == f.GROW and b'"arena_bytes":4096' in text  # keys not known are passed over
    return Sent(f.frame(kind, text), fatal=not harmless)


def wrong_size(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    kind, right = rng.choice(((f.CALL, 64), (f.CANCEL, 8)))
    size = rng.choice([size for size in (0, 1, 7, 9, 63, 65, 80, 4096) if size != right])
    return Sent(f.frame(kind, rng.randbytes(size)), fatal=True)


def wrong_header(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    kind = rng.choice((0, 2, 4, 15, 17, 19, 20, 21, 22, 2**16 - 1))
    flags, size = rng.choice((0, 0, 1, 2**15)), rng.choice((0, 8, 64, 2**16 + 1, 2**32 - 1))
    return Sent(f.HEADER.pack(kind, flags, size) + rng.randbytes(8), fatal=True)


def huge_frame(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    size = rng.choice((f.MAX_JSON_BYTES + 1, 2**31, 2**32 - 1))
    return Sent(f.HEADER.pack(rng.choice((f.HELLO, f.GROW)), 0, size), fatal=True)


def flipped(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    data = bytearray(call_frame(rng, numbers, arena_bytes))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return Sent(bytes(data), fatal=None)


def noise(rng: random.Random, numbers: Sequence[int], arena_bytes: int) -> Sent:
    return Sent(rng.randbytes(rng.randrange(1, 200)), fatal=None)


Move = Callable[[random.Random, Sequence[int], int], Sent]
MIX: Final[tuple[tuple[Move, float], ...]] = (
    (good_call, 600),
    (misplaced_call, 150),
    (lost_call, 50),
    (cancel, 80),
    (repeated_call, 3),
    (grow, 20),
    (reserved_call, 1),
    (second_hello, 1),
    (rubbish, 2),
    (wrong_size, 2),
    (wrong_header, 2),
    (huge_frame, 1),
    (flipped, 4),
    (noise, 1),
)
MOVES: Final = tuple(move for move, _ in MIX)
WEIGHTS: Final = tuple(weight for _, weight in MIX)
