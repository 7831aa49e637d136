"""`python -m service` as its own processes: start, logs, signals, Unix socket, what stops it."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from http_messages import KIND, QO_HEADS, append, ask, create, fill, post, rows
from http_process import listening, process
from http_service import WAIT_S, wait_for

from kernels import cuda_devices
from service import __version__
from tests.harness.plain_http import http_client
from tests.harness.processes import START_S, Process


def test_it_starts_serves_logs_json_and_stops_on_sigterm(rng: np.random.Generator) -> None:
    with listening() as (running, url):
        with http_client(url) as client:
            fill(client, rng, "a", 3)
            q = {"q": rows(rng, 1, QO_HEADS)}
            headers = {"x-request-id": "find-me"}
            fields = {"layer": 0, "sequences": ["a"]}
            assert post(client, "/v1/decode", fields, q, headers=headers).status_code == 200
            client.get("/health/live")
        running.find("find-me")
        check_libraries(running)
        assert running.stop() == 0
    entries = running.entries()
    (mine,) = [entry for entry in entries if entry.get("id") == "find-me"]
    reply = (mine["op"], mine["status"], mine["code"], mine["logger"], mine["process"])
    assert reply == ("decode", 200, "ok", "attnd.access", "http-0")
    assert mine["duration_ms"] > 0 and mine["time"] and mine["level"] == "info"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", mine["peer"])
    assert not [entry for entry in entries if entry.get("op") == "live"], "probes are not logged"
    speakers = {entry["process"]: entry["message"] for entry in reversed(entries)}
    assert speakers["main"].startswith(f"attnd {__version__} starts, listening on {url}"), speakers
    assert speakers["engine"].startswith("ready: "), speakers
    assert running.messages("warning", "error") == []


def check_libraries(running: Process) -> None:
    """A door holds no torch: it starts in a moment, and its memory is for bodies."""
    engine, door, main = (
        Path(f"/proc/{pid}/maps").read_text()
        for pid in (running.pid("engine"), running.pid("http-0"), running.child.pid)
    )
    assert "libtorch" in engine or KIND != "cpu", "this test knows torch when it sees it"
    assert "libtorch" not in door and "cupy" not in door
    assert "libtorch" not in main and "numpy" not in main


@pytest.mark.long
def test_sigterm_under_load_loses_no_admitted_request() -> None:
    answered: list[int] = []
    odd: list[str] = []

    def run(url: str, name: str) -> None:
        """Append until the service stops; every reply is 200 or a refusal, none is half."""
        mine = np.random.default_rng(len(name))
        kv = {"k": rows(mine, 1), "v": rows(mine, 1)}
        with http_client(url) as client:
            for step in range(100_000):
                fields = {"layer": 0, "sequences": [name], "offsets": [step % 8]}
                try:
                    response = post(client, "/v1/append", fields, kv)
                    if response.status_code == 200:
                        answered.append(step)
                    if step % 8 == 7:
                        client.post(f"/v1/sequences/{name}/truncate", json={"length": 0})
                except httpx.TransportError:
                    return
                if response.status_code == 503:
                    return
                if response.status_code not in (200, 409):
                    odd.append(response.text)

    with listening() as (running, url):
        names = [f"s{i}" for i in range(6)]
        with http_client(url) as client:
            create(client, *names)
        threads = [threading.Thread(target=run, args=(url, name)) for name in names]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answered) > 100, "them to be at it")
        assert running.stop() == 0
        for thread in threads:
            thread.join(WAIT_S)
    done = [entry for entry in running.entries() if entry.get("op") == "append"]
    carried_out = sum(entry["code"] == "ok" for entry in done)
    assert odd == []
    assert len(answered) == carried_out > 20, f"{len(answered)} answered, {carried_out} done"
    assert {entry["code"] for entry in done} <= {"ok", "not_ready", "length_mismatch"}


@pytest.mark.long
def test_ctrl_c_ends_an_idle_service_cleanly() -> None:
    with listening() as (running, url), socket.create_connection(address(url), WAIT_S) as idle:
        assert running.stop(signal.SIGINT) == 0
        assert idle.recv(1) == b"", "an idle connection is closed"
    assert running.messages("warning", "error") == []


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.mark.long
def test_it_listens_on_a_unix_socket_for_its_own_user(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "attnd.sock"
    before = os.umask(0)
    try:
        with process("--server.uds", str(path)) as running:
            assert running.find(r"listening on unix:(\S+)\"")[1] == str(path)
            engine = Path(running.find(r"sessions at (\S+)\"")[1])
            assert [stat.S_IMODE(one.stat().st_mode) for one in (path, engine)] == [0o600, 0o600]
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(
                transport=transport, base_url="http://attnd", timeout=START_S
            ) as client:
                wait_for(lambda: client.get("/health/ready").is_success, "the start", START_S)
                create(client, "a")
                append(client, 1, "a", rows(rng, 2), rows(rng, 2))
                fields = {"layer": 1, "sequences": ["a"]}
                q = {"q": rows(rng, 1, QO_HEADS)}
                assert ask(client, "/v1/decode", fields, q)[1]["o"].shape[0] == 1
                with process("--server.uds", str(path)) as second:
                    assert second.child.wait(START_S) == 1
                (line,) = second.lines
                assert "another service listens there" in line and str(path) in line, line
                assert client.get("/health/ready").status_code == 200, "the first one still serves"
            assert path.exists() and engine.exists(), "the second one took nothing away"
            assert running.stop() == 0
    finally:
        os.umask(before)
    assert not path.exists() and not engine.exists(), "it cleans up after itself"


def test_a_bad_setting_stops_the_start_and_is_named() -> None:
    with process("--pool.page-size", "0") as running:
        assert running.child.wait(START_S) == 2
    (line,) = running.lines
    assert "pool.page_size" in line


@pytest.mark.long
def test_what_cannot_be_bound_or_made_stops_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = {
            f"server.port {port}: address already in use": ("--server.port", str(port)),
            "no directory": ("--server.uds", "/proc/nowhere/attnd.sock"),
            "lower pool.num_pages": ("--server.port", "0", "--pool.num-pages", "100000000"),
        }
        if not cuda_devices():
            refused["backend.kind = cuda"] = ("--server.port", "0", "--backend.kind", "cuda")
        for reason, arguments in refused.items():
            with process(*arguments) as running:
                assert running.child.wait(START_S) == 1, running.lines
            problems = running.messages("warning", "error")
            assert len(problems) == 1, (reason, running.lines)
            if reason != "no directory":
                assert reason in problems[0], running.lines
            if "--pool.num-pages" in arguments or "cuda" in arguments:
                assert problems[0].startswith("cannot start: ")
            assert not [line for line in running.lines if "Traceback" in line]


@pytest.mark.long
def test_two_workers_count_as_one_service(rng: np.random.Generator) -> None:
    request = 24
    with listening("--server.http-workers", "2") as (running, url):
        clients = [http_client(url) for _ in range(12)]
        for index, client in enumerate(clients * 2):
            other = running.pid(f"http-{index % 2}")
            os.kill(other, signal.SIGSTOP)  # else one door may accept all connections
            reply = client.get("/v1/info", headers={"x-request-id": f"one-{index}"})
            os.kill(other, signal.SIGCONT)
            assert reply.status_code == 200
        running.find(f"one-{request - 1}")
        seen = [e["process"] for e in running.entries() if str(e.get("id")).startswith("one-")]
        assert set(seen) == {"http-0", "http-1"}, seen
        wanted = f'attnd_requests_total{{code="ok",op="info"}} {request}.0'
        for client in clients:  # whichever door is asked
            wait_for(lambda c=client: wanted in c.get("/metrics").text, "the sum over both doors")
        text = clients[0].get("/metrics").text
        for name in ("main", "engine", "http-0", "http-1"):
            assert f'process_resident_memory_bytes{{process="{name}"}}' in text
        pids = [running.child.pid, *map(running.pid, ("engine", "http-0", "http-1"))]
        assert sum(map(proportional_bytes, pids)) < 600 * 2**20
        assert "attnd_sessions 2.0" in text, "each door has one with the engine"
        for client in clients:
            client.close()
        assert running.stop() == 0


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided among the processes that share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
