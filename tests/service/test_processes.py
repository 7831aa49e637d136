"""The real engine and real doors under their supervisor: deaths, metrics, logs, memory, the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from supervised import WAIT_S, Service, kill, supervised, wait_until_gone

pytestmark = pytest.mark.long

CPU = ("--backend.kind", "cpu", "--pool.num-pages", "64")


@contextmanager
def served(path: Path, *arguments: str) -> Iterator[tuple[Service, httpx.Client]]:
    """The service once it is ready."""
    with supervised(*CPU, *arguments, engine="real", door="real", socket=path) as service:
        line = service.find(lambda entry: " listening on " in entry["message"])["message"]
        url = line.split(" listening on ")[1].split()[0]
        service.find(lambda entry: entry["message"].startswith("ready: "))
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            yield service, client


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


def ask(client: httpx.Client, route: str = "/v1/pool") -> int:
    """The status of a GET on a connection of its own."""
    with httpx.Client(base_url=client.base_url, timeout=WAIT_S) as fresh:
        return fresh.get(route).status_code


def named(service: Service) -> dict[str, int]:
    """The processes that the supervisor has started, by name."""
    pid = service.process.pid
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        found[words[words.index(b"--process") + 1].decode()] = int(child)
    return found


def metrics(client: httpx.Client) -> dict[tuple[str, ...], float]:
    text = client.get("/metrics").text
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def settled(client: httpx.Client, asked: int) -> dict[tuple[str, ...], float]:
    """The metrics once both doors have counted what they answered: that may lag a little."""
    deadline = time.monotonic() + WAIT_S
    while (found := metrics(client)).get(("attnd_requests_total", "ok", "pool")) != asked:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided among those that share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def test_two_doors_show_one_service_and_one_of_them_may_die(path: Path) -> None:
    with served(path, "--server.http-workers", "2") as (service, client):
        before = named(service)
        assert set(before) == {"engine", "http-0", "http-1"}
        assert sum(map(proportional_bytes, [service.process.pid, *before.values()])) < 600 * 2**20
        client.post("/v1/sequences", json={"sequences": [{"id": "a"}]}).raise_for_status()
        asked = 40
        assert [ask(client) for _ in range(asked)] == [200] * asked
        found = settled(client, asked)
        assert found["attnd_sequences",] == 1
        assert found["attnd_kv_pages", "free"] == 64
        for process in ("main", *before):
            assert found["process_resident_memory_bytes", process] > 0, process
        kill(before["http-0"])
        service.find(lambda entry: "starting it again" in entry["message"])
        assert [ask(client, "/v1/sequences/a") for _ in range(10)] == [200] * 10
        again = named(service)
        assert (again["engine"], again["http-1"]) == (before["engine"], before["http-1"])
        found = settled(client, asked)
        assert found["attnd_requests_total", "ok", "pool"] == asked
        assert found["attnd_process_restarts_total", "http-0"] == 1
        assert found["attnd_process_restarts_total", "http-1"] == 0
        service.signal(signal.SIGTERM)
        assert service.status() == 0
        wait_until_gone(*again.values())
    assert service.messages("error") == []
    assert len(service.messages("warning")) == 1


def test_when_the_engine_dies_doors_answer_503_and_the_service_ends_with_1(path: Path) -> None:
    with served(path) as (service, client):
        running = named(service)
        assert ask(client) == 200
        kill(running["engine"])
        answers = set()
        while service.process.poll() is None:
            try:
                answers.add(client.get("/v1/pool").status_code)
            except httpx.TransportError:
                answers.add(0)  # the door has stopped to listen
        assert answers <= {0, 503}
        assert service.status() == 1
        wait_until_gone(*running.values())
    assert [line for line in service.messages("error") if line.startswith("engine was killed")]


def test_when_the_supervisor_is_killed_engine_and_doors_end_with_it(path: Path) -> None:
    with served(path) as (service, client):
        running = named(service)
        assert ask(client) == 200
        service.signal(signal.SIGKILL)
        wait_until_gone(*running.values())


def test_every_line_says_which_process_speaks_and_requests_whose_they_are(path: Path) -> None:
    with served(path) as (service, client):
        client.get("/v1/pool?x=%20status=200", headers={"x-request-id": "mine"})
        line = service.find(lambda entry: entry.get("id") == "mine")
        assert (line["process"], line["peer"].rpartition(":")[0]) == ("http-0", "127.0.0.1")
        service.signal(signal.SIGTERM)
        assert service.status() == 0
    assert {entry["process"] for entry in service.entries()} == {"main", "engine", "http-0"}
    assert len(service.entries()) == len(service.lines), "every line is JSON"
