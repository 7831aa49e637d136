"""Tiers of a service that is killed: durable commits are there again, to the bit.

`KILLS=200` kills it that often; with `-s` the test prints the numbers of commits and checks.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import LAYERS, PAGE_SIZE, append, create, rows
from http_process import listening

from tests.harness.plain_http import http_client

pytestmark = pytest.mark.long
ROUNDS = int(os.environ.get("KILLS", "3"))
CHECKED = 24
"""Newest and other durable commits that each round checks."""


def tokens(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * PAGE_SIZE))


def content(number: int, layer: int) -> Any:
    return rows(np.random.default_rng(100 * number + layer), 2 * PAGE_SIZE)


def keep(client: httpx.Client, number: int) -> bool:
    """Compute, commit and delete a prompt; whether it is durable."""
    name = f"s-{number}"
    create(client, name)
    for layer in range(LAYERS - 1, -1, -1):
        k = content(number, layer)
        append(client, layer, name, k, -k)
    names = {"token_ids": tokens(number)}
    reply = client.post(f"/v1/sequences/{name}/commit", json=names).json()
    client.delete(f"/v1/sequences/{name}")
    return reply["durable"] is True


def check(client: httpx.Client, number: int) -> None:
    """The prompt is cached, as it was computed."""
    new = {"sequences": [{"id": "check", "prefix": {"token_ids": tokens(number)}}]}
    made = client.post("/v1/sequences", json=new).json()["sequences"][0]
    assert made["cached_len"] == 2 * PAGE_SIZE, made
    for layer in range(LAYERS):
        wanted = {"layer": layer, "sequences": ["check"], "dtype": "fp32"}
        found = client.post("/v1/gather", json=wanted).json()["tensors"]["k"]
        values = np.array(found["data"], np.float32).reshape(found["shape"])
        np.testing.assert_array_equal(values, content(number, layer).astype(np.float32))
    client.delete("/v1/sequences/check")


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_durable_commits_survive_kills_under_load(tmp_path: Path) -> None:
    given = ("--cache.disk-path", str(tmp_path), "--cache.disk-bytes", str(2**28))
    given += ("--cache.model", "m@1", "--cache.write", "commit")
    durable: list[int] = []
    number = checked = 0
    chosen = random.Random(ROUNDS)
    for kills in range(1, ROUNDS + 1):
        with listening(*given) as (running, url), http_client(url) as one:
            others = durable[:-CHECKED]
            some = [*durable[-CHECKED:], *chosen.sample(others, min(CHECKED, len(others)))]
            for old in some:
                check(one, old)
            checked += len(some)
            engine = running.pid("engine")
            timer = threading.Timer(chosen.uniform(0.05, 1.0), os.kill, (engine, signal.SIGKILL))
            timer.start()
            with suppress(httpx.HTTPError, AssertionError, KeyError):
                while True:
                    number += 1
                    if keep(one, number):
                        durable.append(number)
                    time.sleep(0.001)
            timer.join()
            assert running.stop() in (0, 1)  # 1: the signal came before the news of the kill
        counts = f"{len(durable)} durable commits of {number}, {checked} checked"
        print(f"{kills} kills: {counts}", flush=True)
    assert durable
