"""Services as subprocesses for client tests: one on a Unix socket, or on a port of its choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attnd import Client

from tests.harness.processes import SERVICE, running

POOL = {
    "num-layers": "2",
    "num-kv-heads": "2",
    "head-dim": "64",
    "page-size": "16",
    "num-pages": "128",
    "dtype": "fp32",
}


@contextmanager
def service(*arguments: str) -> Iterator[str]:
    """Runs `python -m service`; yields the address that it serves, `http://…` or `unix:…`."""
    pool = [part for name, value in POOL.items() for part in (f"--pool.{name}", value)]
    level = ("--log.level", "info")
    with running([*SERVICE, "--backend.kind", "cpu", *pool, *arguments, *level]) as process:
        yield process.find(r" listening on (unix:\S+|https?://\S+)")[1]
        assert process.stop() == 0, process.lines


def connect(where: str) -> Client:
    """A client of a service by its address, which is ready when this returns."""
    uds = where.removeprefix("unix:") if where.startswith("unix:") else None
    client = Client(uds=uds) if uds else Client(where)
    client.wait_ready(60)
    return client
