"""Start time of the service, and the memory of its idle processes (Linux)."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.driver.servers import attnd
from bench.report.provenance import ROOT

PROC: Final = Path("/proc")
MODULE: Final = re.compile(rb"(?:^|\0)(?:-m|[^\0]*/service/launch\.py)\0([\w.]+)")
SETTLE_S: Final = 3.0
"""Seconds between ready and the measurement of memory, in which buffers of the start are freed."""
ENGINE_IMPORTS: Final = "import service.engine.loop.engine, kernels.cpu"


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of one process: `rss` counts shared pages in full, `pss` its share of them."""

    name: str
    rss: float
    pss: float


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def memory(pid: int) -> Memory:
    """The memory of a process, named after the Python module or the program that it runs."""
    rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.M)}
    command = (PROC / str(pid) / "cmdline").read_bytes()
    module = MODULE.search(command)
    name = module[1].decode() if module else Path(command.split(b"\0")[0].decode()).name
    return Memory(name, kib["Rss"] / 1024, kib["Pss"] / 1024)


def start_figures(before: Path | None, repeats: int) -> dict[str, Any]:
    """Seconds until ready with the default pool and of the engine's imports, MiB when idle.

    Versions take turns; the figures of the older one are under "before".
    """
    versions = {"now": ROOT} if before is None else {"before": before, "now": ROOT}
    ready: dict[str, list[float]] = {name: [] for name in versions}
    found: dict[str, Any] = {}
    for _ in range(repeats):
        for name, root in versions.items():
            with attnd(root=root) as server:
                ready[name].append(server.ready_s)
                time.sleep(SETTLE_S)
                processes = [memory(pid) for pid in family(server.pid)]
            found[name] = {
                "processes": [asdict(process) for process in processes],
                "pss_mib": round(sum(process.pss for process in processes), 1),
            }
    for name, times in ready.items():
        found[name]["ready_s"] = round(median(times), 3)
    imports = median(import_seconds() for _ in range(repeats))
    figures: dict[str, Any] = found.pop("now")
    return figures | {"imports_s": round(imports, 3)} | found


def import_seconds() -> float:
    """Seconds to start an interpreter and import the engine and its CPU backend."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", ENGINE_IMPORTS], cwd=ROOT, check=True)
    return time.perf_counter() - began
