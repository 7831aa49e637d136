"""A process that drives ways: `Worker` here, `python -m bench.driver.worker` there.

The ways `client` and `session` use the client package of the worker's checkout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cases.loads import Decode
from bench.driver import calls
from bench.driver.calls import Run, Way
from bench.driver.ways import Target, make_way
from bench.report.provenance import ROOT


@dataclass(slots=True)
class Worker:
    """`root`: the checkout whose client package the process imports."""

    root: Path = ROOT
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        path = [str(self.root / "client" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.driver.worker"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def open(self, name: str, target: Target, load: Decode) -> None:
        """Prepare a way under a name; a way of the same name is closed."""
        self._execute("open", name, target, load)

    def loop(self, name: str, count: int, limit_s: float) -> Run:
        run: Run = self._execute("loop", name, count, limit_s)
        return run

    def crowd(self, name: str, connections: int, limit_s: float) -> float:
        """Requests a second of several connections."""
        per_second: float = self._execute("crowd", name, connections, limit_s)
        return per_second

    def _execute(self, *command: Any) -> Any:
        """The result of a command; RuntimeError with the worker's traceback if it failed."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("a worker without its pipes: this is a bug")
        pickle.dump(command, self.process.stdin)
        self.process.stdin.flush()
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
    """Execute commands from standard input until it ends."""
    commands, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that prints do not mix with results
    ways: dict[str, Way] = {}
    while True:
        try:
            verb, name, *rest = pickle.load(commands)
        except EOFError:
            return
        try:
            result = None
            if verb == "open":
                ways.pop(name, None)
                ways[name] = make_way(*rest)
            else:
                result = getattr(calls, verb)(ways[name], *rest)
            reply: tuple[bool, object] = (False, result)
        except Exception:
            reply = (True, traceback.format_exc())
        pickle.dump(reply, results)
        results.flush()


if __name__ == "__main__":
    main()
