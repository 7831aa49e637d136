"""Keys and TLS at the doors of the Open Inference Protocol: as at HTTP's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import trustme
from http_messages import check_problem
from http_secrets import KEYS, Files, bearer, keys_file, write_files, write_keys
from http_service import SECRET, serving
from triton_callers import Gateway, Triton, gateway_of
from tritonclient.utils import InferenceServerException

from config.settings import load_settings
from service.doors.kit.process import Setup
from service.gateway.server import GatewayServer
from service.metrics import Metrics

RED, BLUE, READER, _ = map(bearer, KEYS)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module", params=["on the host", "elsewhere"])
def guarded(request: pytest.FixtureRequest, keys: Path) -> Iterator[Gateway]:
    """A gateway of a service with keys: on its host, and one that forwards keys to it."""
    with serving(*keys_file(keys)) as service:
        url = service.url if request.param == "elsewhere" else ""
        with gateway_of(service, url=url) as made:
            yield made


@pytest.fixture(params=["http", "grpc"])
def made(request: pytest.FixtureRequest, guarded: Gateway) -> Iterator[Triton]:
    with guarded.http() if request.param == "http" else guarded.grpc() as client:
        yield client


def refusal(client: Triton, model: str, headers: Any, **fields: Any) -> str:
    with pytest.raises(InferenceServerException) as reply:
        client.infer(model, {}, {"headers": headers}, **fields)
    status = str(reply.value.status()).removeprefix("StatusCode.")
    return f"{status} {reply.value.message()}"


def test_a_key_says_whose_a_call_is(made: Triton) -> None:
    for headers in (RED, BLUE):
        made.infer("create_sequences", {}, {"headers": headers}, sequences=[{"id": "same"}])
    made.infer("delete_sequence", {}, {"headers": RED}, id="same")
    assert "unknown sequence: same" in refusal(made, "get_sequence", RED, id="same")
    reply, _ = made.infer("get_sequence", {}, {"headers": BLUE}, id="same")
    assert reply["id"] == "same"
    made.infer("delete_sequence", {}, {"headers": BLUE}, id="same")


def test_without_a_key_or_its_scope_nothing_is_answered_but_health(made: Triton) -> None:
    assert made.client.is_server_live() and made.client.is_server_ready()
    for headers in (None, {"authorization": "Bearer nobodys"}, {"authorization": "Basic eA=="}):
        reply = refusal(made, "pool", headers)
        assert reply.startswith(("401 unauthorized", "UNAUTHENTICATED unauthorized")), reply
        with pytest.raises(InferenceServerException, match=r"unauthorized"):
            made.client.get_model_metadata("pool", headers=headers)
    made.client.get_model_metadata("pool", headers=READER)
    reply = refusal(made, "create_sequences", READER, sequences=[{}])
    assert reply.startswith(("403 forbidden", "PERMISSION_DENIED forbidden")), reply


def test_a_body_of_the_protocol_is_refused_in_its_way_without_a_key(guarded: Gateway) -> None:
    response = httpx.post(f"{guarded.url}/v2/models/pool/infer")
    problem = check_problem(response, 401, "unauthorized")
    assert problem["error"].startswith("unauthorized: ")
    assert response.headers["www-authenticate"] == "Bearer"


def test_keys_are_read_again_by_the_gateway(tmp_path: Path) -> None:
    with (
        serving(*keys_file(tmp_path)) as service,
        gateway_of(service) as gateway,
        gateway.grpc() as client,
    ):
        assert client.infer("pool", {}, {"headers": BLUE})[0]["sequences"] == 0
        for keys, answer in ((["a-key-of-red"], "UNAUTHENTICATED"), (KEYS, "")):
            write_keys(tmp_path / "keys", *keys)
            gateway.server.read_again()
            if answer:
                assert answer in refusal(client, "pool", BLUE)
            else:
                assert client.infer("pool", {}, {"headers": BLUE})[0]["sequences"] == 0


def secured(gateway: Gateway, files: Files, *, shows_its_own: bool = True) -> Any:
    return tritonclient.grpc.InferenceServerClient(
        f"127.0.0.1:{gateway.grpc_port}",
        ssl=True,
        root_certificates=files.ca,
        private_key=files.client if shows_its_own else None,
        certificate_chain=files.client if shows_its_own else None,
    )


def test_grpc_has_https_certificates_and_asks_for_the_clients(tmp_path: Path) -> None:
    files = write_files(tmp_path, trustme.CA())
    arguments = (*files.served, "--server.tls-client-ca", files.ca)
    with serving(*arguments) as service, gateway_of(service) as door:
        with secured(door, files) as client:
            assert client.is_server_ready()
        with (
            secured(door, files, shows_its_own=False) as client,
            pytest.raises(InferenceServerException),
        ):
            client.is_server_live(client_timeout=2.0)
        other = trustme.CA()
        (tmp_path / "new").mkdir()
        renewed = write_files(tmp_path / "new", other)
        for now, before in ((renewed.cert, files.cert), (renewed.key, files.key)):
            Path(before).write_bytes(Path(now).read_bytes())
        door.server.read_again()
        mixed = Files(renewed.ca, files.cert, files.key, files.client)
        with secured(door, mixed) as client:
            assert client.is_server_live()


def test_a_service_elsewhere_is_shown_the_gateways_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_files(tmp_path, trustme.CA())
    monkeypatch.setenv("SSL_CERT_FILE", files.ca)
    with serving(*files.served, "--server.tls-client-ca", files.ca) as service:
        for shown, is_ready in (((), False), (("--oip.client-cert", files.client), True)):
            with (
                gateway_of(service, *shown, url=service.url) as door,
                secured(door, files) as client,
            ):
                assert client.is_server_ready() is is_ready


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "oip.client_cert = None: the service asks it for a certificate"),
        (("--oip.client-cert", "nothing.pem"), "nothing.pem"),
    ],
)
def test_a_gateway_of_a_cluster_that_asks_for_certificates_has_one(
    tmp_path: Path, more: tuple[str, ...], words: str
) -> None:
    files = write_files(tmp_path, trustme.CA())
    given = (*files.served, "--server.tls-client-ca", files.ca, "--oip.http-port", "1", *more)
    setup = Setup(load_settings(given), Metrics("oip-0"), "", "oip-0", SECRET)
    server = GatewayServer(setup, "https://127.0.0.1:1")
    server.run()
    assert words in server.failed


def test_clear_text_is_not_answered_where_there_is_tls(tmp_path: Path) -> None:
    files = write_files(tmp_path, trustme.CA())
    with serving(*files.served) as service, gateway_of(service) as door:
        with door.grpc() as made, pytest.raises(InferenceServerException):
            made.client.is_server_live(client_timeout=2.0)
        with httpx.Client() as client, pytest.raises(httpx.TransportError):
            client.get(door.url.replace("https", "http") + "/v2")
