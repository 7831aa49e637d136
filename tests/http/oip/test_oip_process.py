"""The gRPC door as a process of the service: started, started again, drained, or refused."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

import pytest
import tritonclient.grpc
from http_process import listening, process
from tritonclient.utils import InferenceServerException

from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long


def is_ready(port: int) -> bool:
    with (
        suppress(InferenceServerException),
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        return bool(client.is_server_ready(client_timeout=WAIT_S))
    return False


def test_the_door_is_started_again_and_ends_with_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = ("--server.grpc-port", str(port))
    with listening(*given) as (running, _):
        wait_for(lambda: is_ready(port), "the gRPC door", WAIT_S)
        first = running.pid("grpc-0")
        os.kill(first, signal.SIGKILL)
        running.find("grpc-0 was killed by SIGKILL: restarting it")
        wait_for(lambda: is_ready(port), "the gRPC door again", WAIT_S)
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.infer("pool", []).get_response().parameters["sequences"].int64_param == 0
            running.find('"op": "pool", "method": "ModelInfer"')
            reply = client.get_inference_statistics("pool").model_stats[0]
            assert reply.inference_count == 1
        assert running.stop() == 0
        assert not [line for line in running.lines if "Traceback" in line]


def test_a_port_that_is_taken_ends_the_service_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        with process("--server.port", "0", "--server.grpc-port", taken) as running:
            assert running.child.wait(WAIT_S) == 1
            (reply,) = running.messages("error")
    assert f"server.grpc_port {taken}" in reply, reply
