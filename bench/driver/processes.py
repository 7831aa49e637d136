"""A service's processes: their processor time, their memory, and how long they take to start."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.driver.servers import Server, attnd
from bench.report.provenance import ROOT

SETTLE_S: Final = 3.0
"""Seconds between ready and the measurement of memory, in which buffers of the start are freed."""
ENGINE_IMPORTS: Final = "import service.engine.loop.engine, kernels.cpu"


def children(server: Server) -> dict[str, list[int]]:
    """The process ids of a service's doors and engines, under "door" and "engine"."""
    found: dict[str, list[int]] = {"door": [], "engine": []}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
        if int(words[1]) == server.pid:
            kind = "engine" if "service.engine" in command else "door"
            found[kind].append(int(status.parent.name))
    return found


def spent_s(pids: Iterable[int]) -> float:
    """Processor seconds of processes, all threads together."""
    spent = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                spent += int((task / "schedstat").read_text().split()[0])
            except (OSError, ProcessLookupError):  # a thread that has ended
                continue
    return spent / 1e9


def start_figures(repeats: int) -> dict[str, Any]:
    """Seconds until ready with the default pool and of the engine's imports, MiB when idle."""
    ready_s, imports_s = [], []
    for _ in range(repeats):
        with attnd() as server:
            ready_s.append(server.ready_s)
            time.sleep(SETTLE_S)
            every = {"service": [server.pid], **children(server)}
            processes: list[dict[str, Any]] = [
                {"name": name, "pss": pss_mib(pid)} for name, pids in every.items() for pid in pids
            ]
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", ENGINE_IMPORTS], cwd=ROOT, check=True)
        imports_s.append(time.perf_counter() - began)
    return {
        "processes": processes,
        "pss_mib": round(sum(process["pss"] for process in processes), 1),
        "ready_s": round(median(ready_s), 3),
        "imports_s": round(median(imports_s), 3),
    }


def pss_mib(pid: int) -> float:
    """Memory of a process, with its share of pages that others have too."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    return int(found[1]) / 1024 if found else 0.0
