"""The gateway as a process of the service: started, started again, drained, or refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress

import httpx
import pytest
import tritonclient.grpc
from http_process import listening, process
from tritonclient.utils import InferenceServerException

from bench.driver.servers import free_port
from tests.harness.processes import SERVICE, START_S, running
from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long


def is_ready(port: int) -> bool:
    with (
        suppress(InferenceServerException),
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        return bool(client.is_server_ready(client_timeout=WAIT_S))
    return False


def test_the_gateway_is_started_again_and_ends_with_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = ("--oip.grpc-port", str(port))
    with listening(*given) as (running, _):
        wait_for(lambda: is_ready(port), "the gateway", WAIT_S)
        first = running.pid("oip-0")
        os.kill(first, signal.SIGKILL)
        running.find("oip-0 was killed by SIGKILL: restarting it")
        wait_for(lambda: is_ready(port), "the gateway again", WAIT_S)
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.infer("pool", []).get_response().parameters["sequences"].int64_param == 0
            running.find('"op": "pool", "method": "ModelInfer"')
        assert running.stop() == 0
        assert not [line for line in running.lines if "Traceback" in line]


def test_a_port_that_is_taken_ends_the_service_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        with process("--server.port", "0", "--oip.grpc-port", taken) as running:
            assert running.child.wait(WAIT_S) == 1
            (reply,) = running.messages("error")
    assert f"oip.grpc_port {taken}" in reply, reply


def test_a_cluster_has_a_gateway() -> None:
    port = str(free_port())
    with listening("--cluster.engines", "2", "--oip.http-port", port) as (running, _):
        check_v2(f"http://127.0.0.1:{port}")
        os.kill(running.pid("engine-0"), signal.SIGKILL)
        check_v2(f"http://127.0.0.1:{port}")
        assert running.stop() == 0


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_a_gateway_alone_serves_a_service_elsewhere(ends: int) -> None:
    port = str(free_port())
    arguments = ("--oip.http-port", port, "--log.format", "json")
    with listening() as (service, url):
        with running([*SERVICE, "gateway", "--attnd", url, *arguments]) as gateway:
            check_v2(f"http://127.0.0.1:{port}")
            if ends == signal.SIGKILL:
                os.kill(gateway.pid("oip-0"), ends)
                gateway.find("oip-0 was killed by SIGKILL: restarting it")
                check_v2(f"http://127.0.0.1:{port}")
            assert gateway.stop() == 0
            assert not [line for line in gateway.lines if "Traceback" in line]
        assert service.stop() == 0


def check_v2(url: str) -> None:
    """Wait until the gateway is ready, make a sequence, and delete it."""

    def is_ready() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/v2/health/ready", timeout=WAIT_S).is_success
        return False

    wait_for(is_ready, "the gateway", START_S)
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for model, parameters in (
            ("create_sequences", {"sequences": [{"id": "a"}]}),
            ("get_sequence", {"id": "a"}),
            ("delete_sequence", {"id": "a"}),
        ):
            body = {"parameters": parameters}
            response = client.post(f"/v2/models/{model}/infer", json=body)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--attnd", "http://127.0.0.1:1"), 2, "a gateway has --oip.http-port"),
        (("--oip.http-port", "1"), 2, "--attnd"),
        (("--attnd", "ftp://x", "--oip.http-port", "PORT"), 1, "it must be http:// or https://"),
    ],
)
def test_a_gateway_that_cannot_start_says_why(
    arguments: tuple[str, ...], status: int, words: str
) -> None:
    given = [str(free_port()) if one == "PORT" else one for one in arguments]
    run = subprocess.run(
        [*SERVICE, "gateway", *given], capture_output=True, text=True, timeout=START_S
    )
    assert run.returncode == status and words in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
