"""A stopped engine: callers get 504 after their deadline, and the service is not ready."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest
from http_process import listening

from service.doors.kit.link import STALE_S
from service.doors.kit.timeouts import GRACE_S
from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long


def test_a_stopped_engine_leaves_no_client_waiting_and_is_not_ready() -> None:
    with listening() as (running, url), httpx.Client(base_url=url, timeout=WAIT_S) as client:
        engine = running.pid("engine")
        os.kill(engine, signal.SIGSTOP)
        try:
            started = time.monotonic()
            headers = {"X-Attnd-Deadline-Ms": "500"}
            reply = client.get("/v1/sequences", headers=headers)
            assert reply.status_code == 504, reply.text
            assert time.monotonic() - started < 0.5 + GRACE_S + WAIT_S / 2
            wait_for(
                lambda: client.get("/health/ready").status_code == 503,
                "the door to miss the engine",
                2 * STALE_S,
            )
            assert client.get("/health/live").status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: client.get("/health/ready").status_code == 200, "the engine", WAIT_S)
        assert client.get("/v1/sequences").status_code == 200
