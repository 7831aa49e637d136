"""Servers under measurement: started as processes of their own on free ports, and stopped.

A server may be the service of another version's folder; where that has no sessions, `socket` is
empty.
"""

from __future__ import annotations

import http.client
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

ROOT: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 40.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers on 127.0.0.1; `ready_s` from its start to its first ready answer."""

    port: int
    pid: int
    ready_s: float
    socket: str = ""
    grpc_port: int = 0
    """Of the gRPC door, where there is one."""


@contextmanager
def attnd(
    *options: str,
    root: Path = ROOT,
    kind: str = "cpu",
    grpc: bool = False,
    reads_log: bool = True,
) -> Iterator[Server]:
    """The service on a backend, with further command line options; `grpc`: with all doors of the
    Open Inference Protocol; not `reads_log`: its log goes to a pipe that nobody reads."""
    port = free_port()
    arguments = ["-m", "service", "--server.port", str(port), "--backend.kind", kind, *options]
    with TemporaryDirectory(prefix="attnd-bench-") as directory:
        socket_path = ""
        if (root / "service" / "road").exists():
            socket_path = str(Path(directory, "engine.sock"))
            arguments += ["--server.socket", socket_path]
        grpc_port = 0
        if grpc:
            grpc_port = free_port()
            arguments += ["--server.grpc-port", str(grpc_port)]
        with running(arguments, port, root, reads_log) as server:
            yield replace(server, socket=socket_path, grpc_port=grpc_port)


@contextmanager
def echo() -> Iterator[Server]:
    """The bare echo under the server the service uses, with the same loop and parser."""
    port = free_port()
    uvicorn = ("-m", "uvicorn", "bench.driver.http_echo:app", "--port", str(port))
    quiet = ("--log-level", "warning", "--no-access-log", "--lifespan", "off")
    with running((*uvicorn, "--loop", "uvloop", "--http", "httptools", *quiet), port) as server:
        yield server


@contextmanager
def road_echo() -> Iterator[Server]:
    """The bare echo of the road's frames."""
    with TemporaryDirectory(prefix="attnd-bench-") as directory:
        path = Path(directory, "echo.sock")
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.driver.road_echo", str(path)], cwd=ROOT
        )
        try:
            while not path.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
                time.sleep(0.02)
            yield Server(0, process.pid, time.perf_counter() - started, str(path))
        finally:
            stop(process)


@contextmanager
def running(
    arguments: Sequence[str], port: int, root: Path = ROOT, reads_log: bool = True
) -> Iterator[Server]:
    """`python *arguments` until the end of the block; then SIGTERM, and its exit is awaited."""
    with TemporaryFile() as log:
        started = time.perf_counter()
        stderr = log if reads_log else subprocess.PIPE
        process = subprocess.Popen([sys.executable, *arguments], cwd=root, stderr=stderr)
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
    """SIGTERM, and SIGKILL when that does not end it in time."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return at the first 200 of /health/ready; RuntimeError when the process ends before."""
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
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
