"""`EmbeddedSession`: an engine in this process, its ends, and its doors."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnd import Client, DeviceLost, EngineFailed, NotReady, Session, Unauthorized
from attnd.torch import EmbeddedSession, TorchSession

from service.embedded import engine as embedded_engine
from service.embedded.engine import PausingSelector
from service.keys import line_of, new_key
from service.road.engine_end.inbox import Inbox
from tests.harness.processes import is_alive, start
from tests.harness.waiting import wait_for
from tests.session.stepping import HEADS, LAYERS, decode_slots, fresh, go_through, prefill

SETTINGS: dict[str, object] = {
    "backend.kind": "cpu",
    "pool.num-layers": LAYERS,
    "pool.num_kv_heads": 2,
    "pool.head-dim": 64,
    "pool.dtype": "fp32",
    "log.level": "error",
}


@pytest.fixture(scope="module")
def served() -> Iterator[EmbeddedSession]:
    with EmbeddedSession(SETTINGS, serve_port=0) as made:
        yield made


def descendants(pid: int) -> list[int]:
    """The processes that those of `pid` and of its threads have started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for task in tasks for child in task.read_text().split()]
    return [*own, *(one for child in own for one in descendants(child))]


def in_thread(call: Callable[[], Any]) -> Any:
    """The result, or what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def listening() -> list[str]:
    """The sockets of this process that listen."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                with socket.socket(fileno=os.dup(int(fd))) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(str(one.getsockname()))
        except OSError:
            continue
    return found


def state_of_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    masks = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    logs = [*logging.getLogger().handlers, logging.getLogger().level]
    collector = gc.get_threshold(), gc.isenabled()
    process = sys.excepthook, threading.excepthook, sys.getswitchinterval(), os.getcwd()
    return [handlers, masks, limits, logs, collector, process, list(sys.path), dict(os.environ)]


def test_without_a_port_there_is_no_child_no_listening_socket_and_no_process_state() -> None:
    before = listening(), descendants(os.getpid()), state_of_process()
    with EmbeddedSession(SETTINGS) as session:
        fresh(session, ["a"])
        prefill(session, ["a"], [20])
        assert (listening(), descendants(os.getpid()), state_of_process()) == before
        assert session.url is None and session.placement.kind == "host"
    names = {thread.name for thread in threading.enumerate()}
    assert "attnd-engine" not in names


