"""How long the service takes to start, and what it holds when nobody calls it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.driver.memory import family, memory
from bench.driver.servers import ROOT, attnd

SETTLE_S: Final = 3.0
"""Between ready and the look at memory: what the start made has been let go by then."""
ENGINE_IMPORTS: Final = "import service.engine.loop.engine, kernels.cpu"


def start_figures(before: Path | None, repeats: int) -> dict[str, Any]:
    """Seconds from start to ready with the default pool, those of the engine's imports alone, and
    MiB of each process and of all together when idle; versions take turns."""
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
    imports = [import_seconds() for _ in range(repeats)]
    figures: dict[str, Any] = found.pop("now")
    return figures | {"imports_s": round(median(imports), 3)} | found


def import_seconds() -> float:
    """What it takes to import the engine and its CPU backend, the interpreter's start included."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", ENGINE_IMPORTS], cwd=ROOT, check=True)
    return time.perf_counter() - began
