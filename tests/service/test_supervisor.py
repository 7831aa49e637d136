"""The supervisor: start, hand-over, deaths of every kind, signals, exit statuses."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from supervised import PROGRAM, started, supervised

from config.settings import load_settings
from service import supervisor
from service.processes.handover import Child, Shared
from service.supervisor import EARLY_S, ECHO_S, YOUNG_S, Deaths
from tests.harness.processes import ROOT, Process, children, kill, python, wait_until_dead
from tests.harness.waiting import WAIT_S, wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


def pids(service: Process, *processes: str) -> list[int]:
    return [started(service, process)["pid"] for process in processes]


def test_every_process_is_handed_its_sockets_settings_and_name(path: Path) -> None:
    workers = ("--server.http-workers", "2")
    with supervised(*workers, "--pool.num-pages", "77", socket=path) as service:
        engine = started(service, "engine")
        doors = [started(service, "http-0"), started(service, "http-1")]
        assert [door["worker"] for door in doors] == [0, 1]
        assert engine["sockets"] == [str(path)]
        assert doors[0]["sockets"] == doors[1]["sockets"] and "127.0.0.1" in doors[0]["sockets"][0]
        for process in (engine, *doors):
            assert process["engine_socket"] == str(path)
            assert process["num_pages"] == 77
            assert process["blocking"] == [False]
            assert process["metrics"] == ["engine", "http-0", "http-1", "main"]
        port = int(doors[0]["url"].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        service.find_entry(lambda entry: f"listening on {doors[0]['url']} " in entry["message"])
        service.find_entry(lambda entry: entry["message"] == f"sessions at {path}")


def test_a_hang_up_ends_no_service_that_no_terminal_started(path: Path) -> None:
    with supervised(socket=path) as service:
        left = pids(service, "engine", "http-0")
        service.child.send_signal(signal.SIGHUP)
        service.find_entry(lambda entry: "no keys and no certificate" in entry["message"])
        assert [started(service, name)["pid"] for name in ("engine", "http-0")] == left
        assert service.stop() == 0
        assert service.entries()[-1]["message"] == "stopped, exit status 0"


def test_the_first_process_of_a_container_reaps_the_helpers_of_dead_doors(path: Path) -> None:
    """Here the process that adopts orphans, as the first one does."""
    adopt = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER"
    with supervised(door="have a helper", before=adopt, socket=path) as service:
        for count in (1, 2):
            is_helper = {"process": "http-0", "message": "a helper"}.items()
            helper = service.find_entry(lambda entry: entry.items() >= is_helper, count)["pid"]  # noqa: B023
            os.kill(started(service, "http-0", count)["pid"], signal.SIGKILL)
            started(service, "http-0", count + 1)
            wait_for(lambda: not os.path.exists(f"/proc/{helper}"), "the end of the zombie")  # noqa: B023
        assert len(children(service.child.pid)) == 2
        assert service.stop() == 0
    assert service.messages("error") == []


def test_a_service_runs_with_its_standard_streams_closed(path: Path) -> None:
    service = [sys.executable, "-c", PROGRAM, "serve", "serve"]
    service += ["--server.port", "0", "--server.socket", str(path)]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *service]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as child:
        try:
            wait_for(lambda: child.poll() is not None or len(children(child.pid)) == 2, "the start")
            for pid in children(child.pid):
                assert all(os.path.exists(f"/proc/{pid}/fd/{fd}") for fd in range(3))
            child.terminate()
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()


def test_a_hang_up_during_the_start_is_handled_after_it() -> None:
    program = """
import os, signal
import service.__main__
from service.command import attnd
from service.supervisor import arriving_signals

def main(argv):
    os.kill(os.getpid(), signal.SIGHUP)
    with arriving_signals(True) as arrived:
        print(*arrived(5.0))
    return 0

