"""Services as subprocesses for client tests: one on a Unix socket, or on a port of its choice."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnd import Client

ROOT = Path(__file__).resolve().parents[2]
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
    """Run `python -m service`; yields the address it says it serves, `http://…` or `unix:…`."""
    pool = [part for name, value in POOL.items() for part in (f"--pool.{name}", value)]
    command = [sys.executable, "-m", "service", "--backend.kind", "cpu", *pool, *arguments]
    command += ["--log.level", "info"]
    # A file and not a pipe: nobody reads the log while the service writes it.
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log, open(log.name, "w") as written:
        process = subprocess.Popen(command, cwd=ROOT, stderr=written)
        try:
            yield address(process, log.name)
        finally:
            process.terminate()
            status = process.wait(timeout=60)
        assert status == 0, f"exit status {status}:\n{log.read()}"


def address(process: subprocess.Popen[bytes], log: str) -> str:
    """What the service says it serves, from its log."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r" listening on (unix:\S+|https?://\S+)", Path(log).read_text()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the service did not start:\n{Path(log).read_text()}")


def connect(where: str) -> Client:
    """A client of a service by its address, which is ready when this returns."""
    uds = where.removeprefix("unix:") if where.startswith("unix:") else None
    client = Client(uds=uds) if uds else Client(where)
    client.wait_ready(60)
    return client
