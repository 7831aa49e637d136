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
from http_service import Service, serving
from triton_callers import Triton, grpc_client, grpc_door, http_client
from tritonclient.utils import InferenceServerException

from service.doors.grpc.server import Server

RED, BLUE, READER, OPERATOR = map(bearer, KEYS)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Server, Path]]:
    folder = tmp_path_factory.mktemp("keys")
    with serving(*keys_file(folder)) as service, grpc_door(service) as door:
        yield service, door, folder / "keys"


@pytest.fixture(params=["http", "grpc"])
def made(request: pytest.FixtureRequest, guarded: tuple[Service, Server, Path]) -> Iterator[Triton]:
    service, door, _ = guarded
    client = http_client(service) if request.param == "http" else grpc_client(door)
    yield client
    client.client.close()


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
    with pytest.raises(InferenceServerException, match=r"forbidden"):
        made.client.get_inference_statistics("pool", headers=RED)
    made.client.get_inference_statistics("pool", headers=OPERATOR)


def test_a_body_of_the_protocol_is_refused_in_its_way_without_a_key(
    guarded: tuple[Service, Server, Path],
) -> None:
    with guarded[0].client() as client:
        problem = check_problem(client.post("/v2/models/pool/infer"), 401, "unauthorized")
        assert problem["error"].startswith("unauthorized: ")


def test_keys_are_read_again_by_the_grpc_door(guarded: tuple[Service, Server, Path]) -> None:
    _, door, path = guarded
    client = grpc_client(door)
    assert client.infer("pool", {}, {"headers": BLUE})[0]["sequences"] == 0
    write_keys(path, "a-key-of-red")
    door.read_again()
    assert "UNAUTHENTICATED" in refusal(client, "pool", BLUE)
    write_keys(path, *KEYS)
    door.read_again()
    assert client.infer("pool", {}, {"headers": BLUE})[0]["sequences"] == 0
    client.client.close()


def secured(door: Server, files: Files, *, shows_its_own: bool = True) -> Any:
    return tritonclient.grpc.InferenceServerClient(
        f"127.0.0.1:{door.port}",
        ssl=True,
        root_certificates=files.ca,
        private_key=files.client if shows_its_own else None,
        certificate_chain=files.client if shows_its_own else None,
    )


def test_grpc_has_https_certificates_and_asks_for_the_clients(tmp_path: Path) -> None:
    files = write_files(tmp_path, trustme.CA())
    arguments = (*files.served, "--server.tls-client-ca", files.ca)
    with serving(*arguments) as service, grpc_door(service) as door:
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
        door.read_again()
        mixed = Files(renewed.ca, files.cert, files.key, files.client)
        with secured(door, mixed) as client:
            assert client.is_server_live()


def test_clear_text_is_not_answered_where_there_is_tls(tmp_path: Path) -> None:
    files = write_files(tmp_path, trustme.CA())
    with serving(*files.served) as service, grpc_door(service) as door:
        made = grpc_client(door)
        with pytest.raises(InferenceServerException):
            made.client.is_server_live(client_timeout=2.0)
        made.client.close()
        with httpx.Client(verify=False) as client, pytest.raises(httpx.TransportError):
            client.get(f"http://127.0.0.1:{door.port}/v2")