REFUSED: dict[str, tuple[dict[Any, Any], str]] = {
    "a cluster": ({"cluster.engines": 2}, "cluster.engines = 2: an embedded engine is one"),
    "the port": ({"server.port": 8080}, "server.port: .* serve_port"),
    "a path for HTTP": ({"server.uds": "/tmp/x"}, "server.uds = /tmp/x: .* serve_port"),
    "a road without doors": ({"server.socket": "/tmp/x"}, "server.socket = /tmp/x: without serve"),
    "a gateway without doors": ({"oip.http_port": 8001}, "oip.http_port = 8001: without serve_"),
    "an unknown setting": ({"pool.layers": 3}, "pool.layers: unknown option: did you mean"),
    "a value": ({"pool.num-pages": 0}, "pool.num_pages = 0: must be greater than or equal to 1"),
    "an option": ({"help": True}, "'help': expected a setting's name"),
    "a number": ({3: 4}, "3: expected a setting's name"),
    "no torch on CUDA": ({"backend.kind": "cuda"}, "torch has no CUDA device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_it_cannot_have_are_refused_with_the_reason(name: str) -> None:
    given, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        EmbeddedSession(SETTINGS | given)


def test_what_prevents_the_start_is_said_and_leaves_nothing() -> None:
    before = threading.active_count(), listening()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineFailed, match=f"serve_port|server.port {port}: address already"):
            EmbeddedSession(SETTINGS, serve_port=port)
    with pytest.raises(EngineFailed, match=r"cannot start: pool.memory_fraction"):
        EmbeddedSession(SETTINGS | {"pool.memory_fraction": 1e-12}, serve_port=0)
    with pytest.raises(EngineFailed, match=r"auth.keys_file"):
        EmbeddedSession(SETTINGS | {"auth.keys_file": "/nowhere"})
    assert (threading.active_count(), listening()) == before


USES: dict[str, Callable[[EmbeddedSession], Any]] = {
    "a call": lambda session: session.info(),
    "slots": lambda session: decode_slots(session, 1),
    "a step": lambda session: session.step(["a"], session.made),  # type: ignore[attr-defined]
    "an array": lambda session: session.empty("q", (1, HEADS, 64)),
    "a view": lambda session: session.with_options(deadline=1.0).pool(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_by_another_thread_raises_and_changes_nothing(
    served: EmbeddedSession, use: Callable[[EmbeddedSession], Any]
) -> None:
    served.made = decode_slots(served, 1)  # type: ignore[attr-defined]
    error = in_thread(lambda: use(served))
    assert isinstance(error, RuntimeError) and "take_over" in str(error)
    served.info()


def test_a_thread_can_take_the_session_over() -> None:
    with EmbeddedSession(SETTINGS) as session:

        def use() -> int:
            session.take_over()
            fresh(session, ["a"])
            prefill(session, ["a"], [3])
            return session.get_sequence("a").length

        assert in_thread(use) == 3
        with pytest.raises(RuntimeError, match="take_over"):
            session.info()


def test_uses_after_the_close_raise() -> None:
    session = EmbeddedSession(SETTINGS)
    session.made = decode_slots(session, 1)  # type: ignore[attr-defined]
    for _ in range(2):
        session.close()
    for name, use in USES.items():
        with pytest.raises(RuntimeError, match="closed"):
            use(session)
            pytest.fail(name)


def test_a_use_in_a_fork_raises_and_the_parents_session_goes_on(served: EmbeddedSession) -> None:
    served.made = decode_slots(served, 1)  # type: ignore[attr-defined]
    pid = os.fork()
    if pid == 0:
        count = 0
        for use in (*USES.values(), lambda session: session.take_over()):
            try:
                use(served)
            except RuntimeError as error:
                count += "fork" in str(error)
        served.close()
        os._exit(count)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(USES) + 1
    fresh(served, ["fork"])
    prefill(served, ["fork"], [5])
    served.delete_sequence("fork")
    with Client(served.url) as client:
        assert client.info().num_layers == LAYERS


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch, session: EmbeddedSession) -> None:
    """Have the engine's next round raise."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(session._engine._engine.scheduler, "run_layers", fail)


def test_an_error_that_ends_the_engine_raises_in_the_next_call_and_another_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EmbeddedSession(SETTINGS, serve_port=0) as session:
        url = str(session.url)
        slots = decode_slots(session, 1)
        failing(KeyError("a bug"), monkeypatch, session)
        with pytest.raises(EngineFailed, match="the engine has ended: 'a bug'"):
            session.info()
        for use in (session.info, lambda: session.step(["a"], slots), session.pool):
            with pytest.raises(EngineFailed, match="a bug"):
                use()
    with EmbeddedSession(SETTINGS, serve_port=int(url.rpartition(":")[2])) as again:
        fresh(again, ["a"])
        prefill(again, ["a"], [5])
        with Client(again.url) as client:
            assert client.get_sequence("a").length == 5


def test_after_a_lost_device_every_call_and_every_new_session_raises_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EmbeddedSession(SETTINGS) as session:
        module = sys.modules[type(session._engine).__module__]
        monkeypatch.setattr(module.EmbeddedEngine, "lost", "")
        failing(module.DeviceLost("the device failed"), monkeypatch, session)
        for _ in range(2):
            with pytest.raises(DeviceLost, match="the device failed"):
                session.info()
    with pytest.raises(DeviceLost, match="the device failed"):
        EmbeddedSession(SETTINGS)


def test_a_session_that_is_dropped_ends_its_engine_unless_a_view_is_kept() -> None:
    view = EmbeddedSession(SETTINGS).with_options(deadline=5.0)
    gc.collect()
    assert view.info().num_layers == LAYERS
    thread = view._engine._thread
    with pytest.warns(ResourceWarning):
        del view
        gc.collect()
    assert not thread.is_alive()


def test_close_finishes_what_was_accepted() -> None:
    session = EmbeddedSession(SETTINGS | {"pool.num-pages": 4096}, serve_port=0)
    with TorchSession(f"http://127.0.0.1:{str(session.url).rpartition(':')[2]}") as other:
        fresh(other, ["a"])
        rows = 6000
        kv = np.ones((rows, 2, 64), np.float32)
        q = np.ones((rows, HEADS, 64), np.float32)
        found: list[Any] = []

        def call() -> None:
            try:
                found.append(other.prefill(0, ["a"], q, [0, rows], causal=True, k=kv, v=kv).o.shape)
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        wait_for(lambda: session._engine._engine.jobs, "the call")
        session.close()
        thread.join()
        assert found == [(rows, HEADS, 64)]
        with pytest.raises((NotReady, Exception), match=r"draining|engine"):
            other.info()


def test_http_callers_and_other_sessions_share_the_engine_with_its_own(
    served: EmbeddedSession,
) -> None:
    names = fresh(served, ["own"])
    prefill(served, names, [16])
    slots = decode_slots(served, 1)
    port = str(served.url).rpartition(":")[2]
    with Client(served.url) as client, Session(port=int(port)) as session:
        with served.step(names, slots) as step:
            go_through(step, [0], 1)
            client.create_sequence("theirs")
            session.create_sequence("others")
            assert {one.id for one in client.list_sequences()} == {"own", "theirs", "others"}
            go_through(step, range(1, LAYERS), 1)
        step.wait()
        assert session.get_sequence("own").length == 17
        text = client.metrics()
        assert 'attnd_kv_pages{state="referenced"} 2.0' in text
        assert 'attnd_requests_total{code="ok",op="create_sequences"}' in text
        client.delete_sequences(prefix="")


def with_line(namespace: str) -> tuple[str, str]:
    """A key, and its line for the file."""
    key = new_key()
    return key, line_of(key, namespace, ("read", "append"))


def test_keys_hold_for_the_doors_for_other_sessions_and_for_its_own(tmp_path: Path) -> None:
    keys, lines = zip(*map(with_line, ("one", "two")), strict=True)
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    settings = SETTINGS | {"auth.keys_file": file}
    with pytest.raises(Unauthorized):
        EmbeddedSession(settings)
    with (
        EmbeddedSession(settings, serve_port=0, api_key=keys[0]) as session,
        Client(session.url, api_key=keys[1]) as client,
        Client(session.url, retries=0) as keyless,
    ):
        port = int(str(session.url).rpartition(":")[2])
        with Session(port=port, api_key=keys[1]) as other:
            fresh(session, ["a"])
            assert list(client.list_sequences()) == list(other.list_sequences()) == []
            with pytest.raises(Unauthorized):
                keyless.list_sequences().__next__()
            file.write_text(lines[0])
            session.read_keys_again()
            wait_for(lambda: refuses(client) and refuses(other), "the removal of a key")
        assert [one.id for one in session.list_sequences()] == ["a"]


def refuses(caller: Client | Session) -> bool:
    try:
        caller.pool()
    except Unauthorized:
        return True
    return False


RUNNER = """
import os, sys, threading, time
from attnd.torch import EmbeddedSession

def open_one():
    global session
    session = EmbeddedSession({"backend.kind": "cpu", "log.level": "error"}, serve_port=0)

maker = threading.Thread(target=open_one)
maker.start()
maker.join()
session.take_over()
time.sleep(1.0)
session.info()
fork = os.fork()
if fork == 0:
    time.sleep(600)
print(session.url, fork, flush=True)
sys.stdin.readline()
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=str)
def test_doors_outlive_the_thread_that_made_them_and_end_with_the_process(
    number: int | None,
) -> None:
    with start(RUNNER) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        url, fork = runner.stdout.readline().split()
        try:
            with Client(url) as client:
                assert client.info().backend == "cpu"
            doors = [pid for pid in descendants(runner.pid) if pid != int(fork)]
            assert len(doors) == 2
            if number is None:
                runner.stdin.close()  # it ends without closing its session
            else:
                runner.send_signal(number)
            assert runner.wait() == -(number or 0)
            wait_for(lambda: not any(map(is_alive, doors)), "the end of the doors")
        finally:
            os.kill(int(fork), signal.SIGKILL)


OWN_MODULES = """
import config
before = config
from attnd.torch import EmbeddedSession
with EmbeddedSession({"backend.kind": "cpu", "log.level": "error"}, serve_port=0) as session:
    import kernels, service
    session.create_sequence("a")
    print(config is before, config.OWN, kernels.OWN, service.OWN, session.pool().sequences)
"""


@pytest.mark.long
def test_a_programs_own_modules_named_as_the_services_stay_its_own(tmp_path: Path) -> None:
    for name in ("config", "kernels", "service"):
        (tmp_path / f"{name}.py").write_text(f"OWN = {name!r}\n")
    command = [sys.executable, "-c", OWN_MODULES]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.stdout == "True config kernels service 1\n", made.stderr


@pytest.mark.long
def test_without_the_service_the_import_names_the_remedy() -> None:
    source = "import sys; sys.modules['attnd_service'] = None; import attnd.torch as t\n"
    source += "print(t.TorchSession.__name__)\nt.EmbeddedSession\n"
    made = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert made.stdout == "TorchSession\n"
    assert "ImportError: an embedded engine needs the service: pip install attnd" in made.stderr


def test_an_inbox_passes_connections_on_and_ends_those_that_wait() -> None:
    inbox = Inbox()
    inbox.setblocking(False)
    with pytest.raises(BlockingIOError):
        inbox.accept()
    with inbox.connect() as theirs, inbox.accept()[0] as ours:
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    with inbox.connect() as waiting:
        inbox.close()
        assert waiting.recv(1) == b""
    with pytest.raises(OSError):
        inbox.connect()


def test_a_pause_of_the_loop_ends_when_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_engine, "PAUSE_S", 60.0)
    reading, writing = os.pipe()
    with PausingSelector() as selector:
        selector.is_awaited = lambda: False
        selector.register(reading, 1)
        threading.Timer(0.01, os.write, (writing, b"x")).start()
        assert [key.fd for key, _ in selector.select(0)] == [reading]
        os.read(reading, 1)
        selector.is_awaited = lambda: True
        assert selector.select(0) == []
    for fd in (reading, writing):
        os.close(fd)
