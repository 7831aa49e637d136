"""HTTPS: bodies through TLS, certificates that clients must show, certificates that are renewed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme
from attnd import AsyncClient, Client, ConnectionFailed, NewSequence, TransportError
from http_messages import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    ask,
    fill,
    rows,
    write_body,
)
from http_process import process
from http_secrets import HOST, Files, trusting, write_files
from http_service import Service, serving

from config.settings import SettingsError, load_settings
from service.doors.kit.tls import Tls, TlsError
from tests.harness.processes import START_S
from tests.harness.waiting import WAIT_S, wait_for


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("tls"), trustme.CA())


@pytest.fixture(scope="module")
def secured(files: Files) -> Iterator[Service]:
    with serving(*files.served) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[Service]:
    with serving(*files.served, "--server.tls-client-ca", files.ca) as running:
        yield running


def over_tls(service: Service, files: Files) -> ssl.SSLSocket:
    return trusting(files).wrap_socket(service.connect(), server_hostname=HOST)


def test_calls_are_answered_over_tls(
    secured: Service, files: Files, rng: np.random.Generator
) -> None:
    with httpx.Client(base_url=secured.url, verify=trusting(files), timeout=WAIT_S) as client:
        fill(client, rng, "a", 3)
        reply, tensors = ask(
            client, "/v1/decode", {"layer": 0, "sequences": ["a"]}, {"q": rows(rng, 1, QO_HEADS)}
        )
        assert tensors["o"].shape == (1, QO_HEADS, HEAD_DIM) and reply["lse_base"] == "e"
        assert client.delete("/v1/sequences/a").status_code == 204


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_a_body_may_come_in_records_of_any_size(
    secured: Service, files: Files, rng: np.random.Generator, pieces: int
) -> None:
    o = rng.standard_normal((2, 50, 3, 8)).astype(np.float32)
    lse = rng.standard_normal((2, 50, 3)).astype(np.float32)
    body = write_body(SAFETENSORS, {"lse_base": "e"}, {"o": o, "lse": lse})
    head = (
        f"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-type: {SAFETENSORS}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    ).encode()
    with closing(over_tls(secured, files)) as client:
        whole = head + body
        size = -(-len(whole) // pieces)
        for begin in range(0, len(whole), size):
            client.sendall(whole[begin : begin + size])
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_large_bodies_and_answers_are_whole_and_leave_the_arena_free(
    secured: Service, files: Files, rng: np.random.Generator
) -> None:
    caller = secured.door.link.caller
    k = rng.standard_normal((40_000, KV_HEADS, HEAD_DIM)).astype(WIRE_DTYPE)
    lists = np.stack([k, k[::-1]], axis=1)
    with Client(secured.url, verify=files.ca, timeout=WAIT_S) as client:
        lse = np.zeros(lists.shape[:3], np.float32)
        merged = client.merge(lists, lse)
        np.testing.assert_allclose(merged.o, (k + k[::-1]) / 2, atol=2e-3)
    del merged
    wait_for(lambda: not caller.pending, "the calls to end")


async def test_both_clients_hold_the_certificate_to_the_authority_they_are_given(
    secured: Service, files: Files
) -> None:
    with Client(secured.url, verify=files.ca) as client:
        assert client.ready().ok
        client.create_sequences([NewSequence(id="kept")])
        client.delete_sequence("kept")
        assert len(client._transport._idle) == 1, "calls go over one connection"
    with (
        Client(secured.url, retries=0) as client,
        pytest.raises(ConnectionFailed, match="certificate verify failed"),
    ):
        client.ready()
    with Client(secured.url, verify=False) as client:
        assert client.ready().ok
    async with AsyncClient(secured.url, verify=files.ca) as client:
        assert (await client.ready()).ok and (await client.info()).num_layers
    async with AsyncClient(secured.url, retries=0) as client:
        with pytest.raises(ConnectionFailed):
            await client.ready()


async def test_with_a_client_ca_only_who_shows_a_certificate_is_served(
    mutual: Service, files: Files, tmp_path: Path
) -> None:
    with Client(mutual.url, verify=files.ca, cert=files.client) as client:
        assert client.info().num_layers
    foreign = write_files(tmp_path, trustme.CA())
    for cert in (None, foreign.client):
        with (
            Client(mutual.url, verify=files.ca, cert=cert, retries=0) as client,
            pytest.raises(TransportError),
        ):
            client.live()
    async with AsyncClient(mutual.url, verify=files.ca, cert=files.client) as client:
        assert (await client.info()).num_layers


def test_clear_text_at_a_tls_port_gets_no_reply_and_disturbs_no_other_client(
    secured: Service, files: Files
) -> None:
    with closing(secured.connect()) as plain:
        plain.sendall(b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert not plain.recv(4096).startswith(b"HTTP/")
    with closing(secured.connect()) as silent, Client(secured.url, verify=files.ca) as client:
        assert client.ready().ok
        silent.shutdown(socket.SHUT_WR)
    old = trusting(files)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert httpx.get(f"{secured.url}/health/live", verify=old).status_code == 200


def test_a_client_that_hangs_up_leaves_nothing(secured: Service, files: Files) -> None:
    door = secured.door
    client = over_tls(secured, files)
    head = f"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-type: {SAFETENSORS}\r\n"
    client.sendall(f"{head}content-length: 1000000\r\n\r\nab".encode())
    wait_for(lambda: len(door.active) == 1, "the request to begin")
    client.close()
    wait_for(lambda: not door.active, "the request to end")


@pytest.mark.long
def test_a_renewed_certificate_is_served_after_sighup(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    files = write_files(tmp_path, first)
    with process("--server.port", "0", *files.served) as running:
        url = running.find(r"listening on (https://[0-9.:]+)")[1]
        running.find(r"ready: ")
        before = trusting(files)
        wait_for(lambda: is_served(url, before), "the start", START_S)
        Path(files.key).write_text("no key")
        running.child.send_signal(1)
        running.find("the certificate is unchanged")
        assert is_served(url, before)
        write_files(tmp_path, second)
        running.child.send_signal(1)
        running.find("the certificate was read again")
        assert is_served(url, trusting(files)) and not is_served(url, before)
        assert running.stop() == 0


def is_served(url: str, context: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", verify=context, timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


NOT_PEM = b"no PEM"
LOCKED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("setting", "data", "said"),
    [
        ("tls_cert", None, "No such file or directory: name a file that exists"),
        ("tls_key", None, "No such file or directory: name a file that exists"),
        ("tls_client_ca", None, "No such file or directory: name a file that exists"),
        ("tls_cert", NOT_PEM, "no certificate in it: name a PEM file"),
        ("tls_key", NOT_PEM, "no private key in it: name a PEM file"),
        ("tls_client_ca", NOT_PEM, "no certificate in it: name a PEM file"),
        ("tls_key", LOCKED, "the key is encrypted"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_remedy(
    files: Files, tmp_path: Path, setting: str, data: bytes | None, said: str
) -> None:
    path = tmp_path / "unusable"
    if data is not None:
        path.write_bytes(data)
    named = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    named[setting] = str(path)
    with pytest.raises(TlsError) as refused:
        Tls(*named.values())
    assert str(refused.value).startswith(f"server.{setting} {path}: {said}")


def test_a_key_of_another_certificate_is_named_with_the_remedy(files: Files) -> None:
    with pytest.raises(TlsError, match=r"server.tls_key .*: key values mismatch: .* name a pair"):
        Tls(files.cert, files.client, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--server.tls-cert", "c"), "server.tls_cert = c: TLS requires both"),
        (("--server.tls-key", "k"), "TLS requires both server.tls_cert and server.tls_key"),
        (("--server.tls-client-ca", "a"), "server.tls_client_ca = a: client certificates"),
        (
            ("--server.tls-cert", "c", "--server.tls-key", "k", "--server.uds", "/tmp/x"),
            "server.uds is a Unix socket",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(arguments)
