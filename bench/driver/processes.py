"""A service's processes: their processor time beside the machine's, their memory and start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from bench.driver.servers import Server, attnd
from bench.report.provenance import ROOT

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MAX_OTHERS: Final = 0.05
"""Share of the processors that other processes may use; beyond it a run counts as disturbed."""
TRIES: Final = 3
SETTLE_S: Final = 3.0
"""Seconds between ready and the measurement of memory, in which buffers of the start are freed."""
ENGINE_IMPORTS: Final = "import service.engine.loop.engine, kernels.cpu"
Result = TypeVar("Result")


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


def machine_s() -> float:
    """Seconds in which the machine's processors were not idle, stolen time included."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds of caller, doors and engines, and the share of other processes."""

    cpu_s: tuple[float, ...]
    others: float


def measured_usage(servers: Sequence[Server], act: Callable[[], Result]) -> tuple[Result, Usage]:
    """The result of `act`, and the usage meanwhile."""
    every = [children(server) for server in servers]
    doors, engines = ([pid for one in every for pid in one[kind]] for kind in ("door", "engine"))
    groups = ([os.getpid()], doors, engines)
    before, machine, begun = [*map(spent_s, groups)], machine_s(), time.perf_counter()
    result = act()
    wall_s = time.perf_counter() - begun
    cpu_s = tuple(b - a for a, b in zip(before, map(spent_s, groups), strict=True))
    others = (machine_s() - machine - sum(cpu_s)) / wall_s / len(os.sched_getaffinity(0))
    return result, Usage(cpu_s, round(max(0.0, others), 4))


def undisturbed(
    servers: Sequence[Server], act: Callable[[], Result], tries: int = TRIES
) -> tuple[Result, Usage]:
    """As `measured_usage`, up to `tries` times while a run is disturbed."""
    for left in reversed(range(tries)):
        result, usage = measured_usage(servers, act)
        if usage.others <= MAX_OTHERS or not left:
            return result, usage
        print(f"disturbed: others used {usage.others:.0%} of the machine; again", flush=True)
    raise AssertionError("the last try returns")


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
