"""Connections without HELLO keep no session out, and full sessions keep no door out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from config.settings import ServerSettings, Settings
from service.engine.loop.callers import LEAST_UNGREETED
from service.errors import NotReady
from service.road.caller_end.caller import RoadCaller
from tests.engine.fake_backend import WAIT_S, FakeBackend
from tests.engine.harness import ARENA_BYTES, Running, running_engine

SECRET = "s" * 32
SESSIONS = 2


@contextmanager
def engine() -> Iterator[tuple[Running, dict[str, str]]]:
    """An engine with two sessions, and the addresses where it listens."""
    settings = Settings(server=ServerSettings(max_sessions=SESSIONS))
    with (
        socket.create_server(("127.0.0.1", 0)) as remote,
        running_engine(FakeBackend(), settings, secret=SECRET, remote=remote) as running,
    ):
        address = f"tcp:127.0.0.1:{remote.getsockname()[1]}"
        yield running, {"unix": running.path, "tcp": address}


def connect(address: str, host: str = "127.0.0.1") -> socket.socket:
    """A connection that says nothing; over TCP from this address."""
    if not address.startswith("tcp:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    port = int(address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), WAIT_S, source_address=(host, 0))


@pytest.mark.parametrize("silent", ["unix", "tcp"])
@pytest.mark.parametrize("calling", ["unix", "tcp"])
def test_a_door_gets_in_past_many_silent_connections(silent: str, calling: str) -> None:
    with engine() as (running, addresses), ExitStack() as stack:
        for _ in range(3 * LEAST_UNGREETED):
            stack.enter_context(connect(addresses[silent]))

        async def scenario() -> None:
            async with asyncio.timeout(WAIT_S):
                road = await RoadCaller.connect(addresses[calling], ARENA_BYTES, secret=SECRET)
            road.close()

        asyncio.run(scenario())
        assert len(running.engine.callers.sessions) <= LEAST_UNGREETED + 1


def test_of_silent_connections_the_host_with_most_loses_its_oldest_first() -> None:
    with engine() as (_, addresses), ExitStack() as stack:
        alone = stack.enter_context(connect(addresses["tcp"], "127.0.0.2"))
        alone.setblocking(False)
        many = [stack.enter_context(connect(addresses["tcp"])) for _ in range(2 * LEAST_UNGREETED)]
        heard = b""
        many[0].settimeout(WAIT_S)
        while part := many[0].recv(4096):
            heard += part
        assert b"send it at once" in heard
        assert alone.recv(4096), "the engine sends its challenge"
        with pytest.raises(BlockingIOError):
            alone.recv(1)  # it is open, and waits for HELLO


def test_full_sessions_refuse_callers_and_accept_doors() -> None:
    with engine() as (_, addresses):

        async def scenario() -> None:
            roads = [await RoadCaller.connect(addresses["unix"], 4096) for _ in range(SESSIONS)]
            with pytest.raises(NotReady, match=r"raise server\.max_sessions"):
                await RoadCaller.connect(addresses["unix"], 4096)
            roads += [
                await RoadCaller.connect(one, ARENA_BYTES, secret=SECRET)
                for one in addresses.values()
            ]
            for road in roads:
                road.close()

        asyncio.run(scenario())
