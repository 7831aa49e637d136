"""What a figure was measured on: the machine, the versions, the command, the date."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("results")
WORKLOADS: Final = Path(__file__).with_name("workloads.json")


def workloads() -> list[dict[str, Any]]:
    """The rows of workloads.json: what the kernels are timed on, and the figures to beat."""
    rows: list[dict[str, Any]] = json.loads(WORKLOADS.read_text(encoding="utf-8"))["rows"]
    return rows


def provenance(packages: Sequence[str]) -> dict[str, Any]:
    """`date`, `machine`, `command` and `versions`, to stand beside the figures of a run."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "command": command(),
        "versions": {"python": platform.python_version()}
        | {name: version_of(name) for name in packages},
    }


def machine() -> str:
    """The processor's own name, the cores this process may use, and the system."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} core{'s' * (cores > 1)}, {platform.system()}"


def processor() -> str:
    """The first model name of /proc/cpuinfo, or what the platform calls its processor."""
    told = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", told.read_text()) if told.exists() else []
    return names[0].strip() if names else platform.machine()


def command() -> str:
    """The command line that ran, from the repository's root."""
    spec = sys.modules["__main__"].__spec__
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parents[1]
    if spec is not None:
        name = ["-m", spec.name]
    else:
        name = [str(script.relative_to(root) if script.is_relative_to(root) else script.name)]
    return shlex.join(["python", *name, *sys.argv[1:]])


def version_of(package: str) -> str | None:
    """A distribution's version; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write indented JSON, so that two runs can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
