"""Turns on a door's loop: many requests, many listeners, and readers that do not read."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from images import write_image
from scripted import Heard, Running, serving, wait_for

from service.doors.http.dispatch import Dispatcher
from service.doors.http.endpoints import events as events_module
from service.doors.kit.turns import AT_ONCE, Turns, Waiters

LISTENERS = 100


class Events:
    """An engine's script: events of `size` characters, up to number `newest`."""

    def __init__(self) -> None:
        self.newest = 0
        self.size = 1

    def __call__(self, heard: Heard) -> bytes:
        last = self.newest if heard.fields["after"] < 0 else heard.fields["after"]
        found = [
            {"id": number, "type": "cleared", "text": "x" * self.size}
            for number in range(last + 1, self.newest + 1)
        ]
        return write_image({"events": found, "next": self.newest, "too_old": False}, {}, "response")


def listen(door: Running) -> socket.socket:
    peer = door.connect()
    peer.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert peer.recv(12) == b"HTTP/1.1 200"
    return peer


def test_an_event_reaches_many_listeners_over_several_passes_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, number = Events(), 0
    passes: list[int] = []
    written = events_module.written

    def noted(page: Any) -> Any:
        passes.append(number)
        return written(page)

    with serving(tmp_path, script=events) as door:
        peers = [listen(door) for _ in range(LISTENERS)]
        monkeypatch.setattr(events_module, "written", noted)
        loop = door.server.loop
        assert loop is not None

        def count() -> None:
            nonlocal number
            number += 1
            if len(passes) < LISTENERS:
                loop.call_soon(count)

        door.on_loop(count)
        events.newest = 1
        for peer in peers:
            received = b""
            while b"event: cleared" not in received:
                received += peer.recv(4096)
            peer.close()
    assert len(passes) == LISTENERS
    assert max(passes.count(one) for one in passes) <= AT_ONCE


def test_callers_take_turns_and_a_pass_of_the_loop_begins_little() -> None:
    begun: list[tuple[int, str]] = []
    number = 0

    async def wait(waiters: Waiters, name: str) -> None:
        if await waiters.wait(60.0):
            begun.append((number, name))

    async def main() -> None:
        nonlocal number
        turns = Turns()
        many, few = Waiters(turns, "many"), Waiters(turns, "few")
        tasks = [asyncio.create_task(wait(many, "many")) for _ in range(3 * AT_ONCE)]
        tasks += [asyncio.create_task(wait(few, "few")) for _ in range(AT_ONCE // 2)]
        assert not await many.wait(0.001)
        assert [turns.take() for _ in range(AT_ONCE + 1)] == [True] * AT_ONCE + [False]
        many.wake()
        few.wake()
        assert not turns.take()
        while len(begun) < len(tasks):
            number += 1
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert turns.take()

    asyncio.run(main())
    passes = [pass_ for pass_, _ in begun]
    assert max(passes.count(one) for one in passes) <= AT_ONCE
    assert [name for _, name in begun[:AT_ONCE]] == ["many", "few"] * (AT_ONCE // 2)


def test_requests_of_many_connections_begin_over_several_passes_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    passes: list[int] = []
    run = Dispatcher.run

    async def noted(*given: Any) -> None:
        passes.append(number)
        await run(*given)

    with serving(tmp_path) as door:
        peers = [door.connect() for _ in range(LISTENERS)]
        wait_for(lambda: len(door.door.connections) == LISTENERS, "the connections")
        monkeypatch.setattr(Dispatcher, "run", noted)
        loop = door.server.loop
        assert loop is not None

        def count() -> None:
            nonlocal number
            number += 1
            if len(passes) < LISTENERS:
                loop.call_soon(count)

        def send_all() -> None:
            for peer in peers:
                peer.sendall(b"GET /v1/sequences HTTP/1.1\r\nhost: localhost\r\n\r\n")
            count()

        door.on_loop(send_all)
        for peer in peers:
            assert peer.recv(12) == b"HTTP/1.1 200"
            peer.close()
    assert len(passes) == LISTENERS
    assert max(passes.count(one) for one in passes) <= 2 * AT_ONCE


def test_a_listener_that_reads_nothing_is_disconnected_though_it_sends(tmp_path: Path) -> None:
    events = Events()
    events.size = 2**20
    with serving(tmp_path, "--server.idle-timeout-s", "0.5", script=events) as door:
        peer = listen(door)
        (connection,) = door.door.connections
        while not connection.flow.write_paused:
            events.newest += 1
            wait_for(lambda: connection.flow.write_paused or events.newest == sent(door), "it")
        peer.sendall(b"x")
        wait_for(lambda: not door.door.connections, "the end of the connection")
        peer.close()


async def test_a_listener_that_is_cancelled_as_news_come_is_cancelled() -> None:
    waiters = Waiters(Turns(), "")
    waiting = asyncio.create_task(waiters.wait(10.0))
    await asyncio.sleep(0)
    waiters.wake()
    asyncio.get_running_loop().call_soon(waiting.cancel)  # after the turn in which it is woken
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_listener_that_leaves_in_the_middle_of_a_body_ends_its_stream(tmp_path: Path) -> None:
    with serving(tmp_path, script=Events()) as door:
        peer = door.connect()
        peer.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n")
        assert peer.recv(12) == b"HTTP/1.1 200"
        peer.close()
        wait_for(lambda: not door.door.active, "the end of the stream")


def sent(door: Running) -> int:
    """The number of the newest event that the feed has."""
    routes = {one.path: one for one in door.routes_app.router.routes}
    (feed,) = routes["/v1/events"].endpoint.by_method["GET"].__self__.feeds.values()
    return int(feed.newest)


def test_a_closing_connection_whose_response_is_not_read_ends(tmp_path: Path) -> None:
    def much(heard: Heard) -> bytes:
        return write_image({"text": "x" * 2**21}, {}, "response")

    with serving(tmp_path, "--server.idle-timeout-s", "0.5", script=much) as door:
        door.server.setup.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        peer = door.connect()
        head = b"GET /v1/sequences HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        peer.sendall(head)
        wait_for(lambda: door.engine.heard, "the call")
        wait_for(lambda: not door.door.connections, "the end of the connection")
        peer.close()
