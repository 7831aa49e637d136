"""Routers that know the cache by events alone, beside a service that dies, stops and evicts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attnd
import httpx
import numpy as np
import pytest
from http_messages import HEAD_DIM, KV_HEADS, LAYERS, PAGE_SIZE, WIRE_DTYPE, streaming
from http_process import is_ready, listening
from test_zmq_events import endpoints, subscribed

from service.core.keys import Prefix, root_key
from tests.harness.plain_http import http_client
from tests.harness.processes import Process
from tests.harness.router import BlockIndex
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

PROMPTS = [[number, *range(3 * PAGE_SIZE - 1)] for number in range(30)]


@contextmanager
def following(service: Process, url: str) -> Iterator[BlockIndex]:
    """Reads the stream of events, also after it has ended; then the service is stopped."""
    index, is_over = BlockIndex(), threading.Event()

    def follow() -> None:
        while not is_over.is_set():
            with (
                suppress(httpx.TransportError, AssertionError),
                http_client(url) as client,
                streaming(client, "/v1/events", params={"after": index.last}) as events,
            ):
                for event in events:
                    index.take(json.loads(event["data"]))
            time.sleep(0.05)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield index
    finally:
        is_over.set()
        service.stop()
        thread.join()


def store(session: attnd.Session, prompts: Sequence[list[int]]) -> None:
    for prompt in prompts:
        rows = np.ones((len(prompt), KV_HEADS, HEAD_DIM), WIRE_DTYPE)
        name = session.create_sequence().id
        for layer in range(LAYERS):
            session.append(layer, [name], rows, rows, append_indptr=[0, len(prompt)])
        session.commit(name, attnd.Prefix(prompt))
        session.delete_sequence(name)


def cached(session: attnd.Session) -> set[bytes]:
    """The keys of the prompts' pages that the pool has."""
    found = set[bytes]()
    for prompt in PROMPTS:
        sought = attnd.Prefix(prompt, tiers=["pool"])
        count = session.match_prefix(sought, lease_s=0).num_pages
        ids = np.array(prompt, np.uint32)
        keys = list(Prefix(ids, None, "").chain(root_key("default", ""), PAGE_SIZE))
        found.update(keys[:count])
    return found


def test_routers_know_the_cache_after_every_loss(tmp_path: Path) -> None:
    """A restart of the engine, stopped doors, a failed disk, a quota that evicts, and a clear."""
    road, disk = tmp_path / "road", tmp_path / "disk"
    how: dict[str, Any] = {
        "server.socket": road,
        "cache.events-history": 12,
        "cache.disk-path": disk,
        "cache.disk-bytes": 2**24,
        "cache.model": "m",
        "cache.write": "commit",
    }
    settings = [word for name, value in how.items() for word in (f"--{name}", str(value))]
    with (
        subscribed(tmp_path) as subscriber,
        listening(*endpoints(tmp_path), *settings) as (running, url),
        following(running, url) as index,
    ):

        def check(num_blocks: int) -> None:
            with attnd.Session(str(road)) as session:
                blocks = cached(session)
            assert len(blocks) == num_blocks
            wait_for(lambda: index.blocks == blocks, "the index of the stream")
            subscriber.hear_all(blocks)

        with attnd.Session(str(road)) as session:
            store(session, PROMPTS[:3])
            check(9)
            doors = [running.pid(name) for name in ("http-0", "zmq-0")]
            for door in doors:
                os.kill(door, signal.SIGSTOP)
            store(session, PROMPTS[3:15])
            for door in doors:
                os.kill(door, signal.SIGCONT)
            check(45)
            session.set_namespace("default", max_pages=30)
            store(session, PROMPTS[15:18])
            check(30)
            kept = session.create_sequence(prefix=attnd.Prefix(PROMPTS[17])).id
            session.clear()
            check(3)
            session.delete_sequence(kept)
        os.kill(running.pid("engine"), signal.SIGKILL)
        running.find("engine was killed by SIGKILL")
        wait_for(lambda: is_ready(url), "another engine")
        check(0)
        with attnd.Session(str(road)) as session:
            store(session, PROMPTS[:2])
            check(6)
            wait_for(lambda: len(index.by_medium["DISK"]) == 6, "events of records on disk")
            shutil.rmtree(disk)
            wait_for(lambda: not index.by_medium["DISK"], "events of the failed disk")
            check(6)
