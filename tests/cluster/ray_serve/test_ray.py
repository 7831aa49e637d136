"""The cluster on Ray, as one command: `python -m service --cluster`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from service.cluster.placement.cost import EngineLoad

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0
POOL = (
    *("--backend.kind", "cpu"),
    *("--pool.num-layers", "1"),
    *("--pool.num-kv-heads", "1"),
    *("--pool.head-dim", "4"),
    *("--pool.num-pages", "64"),
    *("--pool.dtype", "fp32"),
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def served(*given: str, **environment: str) -> Iterator[httpx.Client]:
    """A cluster of two engines, as soon as both are there. Its log is plain, and has no noise of
    Ray's at a normal stop."""
    port = free_port()
    command = [sys.executable, "-m", "service", "--cluster", "--cluster.engines", "2"]
    command += ["--server.port", str(port), *POOL, *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as made:
                wait_for(lambda: len(engines(made)) == 2)
                yield made
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
            log.seek(0)
            text = log.read()
            assert text.count(": sessions at /") >= 2, text
            assert "\x1b[" not in text and "infinite retries" not in text, text
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Its engines, on one host, have a directory each."""
    path = tmp_path_factory.mktemp("disk")
    disk = "--cache.disk-path", str(path), "--cache.disk-bytes", str(2**20), "--cache.model", "m"
    with served(*disk) as made:
        assert len(list(path.glob("*/engine-0"))) == 2
        yield made


@dataclass
class Nodes:
    """A Ray of several nodes on this host (ray_nodes.py)."""

    process: subprocess.Popen[str]

    def send(self, command: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{command}\n"


@contextmanager
def several_nodes() -> Iterator[tuple[str, Nodes]]:
    """Its address, and what adds nodes to its first one, which alone may have doors."""
    command = [sys.executable, str(Path(__file__).with_name("ray_nodes.py"))]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip(), Nodes(process)
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def wait_for(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.1)


def engines(client: httpx.Client) -> list[dict[str, Any]]:
    try:
        answer = client.get("/v1/engines")
    except httpx.TransportError:
        return []
    return list(answer.json()["engines"]) if answer.status_code == 200 else []


def statuses(client: httpx.Client, names: list[str]) -> set[int]:
    return {client.get(f"/v1/sequences/{name}").status_code for name in names}


def engine_processes() -> list[int]:
    return processes_of("service.engine")


def processes_of(module: str) -> list[int]:
    """Processes started by the replicas of this test's cluster: other tests may run one, too."""
    parents, commands = {1: 0, 0: 0}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                status = (entry / "status").read_text()
                parents[int(entry.name)] = int(re.findall(r"^PPid:\t(\d+)$", status, re.M)[0])
                commands[int(entry.name)] = (entry / "cmdline").read_text()
    return [
        pid
        for pid, command in commands.items()
        if module in command and commands.get(parents[pid], "").startswith("ray::")
        if os.getpid() in ancestors(pid, parents)
    ]


def ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid := parents.get(pid, 0):
        yield pid


def fill_both(client: httpx.Client, names: list[str]) -> None:
    """Make sequences until both engines have some: where the first go depends on who was busy."""
    rows = {"dtype": "F32", "shape": [48, 1, 4], "data": [1.0] * 192}
    while not all(one["sequences"] for one in engines(client)):
        assert len(names) < 40, engines(client)
        names.append(f"chat-{len(names)}")
        made = client.post("/v1/sequences", json={"sequences": [{"id": names[-1]}]})
        assert made.status_code == 201, made.text
        body = {"layer": 0, "sequences": names[-1:], "append_indptr": [0, 48]}
        client.post("/v1/append", json=body | {"tensors": {"k": rows, "v": rows}})
        time.sleep(0.2)


def test_two_engines_are_one_service_and_one_that_dies_comes_back(client: httpx.Client) -> None:
    names = [f"chat-{n}" for n in range(6)]
    made = client.post("/v1/sequences", json={"sequences": [{"id": name} for name in names]})
    assert made.status_code == 201, made.text
    rows = {"dtype": "F32", "shape": [6, 1, 4], "data": [float(n) for n in range(24)]}
    body = {"layer": 0, "sequences": names, "tensors": {"k": rows, "v": rows}}
    assert client.post("/v1/append", json=body).json()["lengths"] == [1] * 6
    gathered = client.post("/v1/gather", json={"layer": 0, "sequences": names, "dtype": "fp32"})
    assert gathered.json()["tensors"]["k"]["data"] == rows["data"]
    fill_both(client, names)
    before = {one["instance_id"] for one in engines(client)}
    os.kill(engine_processes()[0], signal.SIGKILL)
    answers = [client.get(f"/v1/sequences/{name}") for name in names]
    assert {answer.status_code for answer in answers} == {200, 410}
    lost = next(answer for answer in answers if answer.status_code == 410).json()
    assert lost["code"] == "lost_sequence" and lost["sequences"][0] in names
    wait_for(lambda: len(engines(client)) == 2)
    after = {one["instance_id"] for one in engines(client)}
    assert len(before & after) == 1, "the one that died is another one now"
    metrics = client.get("/metrics").text
    assert len(re.findall(r"^attnd_engine_up\{.*\} 1\.0$", metrics, re.M)) == 2
    appended = re.search(r"^attnd_tokens_appended_total (\S+)$", metrics, re.M)
    assert appended is not None and float(appended[1]) > 0, "as the engines have counted"


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^PPid:\t(\d+)$", status, re.M)[0])


@pytest.mark.slow
def test_router_and_worker_come_back_and_the_cluster_grows_and_shrinks() -> None:
    """kill -9 of the router loses no sequence, of a Ray worker those of its engine alone."""
    scaling = (
        *("--cluster.max-engines", "3", "--cluster.least-free", "0.3", "--cluster.drain-s", "5"),
        *("--cluster.grow-after-s", "1", "--cluster.shrink-after-s", "2"),
    )
    names: list[str] = []
    with served(*scaling) as client:
        fill_both(client, names)
        os.kill(processes_of("service.cluster")[0], signal.SIGKILL)
        wait_for(lambda: bool(engines(client)) and statuses(client, names) == {200})
        before = {one["instance_id"] for one in engines(client)}
        os.kill(parent_of(engine_processes()[0]), signal.SIGKILL)  # its engine ends with it
        wait_for(lambda: statuses(client, names) == {200, 410})
        wait_for(lambda: len({one["instance_id"] for one in engines(client)} - before) == 1)
        rows = {"dtype": "F32", "shape": [48 * 16, 1, 4], "data": [1.0] * (48 * 64)}
        for number in range(2):  # 48 of 64 pages each
            name = f"long-{number}"
            made = client.post("/v1/sequences", json={"sequences": [{"id": name}]})
            assert made.status_code == 201, made.text
            body = {"layer": 0, "sequences": [name], "append_indptr": [0, 48 * 16]}
            appended = client.post("/v1/append", json=body | {"tensors": {"k": rows, "v": rows}})
            assert appended.status_code == 200, appended.text
        wait_for(lambda: len(engines(client)) == 3)
        client.post("/v1/sequences/delete", json={"prefix": ""})
        wait_for(lambda: len(engines(client)) == 2)


@dataclass
class Written:
    """One sequence and its expected rows."""

    client: httpx.Client
    name: str
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    k: Any = field(default_factory=lambda: np.zeros((0, 1, 4), np.float32))

    def post(self, route: str, body: dict[str, Any], **arrays: Any) -> Any:
        tensors = {
            name: {"dtype": "F32", "shape": rows.shape, "data": rows.ravel().tolist()}
            for name, rows in arrays.items()
        }
        body = {"layer": 0, "sequences": [self.name]} | body
        answer = self.client.post(route, json=body | ({"tensors": tensors} if tensors else {}))
        assert answer.status_code == 200, answer.text
        return answer.json().get("tensors")

    def grow(self, count: int) -> Any:
        new = self.rng.standard_normal((count, 1, 4)).astype(np.float32)
        self.k = np.concatenate((self.k, new))
        return new

    def append(self, count: int) -> None:
        new = self.grow(count)
        self.post("/v1/append", {"append_indptr": [0, count]}, k=new, v=-new)

    def check(self) -> None:
        """A decode that appends, and all rows."""
        new, q = self.grow(1), self.rng.standard_normal((1, 1, 4)).astype(np.float32)
        found = self.post("/v1/decode", {}, q=q, k=new, v=-new)["o"]["data"]
        weights = np.exp(self.k[:, 0] @ q[0, 0] / 2)
        expected = weights @ -self.k[:, 0] / weights.sum()
        np.testing.assert_allclose(found, expected, atol=2e-5)
        rows = self.post("/v1/gather", {"dtype": "fp32"})
        np.testing.assert_array_equal(rows["k"]["data"], self.k.ravel())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what Ray does as it is imported is its own
def test_engines_of_two_nodes_are_one_service_and_a_node_that_is_lost_is_replaced() -> None:
    others = set(processes_of("service.cluster"))  # of the other tests' cluster
    with several_nodes() as (address, nodes):
        nodes.send("add")
        with served("--cluster.ingress-resource", "door", RAY_ADDRESS=address) as client:
            names: list[str] = []
            fill_both(client, names)
            there = {one["instance_id"] for one in engines(client)}
            (router,) = set(processes_of("service.cluster")) - others
            os.kill(router, signal.SIGKILL)
            wait_for(lambda: len(engines(client)) == 2)
            assert {one["instance_id"] for one in engines(client)} == there
            wait_for(lambda: statuses(client, names) == {200})
            nodes.send("kill")
            wait_for(lambda: statuses(client, names) == {200, 410})  # 503 until it counts as lost
            assert len(engines(client)) == 1
            nodes.send("add")
            wait_for(lambda: len(engines(client)) == 2)
            assert len(there & {one["instance_id"] for one in engines(client)}) == 1


@pytest.mark.filterwarnings("ignore")  # what Ray does as it is imported is its own
def test_the_policy_decides_when_all_engines_have_reported() -> None:
    from service.cluster.ray.app import Policy

    def context(current: int, *loads: EngineLoad) -> Any:
        fields = ("free", "cached", "held", "queue_s")
        means = {name: {n: getattr(one, name) for n, one in enumerate(loads)} for name in fields}
        return SimpleNamespace(
            aggregated_metrics=means, current_num_replicas=current, target_num_replicas=current
        )

    policy = Policy(least_free=0.1, most_queue_s=0.25)
    full, idle = EngineLoad(free=1, held=99), EngineLoad(free=100)
    assert policy(context(1, full))[0] == 2
    assert policy(context(2, full))[0] == 2, "the second has not reported yet"
    assert policy(context(2, idle, idle))[0] == 1
    assert policy(context(1))[0] == 1
