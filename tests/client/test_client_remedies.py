"""Errors while connecting name the remedy."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnd
import pytest
import trustme
from attnd import AsyncClient, Client, NeverReady, Session, TimedOut
from scripted_server import WHOLE, Peer, ScriptedServer, answering, once

from tests.client.client_stub import Kind, client_of
from tests.session.scripted_engine import Answers, ScriptedEngine


def outcome(kind: Kind, url: str, call: Callable[[Any], Any], **options: Any) -> BaseException:
    """The exception of a call by a client of that kind."""
    with pytest.raises(Exception) as raised, client_of(kind, url, retries=0, **options) as client:
        call(client)
    return raised.value


def info(client: Any) -> Any:
    return client.info()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The PEM files of an authority, and of a certificate without its key."""
    directory, authority = tmp_path_factory.mktemp("pem"), trustme.CA()
    ca, key = str(directory / "ca.pem"), str(directory / "key.pem")
    authority.cert_pem.write_to_path(ca)
    authority.private_key_pem.write_to_path(key)
    return ca, key


@pytest.mark.parametrize("made", [Client, AsyncClient])
def test_files_that_tls_cannot_use_are_named(made: Any, pem: tuple[str, str]) -> None:
    ca, key = pem
    for options, kind, says in (
        ({"verify": "nope.pem"}, FileNotFoundError, "verify is 'nope.pem'.*authority"),
        ({"verify": key}, ssl.SSLError, "verify is .*authority"),
        ({"cert": "nope.pem"}, FileNotFoundError, "cert is 'nope.pem'.*certificate and key"),
        ({"cert": ca}, ssl.SSLError, "cert is .*certificate and key"),
    ):
        with pytest.raises(kind, match=says):
            made("https://127.0.0.1:1", **options)


def test_a_connection_closed_without_an_answer_says_that_tls_may_be_spoken(kind: Kind) -> None:
    with ScriptedServer(once()) as server:
        error = outcome(kind, server.url, info)
    assert isinstance(error, attnd.ReplyLost)
    assert "where 127.0.0.1:" in str(error) and "base_url must begin with https://" in str(error)


def test_a_connection_that_was_answered_before_says_nothing_of_tls(kind: Kind) -> None:
    def script(peer: Peer) -> None:
        if peer.request() is not None:
            peer.send(WHOLE)
            peer.request()

    def get_twice(client: Any) -> Any:
        first = client.get_sequence("a")
        return second(client, first) if isinstance(client, AsyncClient) else client.info()

    async def second(client: AsyncClient, first: Any) -> Any:
        await first
        return await client.info()

    with ScriptedServer(script) as server:
        error = outcome(kind, server.url, get_twice)
        assert len(server.peers) == 1
    assert isinstance(error, attnd.ReplyLost) and "without an answer" in str(error)
    assert "https" not in str(error)


def test_tls_to_a_port_without_it_says_so(kind: Kind) -> None:
    def script(peer: Peer) -> None:
        peer.socket.recv(64)
        peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with ScriptedServer(script) as server:
        url = server.url.replace("http://", "https://")
        error = outcome(kind, url, info, timeout=5.0)
    assert isinstance(error, attnd.TransportError)
    assert "base_url must begin with http://" in str(error)


def test_a_service_that_never_gets_ready_is_an_error_of_the_package(kind: Kind) -> None:
    error = outcome(kind, "http://127.0.0.1:1", lambda client: client.wait_ready(0.1))
    assert isinstance(error, NeverReady) and isinstance(error, TimeoutError)
    assert isinstance(error, attnd.AttndError)
    assert "not ready after 0.1 s: no connection to 127.0.0.1:1" in str(error)


def test_waiting_for_ready_takes_no_longer_than_its_timeout(kind: Kind) -> None:
    hung = threading.Event()

    def script(_: Peer) -> None:
        hung.wait(30)

    with ScriptedServer(script) as server:
        started = time.monotonic()
        error = outcome(kind, server.url, lambda client: client.wait_ready(0.7))
        took = time.monotonic() - started
        hung.set()
    assert isinstance(error, NeverReady) and "not ready after 0.7 s" in str(error)
    assert took < 5


def test_a_session_that_never_gets_ready_is_the_same_error(tmp_path: Path) -> None:
    with Session(tmp_path / "none.sock") as session, pytest.raises(NeverReady):
        session.wait_ready(0.1)


def test_a_deadline_that_is_too_short_to_send_is_timed_out(kind: Kind) -> None:
    def call(client: Any) -> Any:
        return client.with_options(deadline=0.0005).info()

    with ScriptedServer(answering(b"")) as server:
        assert isinstance(outcome(kind, server.url, call), TimedOut)


def test_a_session_with_a_deadline_that_is_too_short_is_timed_out(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    with (
        ScriptedEngine(path, lambda seen: Answers({})),
        Session(path) as session,
        pytest.raises(TimedOut),
    ):
        session.with_options(deadline=1e-6).info()
