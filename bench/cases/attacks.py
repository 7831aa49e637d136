"""Attacks of one namespace on its neighbours, as a table, and the attacker's process.

An attack sends a burst of calls again and again. Over a session, the calls of a burst share one
request slot and one answer slot of the arena, so that each costs the attacker a frame of 72 bytes.
Over HTTP each is a request of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from attnd import Client, NewSequence, Prefix, ServiceError, Session
from numpy.typing import NDArray

from bench.cases.loads import Heads
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.image.writing import image
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import Slot

HEADS: Final = Heads(num_qo=4, num_kv=1, dim=32)
PAGE: Final = 16
HTTP_AT_ONCE: Final = 32
ROAD_AT_ONCE: Final = 4000
"""Below the calls that one session may have in flight."""
ARENA_BYTES: Final = 192 * 2**20
SETUP_S: Final = 300.0
MADE_AT_ONCE: Final = 1000
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Door:
    """How to reach a service: `way` is "session" (at `path`) or "http" (at `url`)."""

    way: str
    url: str
    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Shot:
    """A call, and its number of repetitions in a burst."""

    operation: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Array] = field(default_factory=dict)
    times: int = 1
    answer_bytes: int = 2**16


Burst = Callable[[], Iterable[Shot]]


@dataclass(frozen=True, slots=True)
class Attack:
    """`prepare` creates the burst's sequences by a client, before the measurement.

    `heads`: number of HTTP heads with large declared lengths whose bodies never come.
    `stops_engine`: an engine of the cluster is stopped (SIGSTOP) during the attack.
    `reads_no_log`: the service's log goes to a pipe without a reader.
    """

    name: str
    burst: Burst
    prepare: Callable[[Any], object] | None = None
    heads: int = 0
    stops_engine: bool = False
    reads_no_log: bool = False
    ways: tuple[str, ...] = ("session", "http")

    @property
    def is_apart(self) -> bool:
        """Whether it needs a service of its own."""
        return self.stops_engine or self.reads_no_log

    def runs(self, service: str, way: str) -> bool:
        """Whether the attack applies to a service and a way."""
        return way in self.ways and not (self.stops_engine and service == "one engine")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The attacker's calls by status; "-" counts calls without an answer."""

    statuses: Mapping[str, int]

    def __str__(self) -> str:
        counts = (f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return ", ".join(counts) or "nothing"


# Preparations.


def ones(num_rows: int, heads: int = 1) -> Array:
    return np.ones((num_rows, heads, HEADS.dim), np.float16)


def fill(client: Any, names: Sequence[str], num_tokens: int) -> None:
    """Append `num_tokens` tokens to sequences, at both layers."""
    rows = ones(num_tokens)
    for layer, name in itertools.product(range(2), names):
        client.append(layer, [name], rows, rows, append_indptr=[0, num_tokens])


def make(client: Any, count: int, parent: str | None = None, name: str = "s") -> list[str]:
    """Create `count` sequences, forks of `parent` if it is given; returns their ids."""
    names = [f"{name}{number}" for number in range(count)]
    for first in range(0, count, MADE_AT_ONCE):
        some = names[first : first + MADE_AT_ONCE]
        client.create_sequences([NewSequence(one, parent=parent) for one in some])
    return names


def forks(client: Any, count: int, num_tokens: int) -> None:
    """A trunk of `num_tokens` tokens, and `count` forks `s0`, `s1`, ... of it."""
    client.create_sequences([NewSequence("trunk")])
    fill(client, ["trunk"], num_tokens)
    make(client, count, "trunk")


def apart(client: Any, count: int, num_tokens: int) -> None:
    """`count` sequences `s0`, `s1`, ... without common pages."""
    fill(client, make(client, count), num_tokens)


def chain(client: Any, depth: int) -> None:
    """A sequence, and `depth` forks, each of the one before with a page more."""
    client.create_sequences([NewSequence("s0")])
    rows = ones(PAGE)
    for number in range(depth):
        for layer in range(2):
            client.append(layer, [f"s{number}"], rows, rows, append_indptr=[0, PAGE])
        client.create_sequences([NewSequence(f"s{number + 1}", parent=f"s{number}")])


def cached(client: Any, num_pages: int) -> None:
    """A prompt of `num_pages` pages in the prefix cache."""
    client.create_sequences([NewSequence("prompt")])
    for _ in range(10):
        fill(client, ["prompt"], num_pages * PAGE // 10)
    client.commit("prompt", prompt(num_pages))


def prompt(num_pages: int) -> Prefix:
    return Prefix(token_ids=np.arange(num_pages * PAGE, dtype=np.uint32))


def ids(count: int, name: str = "s") -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def each(shot: Shot) -> Burst:
    return lambda: [shot]


# The attacks.

LONG_HEADER: Final = Shot(
    "gather", {"layer": 0, "sequences": [f"{n:05d}" + "x" * 112 for n in range(15000)]}, times=300
)
MANY_VALUES: Final = Shot(
    "match_prefix", {"token_ids": list(range(240_000)), "lease_s": 0.0}, times=300
)


def marks() -> Iterable[Shot]:
    for name in ids(20_000):
        fields = {"id": name, "state": "leaving", "for_s": 60.0}
        yield Shot("hand_over", fields, answer_bytes=2**12)


def deep_prefixes() -> Iterable[Shot]:
    tokens = np.tile(np.arange(20_000 * PAGE, dtype=np.uint32), 1)
    new: list[dict[str, Any]] = [{"prefix": {}} for _ in range(40)]
    indptr = [tokens.size * one for one in range(41)]
    fields = {"sequences": new, "prefix_indptr": indptr}
    yield Shot("create_sequences", fields, {"token_ids": np.tile(tokens, 40)}, 4)


ATTACKS: Final = (
    Attack("none", each(Shot("get_sequence", {"id": "absent"}))),
    Attack("S10 300 calls of 1.8 MB headers", each(LONG_HEADER)),
    Attack("S10 300 calls of 240,000 numbers", each(MANY_VALUES)),
    Attack(
        "S11 256 page tables of 2,000 forks",
        each(Shot("page_table", {"sequences": ids(2000)}, times=256, answer_bytes=2**24)),
        lambda client: forks(client, 2000, 64 * PAGE),
    ),
    Attack(
        "S11 page tables of 4,000 forks of 60 pages",
        each(Shot("page_table", {"sequences": ids(4000)}, times=8, answer_bytes=2**26)),
        lambda client: forks(client, 4000, 60 * PAGE),
    ),
    Attack(
        "S11 256 gathers of 32,000 rows",
        each(Shot("gather", {"layer": 0, "sequences": ids(16)}, times=256, answer_bytes=2**23)),
        lambda client: apart(client, 16, 2000),
    ),
    Attack(
        "S11 100 decodes of 64 x 2,000 in flight",
        each(
            Shot(
                "decode",
                {"layer": 0, "sequences": ids(64)},
                {"q": ones(64, HEADS.num_qo)},
                times=100,
            )
        ),
        lambda client: apart(client, 64, 2000),
    ),
    Attack(
        "S12 gathers of nothing of 4,096 forks",
        each(
            Shot(
                "gather",
                {"layer": 0, "sequences": ids(4096), "start": 0, "stop": 0},
                times=48,
                answer_bytes=2**20,
            )
        ),
        lambda client: forks(client, 4096, 512 * PAGE),
    ),
    Attack(
        "S12 decodes of 4,096 empty sequences",
        each(
            Shot(
                "decode",
                {"layer": 0, "sequences": ids(4096)},
                {"q": ones(4096, HEADS.num_qo)},
                times=48,
                answer_bytes=2**22,
            )
        ),
        lambda client: make(client, 4096),
    ),
    Attack(
        "S13 pool beside a chain of 4,000 forks",
        each(Shot("pool", {}, times=16)),
        lambda client: chain(client, 4000),
    ),
    Attack(
        "S14 create and delete 30,000",
        lambda: [
            Shot(
                "create_sequences",
                {"sequences": [{"id": one} for one in ids(30_000)]},
                answer_bytes=2**24,
            ),
            Shot("delete_sequences", {"prefix": ""}),
        ],
    ),
    Attack(
        "S14 create 40 with prefixes of 20,000 pages",
        deep_prefixes,
        lambda client: cached(client, 20_000),
    ),
    Attack(
        "S14 page tables of a chain of 3,000",
        each(Shot("page_table", {"sequences": ids(3000)}, times=64, answer_bytes=2**26)),
        lambda client: chain(client, 3000),
    ),
    Attack("S15 98 heads without bodies", lambda: (), heads=98, ways=("http",)),
    Attack(
        "S16 20,000 leaving marks",
        marks,
        lambda client: make(client, 20_000),
        ways=("session",),
    ),
    Attack(
        "S17 an engine of the cluster is stopped",
        each(Shot("list_sequences", {}, times=64)),
        stops_engine=True,
    ),
    Attack(
        "S18 the log has no reader",
        each(Shot("get_sequence", {"id": "absent"}, times=1000)),
        reads_no_log=True,
        ways=("http",),
    ),
)


# The attacker.


def run_attack(attack: Attack, door: Door, seconds: float, pipe: Any) -> None:
    """Prepare, wait for the pipe, send bursts for `seconds`, then send the outcome."""
    if door.way == "session":
        client: Any = Session(door.path, api_key=door.key, timeout=SETUP_S)
    else:
        client = Client(door.url, api_key=door.key, timeout=SETUP_S)
    with client:
        with suppress(ServiceError):
            client.delete_sequences(prefix="")
            client.clear()
        if attack.prepare is not None:
            attack.prepare(client.with_options(deadline=SETUP_S))
    statuses: Counter[str] = Counter()

    def begin() -> None:
        pipe.send("prepared")
        pipe.recv()

    shoot = over_road if door.way == "session" else over_http
    asyncio.run(shoot(attack, door, seconds, statuses, begin))
    pipe.send(Outcome(dict(statuses)))


def parts_of(shot: Shot) -> list[Any]:
    return image(REQUEST, dump_json(dict(shot.fields)), shot.tensors)


async def over_road(
    attack: Attack, door: Door, seconds: float, statuses: Counter[str], begin: Callable[[], object]
) -> None:
    road = await RoadCaller.connect(door.path, ARENA_BYTES, name="attacker", key=door.key)
    shots: list[tuple[Shot, Slot, int, Slot]] = []
    for shot in attack.burst():
        body = b"".join(bytes(part) for part in parts_of(shot))
        request = road.take(len(body))
        request.view(len(body))[:] = body
        shots.append((shot, request, len(body), road.take(shot.answer_bytes)))
    begin()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and shots:
        calls = [
            asyncio.ensure_future(
                road.call(BY_NAME[shot.operation].number, request, length, answer)
            )
            for shot, request, length, answer in shots
            for _ in range(shot.times)
        ]
        for first in range(0, len(calls), ROAD_AT_ONCE):
            await asyncio.wait(calls[first : first + ROAD_AT_ONCE], timeout=ends - time.monotonic())
        for one in calls:
            statuses[status_of(one)] += 1
        if road.lost or not all(one.done() for one in calls):
            break


def status_of(call: asyncio.Future[Answered]) -> str:
    """A call's status, the name of its error, or "-" without an answer."""
    if not call.done():
        return "-"
    error = call.exception()
    return str(call.result().status) if error is None else type(error).__name__


async def over_http(
    attack: Attack, door: Door, seconds: float, statuses: Counter[str], begin: Callable[[], object]
) -> None:
    requests = [
        raw for shot in attack.burst() for raw in [as_http(shot, door)] for _ in range(shot.times)
    ]
    port = urlsplit(door.url).port
    opened = []
    begin()
    ends = time.monotonic() + seconds
    for _ in range(attack.heads):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("POST", "/v1/append", door.key, 10 * 2**20))
        opened.append(writer)
    shots = itertools.cycle(requests)

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**27)
        while time.monotonic() < ends:
            for part in next(shots):
                writer.write(part)
            await writer.drain()
            statuses[await answered(reader)] += 1

    workers = [asyncio.ensure_future(worker()) for _ in range(HTTP_AT_ONCE if requests else 0)]
    if workers:
        await asyncio.wait(workers, timeout=seconds)
    else:
        await asyncio.sleep(seconds)
    left = [one for one in workers if not one.done()]
    statuses["-"] += len(left)
    for one in left:
        one.cancel()
    for one in workers:
        if one.done() and not one.cancelled() and one.exception() is not None:
            statuses[type(one.exception()).__name__] += 1
    if not statuses["-"]:
        del statuses["-"]


def as_http(shot: Shot, door: Door) -> tuple[bytes, ...]:
    """A request, whole."""
    operation, fields = BY_NAME[shot.operation], dict(shot.fields)
    path = operation.path
    for name in operation.path_names:
        path = path.replace(f"{{{name}}}", str(fields.pop(name)))
    if not operation.has_body:
        return (head(operation.method, path, door.key, None),)
    if operation.has_tensors:
        body = b"".join(bytes(part) for part in parts_of(shot))
        return head(operation.method, path, door.key, len(body)), body
    body = json.dumps(fields).encode()
    return head(operation.method, path, door.key, len(body), "application/json"), body


def head(
    method: str, path: str, key: str, length: int | None, kind: str = "application/vnd.safetensors"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    if length is not None:
        lines += [f"Content-Type: {kind}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def answered(reader: asyncio.StreamReader) -> str:
    """Read an answer; returns its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    await reader.readexactly(length)
    return head.split(b" ", 2)[1].decode()
