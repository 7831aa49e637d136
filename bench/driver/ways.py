"""Ways into the service, each driven by a process: `Worker` starts `python -m bench.driver.ways`.

Ways by another version's client import that version's `attnd`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from bench.cases.loads import Load, Request
from bench.driver import oip as inference
from bench.driver.connections import (
    BACKEND_STAGES,
    Caller,
    Connection,
    FrameConnection,
    Run,
    Sample,
    crowd,
    framed,
    loop,
    timed,
)
from bench.driver.servers import ROOT

Kind = Literal[
    *("http", "client", "road", "session", "session_in_place"),
    *("oip_http", "oip_grpc"),
    *("kernels", "process"),
]
WARM_S: Final = 0.3
"""Every loop begins with each of its requests once, untimed, or with as many as this allows."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go and how: HTTP's port and the engine's socket, whichever the way needs.

    `path` overrides the operation's, for an echo. `oip_http` goes to HTTP's port,
    `oip_grpc` to the port that it names.
    """

    kind: Kind
    port: int = 0
    socket: str = ""
    path: str = ""


class Way(Protocol):
    """A load that is sent one way."""

    def loop(self, count: int, limit_s: float) -> Run: ...

    def crowd(self, connections: int, limit_s: float) -> float: ...


class Raw:
    """Bytes laid out once, over plain sockets."""

    def __init__(self, target: Target, load: Load) -> None:
        requests = load.requests()
        self._target = target
        self._operation = requests[0].operation
        self._images = [request.image() for request in requests]
        self._answer_bytes = max(request.answer_bytes for request in requests)
        path = target.path or requests[0].path
        if target.kind == "oip_http":
            self._framed = [inference.framed(request) for request in requests]
        else:
            self._framed = [framed(path, image) for image in self._images]

    def connect(self) -> tuple[Caller, Sequence[bytes]]:
        target = self._target
        if target.kind in ("http", "oip_http"):
            return Connection(target.port, self._answer_bytes), self._framed
        made = FrameConnection(target.socket, self._operation, self._images, self._answer_bytes)
        return made, made.frames

    def loop(self, count: int, limit_s: float) -> Run:
        caller, requests = self.connect()
        num = len(requests)
        try:
            loop(lambda turn: timed(caller, requests[turn]), num, WARM_S)
            return loop(lambda turn: timed(caller, requests[turn % num]), count, limit_s)
        finally:
            caller.close()

    def crowd(self, connections: int, limit_s: float) -> float:
        with ExitStack() as stack:
            callers: list[Caller] = []
            requests: Sequence[bytes] = ()
            for _ in range(connections):
                caller, requests = self.connect()
                stack.callback(caller.close)
                callers.append(caller)
            return crowd(callers, requests, limit_s)


class Package:
    """Decodes by `attnd.Client` or `attnd.Session`, whichever version's this process imports."""

    def __init__(self, target: Target, load: Load) -> None:
        self._target = target
        self._requests = load.requests()

    @contextmanager
    def connected(self) -> Iterator[Callable[[int], Sample]]:
        """A client of its own, and a function that makes the call of a turn."""
        attnd, target = importlib.import_module("attnd"), self._target
        if target.kind == "client":
            client: Any = attnd.Client(f"http://127.0.0.1:{target.port}")
        else:
            client = attnd.Session(target.socket)
        empty = client.empty if target.kind == "session_in_place" else None
        calls = [arguments(request, empty) for request in self._requests]
        decode, num, clock = client.decode, len(calls), time.perf_counter

        def call(turn: int) -> Sample:
            layer, names, tensors = calls[turn % num]
            started = clock()
            answer = decode(layer, names, **tensors)
            seconds = clock() - started
            return Sample(seconds, backend_of(answer.meta.timings))

        with client:
            loop(call, num, WARM_S)
            yield call

    def loop(self, count: int, limit_s: float) -> Run:
        with self.connected() as call:
            return loop(call, count, limit_s)

    def crowd(self, connections: int, limit_s: float) -> float:
        begin = threading.Barrier(connections)

        def one(index: int) -> tuple[float, int, float]:
            """When it began, how many calls it made, when it ended."""
            try:
                with self.connected() as call:
                    begin.wait()
                    started, count = time.perf_counter(), 0
                    while time.perf_counter() - started < limit_s:
                        call(index + count)
                        count += 1
                    return started, count, time.perf_counter()
            except BaseException:
                begin.abort()
                raise

        with ThreadPoolExecutor(connections) as pool:
            starts, counts, ends = zip(*pool.map(one, range(connections)), strict=True)
        return float(sum(counts) / (max(ends) - min(starts)))


def arguments(request: Request, empty: Any) -> tuple[int, list[str], dict[str, Any]]:
    """What `decode` takes; with `empty`, tensors in the arena already."""
    tensors = dict(request.tensors)
    if empty is not None:
        for name, tensor in request.tensors.items():
            tensors[name] = empty(name, tensor.shape, tensor.dtype)
            tensors[name][...] = tensor
    return request.fields["layer"], request.fields["sequences"], tensors


def backend_of(timings: Any) -> float:
    """Seconds of the backend's stages, however a client spells them."""
    stages = {name.replace("-", "_"): seconds for name, seconds in timings.items()}
    return float(sum(stages.get(name, 0.0) for name in BACKEND_STAGES))


def make_way(target: Target, load: Load) -> Way:
    if target.kind in ("http", "road", "oip_http"):
        return Raw(target, load)
    if target.kind == "oip_grpc":
        return inference.Rpc(target.port, load)
    if target.kind in ("kernels", "process"):
        made: Way = importlib.import_module("bench.driver.in_process").Alone(target.kind, load)
        return made
    return Package(target, load)


@dataclass(slots=True)
class Worker:
    """A process that drives ways. `root`: the version whose client package it imports."""

    root: Path = ROOT
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        path = [str(self.root / "client" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.driver.ways"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def open(self, name: str, target: Target, load: Load) -> None:
        """Prepare a way under a name; another one of that name is forgotten."""
        self.ask("open", name, target, load)

    def loop(self, name: str, count: int, limit_s: float) -> Run:
        run: Run = self.ask("loop", name, count, limit_s)
        return run

    def crowd(self, name: str, connections: int, limit_s: float) -> float:
        """Requests a second."""
        per_second: float = self.ask("crowd", name, connections, limit_s)
        return per_second

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.end()

    def begin(self, *command: Any) -> None:
        """Send a command; `end` is to be called before the next one."""
        if self.process.stdin is None:
            raise RuntimeError("a worker without its pipe: this is a bug")
        pickle.dump(command, self.process.stdin)
        self.process.stdin.flush()

    def end(self) -> Any:
        """The result of the command begun last; raises RuntimeError with the worker's traceback."""
        if self.process.stdout is None:
            raise RuntimeError("a worker without its pipe: this is a bug")
        failed, result = pickle.load(self.process.stdout)
        if failed:
            raise RuntimeError(f"in a worker: {result}")
        return result

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


def main() -> None:
    """Carry out commands from standard input until it ends."""
    commands, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no result
    ways: dict[str, Way] = {}
    while True:
        try:
            verb, name, *rest = pickle.load(commands)
        except EOFError:
            return
        try:
            if verb == "open":
                ways.pop(name, None)
                ways[name] = make_way(*rest)
            result = None if verb == "open" else getattr(ways[name], verb)(*rest)
            answer: tuple[bool, object] = (False, result)
        except Exception:
            answer = (True, traceback.format_exc())
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    main()
