"""Results files: the figures of a run, and the commit, date, machine and command they come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "bench" / "results"
WORKLOADS: Final = ROOT / "bench" / "workloads.json"
Results = dict[str, Any]


def workloads() -> list[dict[str, Any]]:
    """The rows of workloads.json: the kernels' workloads, and the times to beat."""
    rows: list[dict[str, Any]] = json.loads(WORKLOADS.read_text(encoding="utf-8"))["rows"]
    return rows


def provenance(packages: Sequence[str] = ()) -> Results:
    """`commit`, `date`, `machine`, `command` and `versions`, stored beside the figures of a run."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "command": command(),
        "versions": {"python": platform.python_version()}
        | {name: version_of(name) for name in packages},
    }


def commit() -> str:
    """The checkout's commit; "unknown" outside a git checkout."""
    described = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


def machine() -> str:
    """The processor's model, the cores this process may use, and the operating system."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    processor = models[0].strip() if models else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} core{'s' * (cores > 1)}, {platform.system()}"


def command() -> str:
    """The command line of this process; a trace is named without its folder."""
    spec = sys.modules["__main__"].__spec__
    name = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    arguments = [Path(one).name if one.endswith(".jsonl") else one for one in sys.argv[1:]]
    return shlex.join(["python", *name, *arguments])


def version_of(package: str) -> str | None:
    """A distribution's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """`h200` for "NVIDIA H200": the device's part of a results file's name."""
    found = re.search(r"\b[A-Z]+\d+\w*", device)
    return (found[0] if found else device.replace(" ", "-")).lower()


def read_results(path: Path) -> Results:
    """The content of a results file."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results


def write_results(path: Path, results: Results) -> None:
    """Write indented JSON, so that two runs can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def command_line(doc: str, *, before: bool = False, trace: bool = False) -> argparse.ArgumentParser:
    """The options that all benchmarks have: `--quick`, `--out`, and `--before` or `--trace` for
    some."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a short run; written only with --out")
    parser.add_argument("--out", type=Path, help="results file, in place of bench/results")
    if before:
        parser.add_argument(
            "--before", type=Path, metavar="DIR", help="checkout of another version to run beside"
        )
    if trace:
        parser.add_argument("--trace", type=Path, help="without it a trace is generated")
    return parser


def publish(results: Results, table: str, path: Path, chosen: argparse.Namespace) -> None:
    """Print the table, and write the results unless the run was a quick one without `--out`."""
    print(f"\n{table}")
    if chosen.out or not chosen.quick:
        write_results(chosen.out or path, results)
