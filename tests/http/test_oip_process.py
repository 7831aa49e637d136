"""The gRPC door as a process of the service: started, started again, drained, or refused."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

import tritonclient.grpc
import tritonclient.http
from http_process import listening, process
from http_service import WAIT_S, wait_for
from regions import memory
from tritonclient.utils import InferenceServerException


def is_ready(port: int) -> bool:
    with (
        suppress(InferenceServerException),
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        return bool(client.is_server_ready(client_timeout=WAIT_S))
    return False


def regions_at(port: int) -> dict[str, str]:
    """What a gRPC door knows to be registered."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        told = client.get_system_shared_memory_status()
        return {name: one.key for name, one in told.regions.items()}


def test_the_door_is_started_again_knows_all_regions_and_ends_with_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = ("--server.grpc-port", str(port), "--server.client-shm", "true")
    with listening(*given) as (running, url), memory(64) as region:
        with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
            client.register_system_shared_memory(region.name, region.key, 64)
        wait_for(lambda: is_ready(port), "the gRPC door", WAIT_S)
        assert regions_at(port) == {region.name: region.key}
        first = running.pid("grpc-0")
        os.kill(first, signal.SIGKILL)
        running.find("grpc-0 was killed by SIGKILL: starting it again")
        wait_for(lambda: is_ready(port), "the gRPC door again", WAIT_S)
        assert regions_at(port) == {region.name: region.key}
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.infer("pool", []).get_response().parameters["sequences"].int64_param == 0
            running.find('"op": "pool", "method": "ModelInfer"')
            told = client.get_inference_statistics("pool").model_stats[0]
            assert told.inference_count == 1
        assert running.stop() == 0
        assert not [line for line in running.lines if "Traceback" in line]


def test_a_port_that_is_taken_ends_the_service_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        with process("--server.port", "0", "--server.grpc-port", taken) as running:
            assert running.child.wait(WAIT_S) == 1
            (told,) = running.told("error")
    assert f"server.grpc_port {taken}" in told, told
