"""Every way into the service, driven by a process of its own; and the report of its figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attnd import Client

from bench.cases.loads import Decode, Heads, fill
from bench.driver.servers import Server, attnd, road_echo
from bench.driver.startup import family, memory
from bench.driver.ways import Kind, Target
from bench.driver.worker import Worker
from bench.report.page import REPORT, report

HEADS = Heads(num_qo=4, num_kv=2, dim=16)
DECODE = Decode(("a",), HEADS, kv_len=4, count=3)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.fixture(scope="module")
def service() -> Iterator[Server]:
    with attnd(*HEADS.pool(), "--log.level", "warning", grpc=True) as server:
        yield server


@pytest.mark.parametrize(
    "kind", ["http", "client", "road", "session", "session_in_place", "oip_http", "oip_grpc"]
)
def test_every_way_decodes_and_reports_the_backends_time(
    worker: Worker, service: Server, kind: Kind
) -> None:
    with Client(f"http://127.0.0.1:{service.port}") as client:
        load = Decode(fill(client, 2, HEADS, 5), HEADS, kv_len=5, count=3)
    port = service.grpc_port if kind == "oip_grpc" else service.port
    worker.open(kind, Target(kind, port, service.socket), load)
    run = worker.loop(kind, 10, 30.0)
    assert len(run.samples) == 10
    assert all(0 < sample.backend_s < sample.seconds for sample in run.samples)
    assert worker.crowd(kind, 2, 0.1) > 0


def test_the_echo_of_frames_has_no_backend(worker: Worker) -> None:
    with road_echo() as server:
        worker.open("echo", Target("road", socket=server.socket), DECODE)
        run = worker.loop("echo", 50, 30.0)
    assert len(run.samples) == 50
    assert all(sample.backend_s == 0 for sample in run.samples)


def test_a_workers_error_is_raised_here_and_the_worker_continues(worker: Worker) -> None:
    worker.open("nowhere", Target("road", socket="/nowhere"), DECODE)
    with pytest.raises(RuntimeError, match="No such file"):
        worker.loop("nowhere", 1, 1.0)
    with pytest.raises(RuntimeError, match="never opened"):
        worker.loop("never opened", 1, 1.0)


def test_the_memory_of_a_service_is_that_of_all_its_processes(service: Server) -> None:
    processes = {one.name: one for one in map(memory, family(service.pid))}
    assert processes.keys() >= {"service", "service.engine", "service.doors"}
    assert all(0 < one.pss <= one.rss for one in processes.values())


def test_the_report_shows_the_committed_results() -> None:
    assert REPORT.read_text(encoding="utf-8") == report(), "run python -m bench.report"