service.__main__.main = main
attnd(["serve"])
"""
    assert python(program).split() == [str(int(signal.SIGHUP))]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_lets_every_process_finish_and_ends_with_0(
    path: Path, number: signal.Signals
) -> None:
    behave = "work on for a while"
    with supervised(engine=behave, door=behave, socket=path) as service:
        left = pids(service, "engine", "http-0")
        service.send_signal(number)
        assert service.status() == 0
        wait_until_dead(*left)
    assert not path.exists()
    assert service.messages("warning", "error") == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_second_signal_ends_at_once(path: Path, number: signal.Signals) -> None:
    with supervised(engine="never stop", door="never stop", socket=path) as service:
        left = pids(service, "engine", "http-0")
        service.send_signal(signal.SIGTERM)
        time.sleep(2 * ECHO_S)
        service.send_signal(number)
        assert service.status() == 128 + number
        wait_until_dead(*left)


def test_a_signal_to_the_process_and_to_its_group_counts_once(path: Path) -> None:
    with supervised(engine="work on for a while", socket=path) as service:
        engine, door = pids(service, "engine", "http-0")
        for pid in (engine, door):
            os.kill(pid, signal.SIGINT)  # ignored
        for pid in (service.child.pid, engine, door, service.child.pid):
            os.kill(pid, signal.SIGTERM)
        assert service.status() == 0
    assert service.messages("warning", "error") == []


@pytest.mark.long
def test_what_does_not_finish_is_killed_after_the_drain_and_the_service_still_ends_with_0(
    path: Path,
) -> None:
    drain = ("--server.drain-timeout-s", "0.1")
    with supervised(*drain, engine="never stop", socket=path) as service:
        left = pids(service, "engine", "http-0")
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0
        wait_until_dead(*left)
    (warning,) = service.messages("warning")
    assert warning.startswith("engine did not finish within server.drain_timeout_s = 0.1")


@pytest.mark.long
def test_while_the_service_stops_no_new_client_waits_at_the_door(path: Path) -> None:
    with supervised(engine="never stop", socket=path) as service:
        url = started(service, "http-0")["url"]
        service.send_signal(signal.SIGTERM)
        wait_until_dead(started(service, "http-0")["pid"])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 1.0)


def test_an_engine_that_cannot_start_says_why_in_one_line_and_the_service_ends_with_1(
    path: Path,
) -> None:
    with supervised(engine="refuse", socket=path) as service:
        assert service.status() == 1
    assert service.messages("warning", "error") == ["no such device"]


@pytest.mark.long
def test_a_door_that_cannot_start_is_not_tried_again(path: Path) -> None:
    with supervised(door="refuse", socket=path) as service:
        assert service.status() == 1
    assert service.messages("warning", "error") == ["no such device"]


def test_when_the_engine_is_killed_it_and_its_doors_are_started_again(path: Path) -> None:
    with supervised(door="work on for a while", socket=path) as service:
        before = {name: started(service, name) for name in ("engine", "http-0")}
        kill(before["engine"]["pid"])
        for name, one in before.items():
            again = started(service, name, count=2)
            assert again["pid"] != one["pid"]
            assert {**again, "pid": 0, "time": 0} == {**one, "pid": 0, "time": 0}
        wait_until_dead(before["http-0"]["pid"])
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0
    how = "engine was killed by SIGKILL, and all sequences are lost: restarting it"
    assert service.messages("error") == [how] and service.messages("warning") == []


def test_engine_and_doors_that_are_killed_together_are_started_again(path: Path) -> None:
    with supervised(socket=path) as service:
        for pid in pids(service, "http-0", "engine"):
            os.kill(pid, signal.SIGKILL)
        for name in ("engine", "http-0"):
            started(service, name, count=2)
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0


@pytest.mark.long
def test_a_signal_while_the_doors_of_a_killed_engine_finish_ends_with_0(path: Path) -> None:
    with supervised(door="work on for a while", socket=path) as service:
        engine, door = pids(service, "engine", "http-0")
        kill(engine)
        started(service, "engine", count=2)
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0
        wait_until_dead(door)


@pytest.mark.long
def test_a_door_that_does_not_end_after_its_engine_is_killed(path: Path) -> None:
    drain = ("--server.drain-timeout-s", "0.1")
    with supervised(*drain, door="never stop", socket=path) as service:
        engine, door = pids(service, "engine", "http-0")
        kill(engine)
        wait_until_dead(door)
        started(service, "http-0", count=2)
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0


@pytest.mark.long
def test_an_engine_that_dies_of_every_start_ends_the_service_with_1(path: Path) -> None:
    with supervised(engine="die", socket=path) as service:
        assert service.status() == 1
    last = service.messages("warning", "error")[-1]
    assert last.startswith("engine ended with exit status 7") and "5 times in a row" in last


def test_when_a_door_is_killed_it_is_started_again_and_the_others_do_not_notice(path: Path) -> None:
    with supervised("--server.http-workers", "2", socket=path) as service:
        before = {name: started(service, name) for name in ("engine", "http-0", "http-1")}
        kill(before["http-0"]["pid"])
        again = started(service, "http-0", count=2)
        assert again["pid"] != before["http-0"]["pid"]
        assert {**again, "pid": 0, "time": 0} == {**before["http-0"], "pid": 0, "time": 0}
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0
        ups = [entry["process"] for entry in service.entries() if entry["message"] == "up"]
    assert sorted(ups) == ["engine", "http-0", "http-0", "http-1"]
    assert service.messages("warning") == ["http-0 was killed by SIGKILL: restarting it"]


def test_a_process_that_the_system_cannot_start_again_is_tried_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(child: Child, shared: Shared) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "start", refuse)
    door = Child("http-0", (), ())
    one = supervisor.Supervisor([door], Shared(load_settings(), 0, "", "", ""), lambda: None)
    one._due["http-0"] = (0.0, door)
    one._start_again()
    assert one._due["http-0"] == (pytest.approx(time.monotonic() + 1.0, abs=0.5), door)


@pytest.mark.long
def test_a_door_that_dies_of_every_start_ends_the_service_with_1(path: Path) -> None:
    with supervised(door="die", socket=path) as service:
        assert service.status() == 1
    *again, last = service.messages("warning", "error")
    assert again == ["http-0 ended with exit status 7: restarting it"] * 4
    assert last.startswith("http-0 ended with exit status 7, 5 times in a row")


@pytest.mark.parametrize("behave", ["never stop", pytest.param("serve", marks=pytest.mark.long)])
def test_when_the_supervisor_is_killed_nothing_is_left_behind(path: Path, behave: str) -> None:
    with supervised(engine=behave, door=behave, socket=path) as service:
        left = pids(service, "engine", "http-0")
        service.send_signal(signal.SIGKILL)
        assert service.status() == -signal.SIGKILL
        wait_until_dead(*left)
    with supervised(socket=path) as service:  # the socket file it left is replaced
        started(service, "engine")


def test_a_crash_while_finishing_is_reported_by_the_exit_status(path: Path) -> None:
    with supervised(engine="crash at the end", socket=path) as service:
        pids(service, "engine", "http-0")
        service.send_signal(signal.SIGTERM)
        assert service.status() == 1
    assert service.messages("error") == ["engine was killed by SIGABRT while it finished requests"]


def test_a_signal_during_the_start_ends_with_0(path: Path) -> None:
    with supervised(socket=path) as service:
        service.find_entry(lambda entry: "listening on" in entry["message"])
        time.sleep(0.02)
        service.send_signal(signal.SIGTERM)
        assert service.status() == 0
    assert service.messages("warning", "error") == []


def test_the_supervisor_imports_no_heavy_library() -> None:
    heavy = {"torch", "numpy", "fastapi", "uvicorn", "prometheus_client", "ml_dtypes", "cupy"}
    look = f"import sys, service.__main__; print({heavy} & set(sys.modules))"
    assert python(look) == "set()\n"


def test_a_process_that_dies_early_again_and_again_is_restarted_later_each_time() -> None:
    deaths = Deaths()
    assert deaths.add(2 * EARLY_S) == 0.0
    waits = [deaths.add(2 * YOUNG_S) for _ in range(2000)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8] and max(waits) == waits[-1] == 12.8
    assert deaths.young == 0, "it has not failed during startup"
    assert [deaths.add(0.5 * YOUNG_S) for _ in range(3)] == [12.8] * 3 and deaths.young == 3
    assert deaths.add(2 * EARLY_S) == 0.0 and (deaths.early, deaths.young) == (0, 0)
