"""The gateway as its clients and its attackers meet it."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from http_messages import create, fill
from http_secrets import bearer, both, keys_file
from http_service import serving
from triton_callers import Gateway, Triton, gateway_of

from config.settings import SettingsError, load_settings
from service.doors.kit.upstream import EngineReply
from service.gateway.gateway import Gateway as InferenceGateway
from tests.harness.waiting import WAIT_S, wait_for

PING_S = 10


@pytest.mark.parametrize("header", ["host", "origin"])
def test_a_page_of_another_site_is_refused(v2: httpx.Client, header: str) -> None:
    headers = {header: "http://evil.example" if header == "origin" else "evil.example"}
    for method, path in (("POST", "/v2/models/pool/infer"), ("GET", "/v2")):
        response = v2.request(method, path, headers=headers)
        assert (response.status_code, response.json()["code"]) == (403, "forbidden")
    assert v2.get("/v2/health/live", headers=headers).json() == {"live": True}


def test_a_request_id_and_a_deadline_are_those_of_the_api(v2: httpx.Client) -> None:
    headers = {"x-request-id": "mine", "x-attnd-deadline-ms": "5000"}
    response = v2.post("/v2/models/pool/infer", json={}, headers=headers)
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["server-timing"].startswith("queue;dur=")
    headers["x-attnd-deadline-ms"] = "0"
    assert v2.post("/v2/models/pool/infer", json={}, headers=headers).status_code == 422


def test_a_body_that_is_too_long_or_slow_is_refused() -> None:
    limits = ("--server.receive-timeout-s", "0.5")
    with serving(*limits) as service, gateway_of(service, "--oip.max-message-bytes", "65536") as it:
        url = f"{it.url}/v2/models/pool/infer"
        for content in (bytes(65537), iter([bytes(65537)])):
            response = httpx.post(url, content=content)
            assert (response.status_code, response.json()["limit"]) == (413, 65536)
        port = it.server.settings.oip.http_port
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as peer:
            peer.sendall(b"POST /v2/models/pool/infer HTTP/1.1\r\nhost: localhost\r\n")
            peer.sendall(b"content-length: 10\r\n\r\n{")
            assert b" 408 " in peer.recv(65536)
        assert httpx.post(url, json={}).status_code == 200


def test_a_client_that_hangs_up_cancels_its_call(
    gateway: Gateway, service: Any, over_http: Triton, rng: np.random.Generator
) -> None:
    over_http.infer("create_sequences", sequences=[{"id": "a"}])
    k = rng.random((3, 2, 64), np.float32)
    over_http.infer("append", {"k": k, "v": k}, layer=0, sequences=["a"], append_indptr=[0, 3])
    q = {"name": "q", "datatype": "FP32", "shape": [1, 4, 64], "data": [0.0] * 256}
    body = {"inputs": [q], "parameters": {"layer": 0, "sequences": '["a"]'}}
    with service.gate_closed():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{gateway.url}/v2/models/decode/infer", json=body, timeout=1.0)
        wait_for(lambda: not gateway.core.calls, "its place")
    assert over_http.infer("get_sequence", id="a")[0]["lengths"][0] == 3


def test_clients_that_do_not_read_leave_room_for_other_namespaces(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, both("read", "append"))
    forks = [f"fork-{number}" for number in range(80)]
    parameters = {"layer": 0, "sequences": forks, "binary_data_output": True}
    with serving(*keys) as service, ExitStack() as stack:
        gateway = stack.enter_context(gateway_of(service, "--oip.max-calls", "8"))
        for name in ("red", "blue"):
            with service.client(name) as client:
                fill(client, np.random.default_rng(1), "a", 100)
                create(client, *({"id": one, "parent": "a"} for one in forks))

        def gather(name: str) -> httpx.Response:
            url, body = f"{gateway.url}/v2/models/gather/infer", {"parameters": parameters}
            return httpx.post(url, json=body, headers=bearer(name), timeout=WAIT_S)

        assert len(gather("red").content) > 2**20
        body = httpx.Request("POST", "http://x", json={"parameters": parameters}).read()
        head = "POST /v2/models/gather/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer red\r\n"
        for _ in range(4):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", gateway.server.settings.oip.http_port))
            peer.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: gather("red").status_code == 429, "a full share")
        assert gather("blue").status_code == 200
        stack.close()


@pytest.mark.long
def test_keepalive_pings_of_ten_seconds_end_neither_streams_nor_idle_connections(
    gateway: Gateway,
) -> None:
    options = [
        ("grpc.keepalive_time_ms", PING_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # each channel has a connection of its own
    ]
    from service.gateway.grpc_server import message

    one = message("ModelInferRequest")(model_name="pool").SerializeToString()
    states: list[grpc.ChannelConnectivity] = []
    with ExitStack() as stack:
        idle, busy = (
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options))
            for _ in range(2)
        )
        for channel in (idle, busy):
            metadata = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            metadata(b"", timeout=WAIT_S)
            channel.subscribe(states.append)
        stream = busy.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

        def slowly() -> Any:
            yield one
            time.sleep(4.5 * PING_S)
            yield one

        assert len(list(stream(slowly(), timeout=WAIT_S + 5 * PING_S))) == 2
        assert set(states) == {grpc.ChannelConnectivity.READY}, states


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("grpc_port", "oip.grpc_port"),
        ("grpc_max_calls", "oip.max_calls"),
        ("grpc_max_message_bytes", "oip.max_message_bytes"),
    ],
)
def test_a_setting_that_has_gone_names_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, successor: str
) -> None:
    option = f"--server.{name.replace('_', '-')}"
    with pytest.raises(SettingsError, match=f"set --{successor.replace('_', '-')} instead"):
        load_settings([option, "9000"])
    config = tmp_path / "config.yaml"
    config.write_text(f"server: {{{name}: 9000}}")
    with pytest.raises(SettingsError, match=f"server.{name}: has gone: set {successor} instead"):
        load_settings(["--config", str(config)])
    monkeypatch.setenv(f"ATTND_SERVER__{name}".upper(), "9000")
    variable = f"ATTND_{successor.replace('.', '__')}".upper()
    with pytest.raises(SettingsError, match=f"set {variable} instead"):
        load_settings([])


@pytest.mark.parametrize(
    ("timeout_s", "header_s", "deadline_s"),
    [(None, None, None), (None, 2.0, 2.0), (1.0, None, 1.0), (1.0, 2.0, 1.0), (3.0, 2.0, 2.0)],
)
async def test_the_earlier_of_two_deadlines_goes_with_the_call(
    timeout_s: float | None, header_s: float | None, deadline_s: float | None
) -> None:
    asked: list[float | None] = []

    async def call(_: Any, request: Any, record: Any, deadline_s: float | None) -> EngineReply:
        asked.append(deadline_s)
        return EngineReply({}, {}, ())

    upstream, one = SimpleNamespace(call=call), SimpleNamespace
    gateway = InferenceGateway(load_settings([]), upstream, one())  # type: ignore[arg-type]
    request: Any = one(model=one(name="pool"), timeout_s=timeout_s)
    await gateway.infer(one(), one(tenant=None), request, header_s)  # type: ignore[arg-type]
    assert asked == [deadline_s]
