"""Engines stop and drain, the router is killed: nothing is lost. Longer: `stress.py`."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import httpx
import pytest

from tests.cluster.stress import Service, client_of, play, served, until_ready

pytestmark = pytest.mark.long

SECONDS = 12.0
LONGEST_STALL_S = 4.0


@pytest.mark.parametrize("num_engines", [2, 3])
def test_nothing_is_lost_unknown_or_duplicated_while_no_engine_dies(num_engines: int) -> None:
    with served(num_engines) as service:
        outcomes = asyncio.run(play(service, SECONDS, num_engines, LONGEST_STALL_S))
    print(dict(outcomes))
    assert outcomes["ok"] > 50
    assert all(outcomes[what] for what in ("router killed", "drains", "stalls", "rows"))


def test_a_router_that_starts_is_ready_once_it_has_met_all_engines() -> None:
    async def check(service: Service) -> None:
        async with client_of(service) as client:
            await until_ready(client, 2)
            stopped = service.engines.processes["engine-1"]
            stopped.send_signal(signal.SIGSTOP)
            try:
                service.router.first.kill()
                service.router.first.wait()
                service.router.check()
                await until_status(client, "/v1/engines", 200)
                reply = await client.get("/health/ready")
                assert reply.status_code == 503 and "engine-1" in reply.text, reply.text
            finally:
                stopped.send_signal(signal.SIGCONT)
            await until_ready(client, 2)

    with served(2) as service:
        asyncio.run(check(service))


async def until_status(client: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(60.0):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(path)).status_code == status:
                    return
            await asyncio.sleep(0.05)
