"""The events of a router over its Unix socket, as the ZeroMQ process of its service reads them."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import numpy as np
import pytest

from service.cluster.routing.event_socket import RouterEvents, path_beside
from service.tenants import OPEN
from tests.cluster.harness import DIM, FLOAT, HEADS, LAYERS, PAGE, SETTINGS, Cluster


async def test_the_zeromq_process_reads_the_events_and_the_numbers_of_the_router(
    cluster: Cluster,
) -> None:
    roster = str(cluster.engines.roster)
    assert stat.S_IMODE(path_beside(roster).stat().st_mode) == 0o600
    source = RouterEvents(SETTINGS, has_keys=False)
    await source.connect(roster, "zmq-0", "")
    before = (await source.after(OPEN, 0))["next"]
    (name,) = await cluster.create(1)
    k = np.zeros((PAGE, HEADS, DIM), FLOAT)
    for layer in range(LAYERS):
        fields = {"layer": layer, "sequences": [name], "append_indptr": [0, PAGE]}
        await cluster.ok("append", fields, k=k, v=k)
    await cluster.ok("commit", {"id": name, "token_ids": [77] * PAGE})
    known = cluster.router.members.prefixes["default"]
    await cluster.until(lambda: known.log.newest > before, "the event of the commit")
    page = await source.after(OPEN, before)
    assert page == await cluster.fields("events", {"after": before})
    assert [event["token_ids"] for event in page["events"]] == [[77] * PAGE]


@pytest.mark.parametrize("line", [b"", b"default\n", b"default x\n", b"\xff 1\n", b"a" * 2**17])
async def test_a_malformed_line_gets_an_empty_reply(line: bytes, cluster: Cluster) -> None:
    path = path_beside(str(cluster.engines.roster))
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_without_a_router_there_is_an_error_and_no_page(tmp_path: Path) -> None:
    source = RouterEvents(SETTINGS, has_keys=False)
    await source.connect(str(tmp_path / "none.roster"), "zmq-0", "")
    with pytest.raises(OSError, match="No such file"):
        await source.after(OPEN, 0)
