"""The attacker's process: sends the bursts of an attack again and again.

Over a session, the calls of a burst share one request slot and one answer slot of the arena, so
that each costs the attacker a frame of 72 bytes. Over HTTP each is a request of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from attnd import Client, ServiceError, Session
from attnd.calls.call import Call, nothing
from attnd.http.messages import request_of
from attnd.http.origin import origin_of
from attnd.retries import Attempt
from attnd.wire.images import request_image

from bench.cases.attacks import Attack, Shot
from bench.driver.raw import LENGTH
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.caller_end.slots import Slot

HTTP_AT_ONCE: Final = 32
ROAD_AT_ONCE: Final = 4000
"""Below the calls that one session may have in flight."""
ARENA_BYTES: Final = 192 * 2**20
SETUP_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Door:
    """How to reach a service: `way` is "session" (at `path`) or "http" (at `url`)."""

    way: str
    url: str
    path: str
    key: str


def connected(door: Door, **options: Any) -> Any:
    """A `Session` or `Client` of the door."""
    if door.way == "session":
        return Session(door.path, api_key=door.key, **options)
    return Client(door.url, api_key=door.key, **options)


def prepare_attack(attack: Attack, door: Door) -> None:
    with connected(door, timeout=SETUP_S) as client:
        with suppress(ServiceError):
            client.delete_sequences(prefix="")
            client.clear()
        if attack.prepare is not None:
            attack.prepare(client.with_options(deadline=SETUP_S))


def run_attack(attack: Attack, door: Door, seconds: float, pipe: Any) -> None:
    """Prepare, wait for the pipe, send bursts for `seconds`, then send the number of calls by
    status; "-" counts calls without an answer."""
    if not attack.restarts:
        prepare_attack(attack, door)
    statuses: Counter[str] = Counter()

    def begin() -> None:
        pipe.send("prepared")
        pipe.recv()

    shoot = over_road if door.way == "session" else over_http
    asyncio.run(shoot(attack, door, seconds, statuses, begin))
    pipe.send(dict(statuses))


async def over_road(
    attack: Attack, door: Door, seconds: float, statuses: Counter[str], begin: Callable[[], object]
) -> None:
    road = await RoadCaller.connect(door.path, ARENA_BYTES, name="attacker", key=door.key)
    shots: list[tuple[Shot, Slot, int, Slot]] = []
    for shot in attack.burst():
        body = b"".join(request_image(dict(shot.fields), shot.tensors))
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
    listeners = [asyncio.ensure_future(listen(door)) for _ in range(attack.listeners)]
    shots = itertools.cycle(requests)

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**27)
        while time.monotonic() < ends:
            writer.write(next(shots))
            await writer.drain()
            statuses[await answered(reader)] += 1

    workers = [asyncio.ensure_future(worker()) for _ in range(HTTP_AT_ONCE if requests else 0)]
    if workers:
        await asyncio.wait(workers, timeout=seconds)
    else:
        await asyncio.sleep(seconds)
    left = [one for one in workers if not one.done()]
    if left:
        statuses["-"] = len(left)
    for one in left + listeners:
        one.cancel()
    for one in workers:
        if one.done() and not one.cancelled() and one.exception() is not None:
            statuses[type(one.exception()).__name__] += 1


async def listen(door: Door) -> None:
    """Read a stream of events to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(door.url).port)
    writer.write(head("GET", "/v1/events", door.key, 0))
    while await reader.read(2**16):
        pass


def as_http(shot: Shot, door: Door) -> bytes:
    """A request, whole."""
    call: Call[None] = Call(shot.operation, nothing, fields=dict(shot.fields), arrays=shot.tensors)
    request = request_of(Attempt(call, "attack", 0.0))
    return b"".join([origin_of(door.url, None, door.key).head(request), *request.body])


def head(method: str, path: str, key: str, length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/vnd.safetensors", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def answered(reader: asyncio.StreamReader) -> str:
    """Read an answer; returns its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = LENGTH.search(head)
    await reader.readexactly(int(length[1]) if length else 0)
    return head.split(b" ", 2)[1].decode()
