"""Keys over HTTP: tenants, their bodies and connections, and addresses without keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from attnd import Client, Forbidden, Session, Unauthorized, UnknownSequence
from http_messages import KIND, QO_HEADS, append, check_problem, create, post, rows
from http_process import process
from http_secrets import bearer, keys_file
from http_service import Service, serving

from config.settings import ServerSettings
from service.addresses import bind_addresses
from service.road.engine_end.listening import CannotListen
from tests.harness.waiting import WAIT_S, wait_for


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(*keys_file(tmp_path_factory.mktemp("keys"))) as running:
        yield running


@pytest.fixture
def red(guarded: Service) -> Iterator[httpx.Client]:
    with guarded.client("a-key-of-red") as one:
        yield one
        clean(one)


@pytest.fixture
def blue(guarded: Service) -> Iterator[httpx.Client]:
    with guarded.client("a-key-of-blue") as one:
        yield one
        clean(one)


def clean(client: httpx.Client) -> None:
    for sequence in client.get("/v1/sequences").json()["sequences"]:
        client.delete(f"/v1/sequences/{sequence['id']}")


def test_a_body_is_neither_waited_for_nor_held_without_a_key(guarded: Service) -> None:
    length = 100 * 2**20
    with closing(guarded.connect()) as client:
        head = f"POST /v1/decode HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
        client.sendall(head.encode())
        reply = client.recv(65536)
        assert reply.startswith(b"HTTP/1.1 401 ") and b"www-authenticate: Bearer\r\n" in reply
        assert guarded.door.link.arena.mapping.size < length


def test_the_scheme_is_read_in_any_case_and_a_connection_may_change_its_key(
    guarded: Service, red: httpx.Client, blue: httpx.Client
) -> None:
    create(red, "mine")
    with guarded.client() as client:
        for key, status in [("red", 200), ("blue", 404), ("none", 401), ("red", 200)]:
            headers = {"authorization": f"bEARER  a-key-of-{key}"}
            assert client.get("/v1/sequences/mine", headers=headers).status_code == status


def test_bodies_that_are_the_same_byte_for_byte_are_each_callers_own(
    guarded: Service, red: httpx.Client, blue: httpx.Client, rng: np.random.Generator
) -> None:
    """Calls that repeat are remembered by the engine, places and all: for each tenant."""
    for client in (red, blue):
        create(client, "same")
        append(client, 0, "same", rows(rng, 3), rows(rng, 3))
    named = {"layer": 0, "sequences": ["same"]}
    q, k, v = rows(rng, 1, QO_HEADS), rows(rng, 1), rows(rng, 1)
    with guarded.client() as client:

        def decode(key: str, **tensors: np.ndarray) -> httpx.Response:
            return post(client, "/v1/decode", named, tensors, headers=bearer(key))

        reply = {key: decode(key, q=q).content for key in ("a-key-of-red", "a-key-of-blue")}
        assert reply["a-key-of-red"] != reply["a-key-of-blue"]
        for key in ("a-key-of-red", "a-key-of-blue") * 4:
            assert decode(key, q=q).content == reply[key]
        for number in range(1, 4):
            assert decode("a-key-of-red", q=q, k=k, v=v).status_code == 200
            refused = decode("a-reader-of-red", q=q, k=k, v=v)
            check_problem(refused, 403, "forbidden", scope="append")
            assert red.get("/v1/sequences/same").json()["lengths"][0] == 3 + number
    assert blue.get("/v1/sequences/same").json()["lengths"][0] == 3


def test_client_and_session_show_their_key(guarded: Service) -> None:
    with (
        Client(guarded.url, api_key="a-key-of-red") as client,
        Session(guarded.engine_socket, api_key="a-key-of-red") as session,
        Session(guarded.engine_socket, api_key="a-key-of-blue") as other,
    ):
        client.create_sequence("shared")
        assert session.get_sequence("shared").length == 0
        with pytest.raises(UnknownSequence):
            other.get_sequence("shared")
        session.delete_sequence("shared")
    with (
        Client(guarded.url, api_key="a-reader-of-red") as reader,
        pytest.raises(Forbidden) as refused,
    ):
        reader.create_sequence()
    assert refused.value.scope == "append"
    for stranger in (Client(guarded.url, retries=0), Session(guarded.engine_socket, retries=0)):
        with stranger, pytest.raises(Unauthorized):
            stranger.info()


@pytest.mark.parametrize("key", ["two words", "new\r\nline", "ключ", ""])
def test_what_no_header_can_carry_is_no_key_and_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be visible ASCII") as refused:
        Client(api_key=key)
    assert key == "" or key not in str(refused.value)


@pytest.mark.skipif(KIND != "cpu", reason="the same for every backend")
def test_one_namespace_has_requests_on_half_of_the_connections(tmp_path: Path) -> None:
    options = (*keys_file(tmp_path), "--server.max-connections", "6")
    with (
        serving(*options) as service,
        service.client("a-key-of-red") as red,
        service.client("a-key-of-blue") as blue,
        ExitStack() as stack,
    ):
        listened = [stack.enter_context(red.stream("GET", "/v1/events")) for _ in range(3)]
        for _ in range(2):
            problem = check_problem(red.get("/v1/info"), 429, "overloaded")
            assert "half of server.max_connections" in problem["detail"]
            assert blue.get("/v1/info").status_code == 200
        listened.pop().close()
        wait_for(lambda: red.get("/v1/info").status_code == 200, "the stream's end")
        assert service.door.busy == {"red": 2}
        for stream in listened:
            stream.close()
        wait_for(lambda: not service.door.busy, "the others' ends")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_the_service_listens_on_this_machine_only(host: str) -> None:
    server = ServerSettings(host=host, port=0)
    with pytest.raises(CannotListen, match=r"set auth.keys_file, or auth.open: true"):
        bind_addresses(server, is_private=True)


def test_keys_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    with process("--auth.keys-file", str(tmp_path / "none")) as running:
        assert running.child.wait(WAIT_S) == 2
    assert len(running.lines) == 1 and "auth.keys_file" in running.lines[0]
