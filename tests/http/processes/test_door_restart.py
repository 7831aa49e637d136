"""An engine that is killed, and the one that is started after it: empty, and it says so."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import LAYERS, PAGE_SIZE, PAGES, append, ask, check_problem, create, rows
from http_process import listening

from tests.harness.plain_http import http_client
from tests.harness.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long

IDS = list(range(2 * PAGE_SIZE))
NAMED = {"token_ids": IDS}


def keep(client: httpx.Client, rng: np.random.Generator) -> tuple[Any, str]:
    """A sequence with committed pages: its k at layer 0, and the last page's key."""
    create(client, "a")
    for layer in range(LAYERS - 1, -1, -1):
        k = rows(rng, len(IDS))
        append(client, layer, "a", k, rows(rng, len(IDS)))
    reply = client.post("/v1/sequences/a/commit", json=NAMED).json()
    assert reply["committed_len"] == len(IDS)
    return k, reply["last_key"]


def is_another(url: str, before: str) -> bool:
    """Whether the service has an engine other than `before`."""
    with suppress(httpx.TransportError):
        reply = httpx.get(f"{url}/v1/info", timeout=WAIT_S)
        return reply.status_code == 200 and reply.json()["instance_id"] != before
    return False


def test_after_its_engine_was_killed_a_service_is_empty_and_its_followers_learn(
    rng: np.random.Generator,
) -> None:
    with listening() as (running, url), http_client(url) as client:
        _, key = keep(client, rng)
        lease = client.post("/v1/prefix/match", json=NAMED | {"lease_s": 600.0}).json()["lease"]
        assert client.put("/v1/prefix/pin", json={"page_key": key, "hard": True}).is_success
        quota = {"max_pages": 9, "reserved_pages": 3}
        assert client.put("/v1/namespaces/default", json=quota).is_success
        events = client.get("/v1/events/page?after=0").json()
        assert [one["type"] for one in events["events"]] == ["stored"]
        before = client.get("/v1/info").json()["instance_id"]
        os.kill(running.pid("engine"), signal.SIGKILL)
        running.find("engine was killed by SIGKILL")
        wait_for(lambda: is_another(url, before), "another engine")

        with http_client(url) as client:
            pool = client.get("/v1/pool").json()
            assert (pool["free"], pool["sequences"], pool["leases"]) == (PAGES, 0, 0), pool
            check_problem(client.get("/v1/sequences/a"), 404, "unknown_sequence")
            renewed = client.post(f"/v1/leases/{lease['id']}", json={"lease_s": 5.0})
            check_problem(renewed, 404, "unknown_lease")
            unpinned = client.delete(f"/v1/prefix/pin?page_key={key}")
            check_problem(unpinned, 404, "unknown_page")
            found = client.post("/v1/prefix/match", json=NAMED).json()
            assert (found["matched_len"], found["lease"]) == (0, None)
            assert client.get("/v1/namespaces/default").json()["max_pages"] is None
            missed = client.get(f"/v1/events/page?after={events['next']}").json()
            assert missed["too_old"] and missed["events"] == []
            seen = {"Last-Event-ID": str(events["next"])}
            with client.stream("GET", "/v1/events", headers=seen) as reply:
                lines = reply.iter_lines()
                assert [next(lines), next(lines)][1] == "event: too_old"

            k, again = keep(client, rng)
            assert again == key, "the same ids have the same name and the new rows"
            held = ask(client, "/v1/gather", {"layer": 0, "sequences": ["a"]})[1]["k"]
            assert np.array_equal(held, k)
            (stored,) = client.get(f"/v1/events/page?after={missed['next']}").json()["events"]
            assert stored["id"] > events["next"] and stored["page_keys"][-1] == key
            assert running.stop() == 0
