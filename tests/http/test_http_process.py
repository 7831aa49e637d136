"""`python -m service` as its own process: start, logs, signals, Unix socket, refused settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_service import ARGUMENTS, QO_HEADS, WAIT_S, append, ask, create, post, rows

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Process:
    """A running service; `lines` is its standard error so far."""

    child: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self.child.stderr)

    def find(self, pattern: str) -> re.Match[str]:
        """The first line that matches, waited for."""
        deadline = time.monotonic() + 3 * WAIT_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.01)
        raise AssertionError(f"no line matches {pattern}: {self.lines}")

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.child.send_signal(how)
        return self.child.wait(WAIT_S)

    def entries(self) -> list[dict[str, Any]]:
        """The lines as JSON."""
        return [json.loads(line) for line in self.lines]


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    """`python -m service` with the tests' pool and JSON logs."""
    command = [sys.executable, "-m", "service", *ARGUMENTS, "--log.format", "json", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as child:
        running = Process(child)
        reader = threading.Thread(target=running.read)
        reader.start()
        try:
            yield running
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            reader.join()


@contextmanager
def listening(*arguments: str) -> Iterator[tuple[Process, str]]:
    """The process once it is ready, and its URL."""
    with process("--server.port", "0", *arguments) as running:
        url = running.find(r"serves (http://[0-9.:]+)")[1]
        running.find(r"ready: ")
        yield running, url


def test_it_starts_serves_logs_json_and_stops_on_sigterm(rng: np.random.Generator) -> None:
    with listening() as (running, url):
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            create(client, "a")
            append(client, 0, "a", rows(rng, 3), rows(rng, 3))
            q = {"q": rows(rng, 1, QO_HEADS)}
            headers = {"x-request-id": "find-me"}
            fields = {"layer": 0, "sequences": ["a"]}
            assert post(client, "/v1/decode", fields, q, headers=headers).status_code == 200
            client.get("/health/live")
        running.find("find-me")
        assert running.stop() == 0
    entries = running.entries()
    (mine,) = [entry for entry in entries if entry.get("id") == "find-me"]
    assert (mine["op"], mine["status"], mine["code"], mine["logger"]) == (
        "decode",
        200,
        "ok",
        "attnd.access",
    )
    assert mine["duration_ms"] > 0 and mine["time"] and mine["level"] == "info"
    assert not [entry for entry in entries if entry.get("op") == "live"], "probes are not logged"


def test_sigterm_under_load_loses_no_admitted_request() -> None:
    answered: list[int] = []
    odd: list[str] = []

    def run(url: str, name: str) -> None:
        """Append until the service stops; every reply is 200 or a refusal, none is half."""
        mine = np.random.default_rng(len(name))
        kv = {"k": rows(mine, 1), "v": rows(mine, 1)}
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for step in range(100_000):
                fields = {"layer": 0, "sequences": [name], "offsets": [step % 8]}
                try:
                    response = post(client, "/v1/append", fields, kv)
                    if step % 8 == 7:
                        client.post(f"/v1/sequences/{name}/truncate", json={"length": 0})
                except httpx.TransportError:
                    return
                if response.status_code == 503:
                    return
                if response.status_code not in (200, 409):
                    odd.append(response.text)
                if response.status_code == 200:
                    answered.append(step)

    with listening() as (running, url):
        names = [f"s{i}" for i in range(6)]
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            create(client, *names)
        threads = [threading.Thread(target=run, args=(url, name)) for name in names]
        for thread in threads:
            thread.start()
        time.sleep(0.7)
        assert running.stop() == 0
        for thread in threads:
            thread.join(WAIT_S)
    done = [entry for entry in running.entries() if entry.get("op") == "append"]
    carried_out = sum(entry["code"] == "ok" for entry in done)
    assert odd == []
    assert len(answered) == carried_out > 20, f"{len(answered)} answered, {carried_out} done"
    assert {entry["code"] for entry in done} <= {"ok", "not_ready", "length_mismatch"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_ends_an_idle_service_cleanly(how: signal.Signals) -> None:
    with listening() as (running, _):
        assert running.stop(how) == 0
    assert [e for e in running.entries() if e["level"] in ("warning", "error")] == []


def test_it_listens_on_a_unix_socket(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "attnd.sock"
    with process("--server.uds", str(path)) as running:
        assert running.find(r"serves unix:(\S+)\"")[1] == str(path)
        running.find(r"ready: ")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://attnd") as client:
            create(client, "a")
            append(client, 1, "a", rows(rng, 2), rows(rng, 2))
            fields = {"layer": 1, "sequences": ["a"]}
            q = {"q": rows(rng, 1, QO_HEADS)}
            assert ask(client, "/v1/decode", fields, q)[1]["o"].shape[0] == 1
        assert running.stop() == 0
    assert not path.exists(), "it cleans up after itself"


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("--pool.page-size", "0", "pool.page_size"),
        ("--pool.colour", "red", "colour"),
        ("--server.port", "99999", "server.port"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(argument: str, value: str, named: str) -> None:
    with process(argument, value) as running:
        assert running.child.wait(3 * WAIT_S) == 2
    assert named in running.lines[-1], running.lines


def test_a_port_that_is_taken_stops_the_start() -> None:
    with listening() as (_, url), process("--server.port", url.rpartition(":")[2]) as second:
        assert second.child.wait(3 * WAIT_S) != 0
    assert any("address already in use" in line for line in second.lines), second.lines
