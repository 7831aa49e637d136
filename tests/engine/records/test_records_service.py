"""Records of a whole service: over HTTP, by all clients, through kills and lost callers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnd import AnswerTooLarge, AsyncClient, AttndError, Client, NotSupported, Session

from tests.client.running_service import connect
from tests.engine.records.rig import STAMP, keys_of, read, values_of
from tests.harness.processes import SERVICE, Process, running

RNG = np.random.default_rng


@contextmanager
def service(directory: Path, *more: str) -> Iterator[tuple[Process, str]]:
    """A service with records alone, and its address."""
    options = {
        "backend.kind": "none",
        "cache.host-bytes": "32MiB",
        "cache.disk-path": str(directory / "disk"),
        "cache.disk-bytes": "64MiB",
        "server.port": "0",
        "server.socket": str(directory / "engine.sock"),
        "log.level": "info",
    }
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    with running([*SERVICE, *given, *more]) as process:
        yield process, process.find(r" listening on (unix:\S+|https?://\S+)")[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address and the socket of a service."""
    directory = tmp_path_factory.mktemp("records")
    more = ("--server.max-answer-bytes", "1MiB")
    with service(directory, *more) as (process, where), connect(where):
        yield where, str(directory / "engine.sock")
        assert process.stop() == 0, process.lines


def test_the_ways_in_have_the_same_records(served: tuple[str, str]) -> None:
    keys, values = keys_of(12, "ways"), values_of(RNG(7), 12, 30_000)
    expected = dict(zip(keys, values, strict=True))

    async def awaited() -> Any:
        async with AsyncClient(served[0]) as client:
            stored = await client.put_records(keys, values, stamp=STAMP)
            places = [np.zeros(len(value), np.uint8) for value in values]
            await client.get_records(keys, stamp=STAMP, into=places)
            return stored, [place.tobytes() for place in places]

    with Client(served[0]) as client, Session(served[1]) as session:
        assert set(client.put_records(keys[:4], values[:4], stamp=STAMP).outcomes) == {"stored"}
        stored = session.put_records(keys[:8], values[:8], stamp=STAMP)
        assert stored.outcomes == ("present",) * 4 + ("stored",) * 4
        stored, copies = asyncio.run(awaited())
        assert stored.outcomes == ("present",) * 8 + ("stored",) * 4 and copies == values
        for one in (client, session):
            found = one.get_records(keys, stamp=STAMP)
            assert [value.tobytes() for value in found.values if value is not None] == values
            assert one.contains_records(keys, stamp=STAMP).num_found == 12
        assert read(session, keys) == expected


def test_records_are_spoken_in_json_too(served: tuple[str, str]) -> None:
    import json
    import urllib.request

    def tensor(data: list[int], dtype: str = "U8") -> dict[str, Any]:
        return {"dtype": dtype, "shape": [len(data)], "data": data}

    def post(route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{served[0]}/v1/records/{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())

    keys = {"keys": tensor([*b"json"]), "key_lens": tensor([4])}
    values = {"sizes": tensor([3], "I64"), "values": tensor([1, 2, 3])}
    stored = post("put", {"stamp": "m", "tensors": keys | values})
    assert stored == {"outcomes": ["stored"], "durable": stored["durable"]}
    found = post("get", {"stamp": "m", "tensors": keys})
    assert found["outcomes"] == ["found"] and found["tensors"]["values"]["data"] == [1, 2, 3]


def test_an_answer_above_the_limit_is_refused_with_a_remedy(served: tuple[str, str]) -> None:
    with Session(served[1]) as session:
        keys = keys_of(3, "large")
        session.put_records(keys, [bytes(500_000)] * 3, stamp=STAMP)
        with pytest.raises(AnswerTooLarge, match="fewer records"):
            session.get_records(keys, stamp=STAMP)
        assert set(session.get_records(keys[:2], stamp=STAMP).outcomes) == {"found"}


def test_pages_are_refused_by_name(served: tuple[str, str]) -> None:
    with Client(served[0]) as client, pytest.raises(NotSupported, match="no pool of pages"):
        client.create_sequence("a")


def test_callers_that_leave_in_the_middle_hold_nothing(served: tuple[str, str]) -> None:
    """Of puts and gets whose sessions are cut off, over and over."""
    keys = keys_of(40, "left")
    value = b"v" * 20_000
    for number in range(20):
        session = Session(served[1], timeout=5.0)
        session.put_records(keys[:1], [value], stamp=STAMP)
        connection = session._road.connection
        assert connection is not None
        thread = threading.Thread(target=attempt, args=(session, keys, value, number))
        thread.start()
        connection._socket.shutdown(socket.SHUT_RDWR)
        thread.join(20.0)
        session.close()
    with Session(served[1]) as session:
        session.put_records(keys, [value] * 40, stamp=STAMP)
        assert read(session, keys) == dict.fromkeys(keys, value)


def attempt(session: Session, keys: list[bytes], value: bytes, number: int) -> None:
    try:
        if number % 2:
            session.get_records(keys[:1], stamp=STAMP)
        else:
            session.put_records(keys, [value] * 40, stamp=STAMP)
    except AttndError:
        pass


@pytest.mark.long
def test_durable_records_survive_kill_9_under_load(tmp_path: Path) -> None:
    """Whatever else was under way is intact, or a miss."""
    rng, model, durable = RNG(8), dict[bytes, bytes](), set[bytes]()
    for number in range(3):
        with service(tmp_path) as (process, where), connect(where):
            with Session(str(tmp_path / "engine.sock"), timeout=30.0) as session:
                check(session, model, durable)
                for batch in range(6):
                    keys = keys_of(10, f"{number}-{batch}")
                    values = values_of(rng, 10, 100_000)
                    model |= dict(zip(keys, values, strict=True))
                    is_durable = bool(batch % 2)
                    stored = session.put_records(keys, values, stamp=STAMP, durable=is_durable)
                    durable |= {k for k, is_it in zip(keys, stored.durable, strict=True) if is_it}
                (engine,) = engines_of(process.child.pid)
                os.kill(engine, signal.SIGKILL)
            process.child.send_signal(signal.SIGKILL)
            process.child.wait(20.0)
    with service(tmp_path) as (process, where), connect(where):
        with Session(str(tmp_path / "engine.sock")) as session:
            check(session, model, durable)
        process.stop()
    assert len(durable) >= 90


def check(session: Session, model: dict[bytes, bytes], durable: set[bytes]) -> None:
    keys = [*model]
    for first in range(0, len(keys), 30):
        for key, value in read(session, keys[first : first + 30]).items():
            assert value == model[key] or (isinstance(value, str) and key not in durable)


def engines_of(pid: int) -> list[int]:
    """Ids of the engine processes of a supervisor."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        environment = Path(f"/proc/{child}/comm").read_text()
        if b"engine" in command or "engine" in environment:
            found.append(int(child))
    return found
