"""Servers under measurement, each a process on a free port.

A server may be the service of another checkout.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Final

from bench.report.provenance import ROOT

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 55.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process that serves 127.0.0.1; `ready_s` is the time from its start until it was ready."""

    port: int
    pid: int
    ready_s: float
    socket: str = ""
    oip_port: int = 0
    grpc_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def attnd(
    *options: str, root: Path = ROOT, kind: str = "cpu", oip: bool = False, reads_log: bool = True
) -> Iterator[Server]:
    """The service of a checkout with a backend and further options.

    `oip` adds a gateway, or before there was one a gRPC door. Without `reads_log` its log goes to a
    pipe that no process reads.
    """
    port = free_port()
    arguments = ["-m", "service", "--server.port", str(port), "--backend.kind", kind, *options]
    with TemporaryDirectory(prefix="attnd-bench-") as directory:
        socket_path = str(Path(directory, "engine.sock"))
        arguments += ["--server.socket", socket_path]
        oip_port, grpc_port = (free_port(), free_port()) if oip else (port, 0)
        if oip and not (root / "service/gateway").is_dir():
            oip_port = port
            arguments += ["--server.grpc-port", str(grpc_port)]
        elif oip:
            arguments += ["--oip.http-port", str(oip_port), "--oip.grpc-port", str(grpc_port)]
        with running(arguments, port, root, reads_log) as server:
            yield replace(server, socket=socket_path, oip_port=oip_port, grpc_port=grpc_port)


@contextmanager
def echo() -> Iterator[Server]:
    """The bare HTTP echo on uvicorn, with the service's event loop and parser."""
    port = free_port()
    uvicorn = ("-m", "uvicorn", "bench.driver.echo:app", "--port", str(port))
    quiet = ("--log-level", "warning", "--no-access-log", "--lifespan", "off")
    with running((*uvicorn, "--loop", "uvloop", "--http", "httptools", *quiet), port) as server:
        yield server


@contextmanager
def running(
    arguments: Sequence[str], port: int, root: Path = ROOT, reads_log: bool = True
) -> Iterator[Server]:
    """`python *arguments` until the end of the block, then SIGTERM and a wait for its exit."""
    environment = os.environ | {"PYTHONPATH": str(root / "client" / "src")}
    with TemporaryFile() as log:
        started = time.perf_counter()
        stderr = log if reads_log else subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=root, env=environment, stderr=stderr
        )
        try:
            wait_ready(process, port)
            yield Server(port, process.pid, time.perf_counter() - started)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            stop(process)
            if process.stderr is not None:
                process.stderr.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL if the process runs on for STOP_TIMEOUT_S."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait for a 200 of /health/ready; RuntimeError if the process ends before."""
    ends = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < ends:
        if process.poll() is not None:
            raise RuntimeError(
                f"{process.args!r} ended with {process.returncode} before it answered"
            )
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} was not ready in {START_TIMEOUT_S:.0f} s")


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
