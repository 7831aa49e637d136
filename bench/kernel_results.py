"""The file of the kernels' measurements: rows, and what each was measured on.

A document's own date, device, ceilings and so on are those of every row that has no `run` of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.provenance import RESULTS

KERNEL_RESULTS: Final = RESULTS / "h200.json"
H100_RESULTS: Final = RESULTS / "h100.json"
RUN: Final = (
    "date",
    "machine",
    "command",
    "versions",
    "device",
    "arch",
    "multiprocessors",
    "ceilings",
)
"""What is told of a run, once for all rows of a document or by a row that is of another run."""
Results = dict[str, Any]


def read_results(path: Path = KERNEL_RESULTS) -> Results:
    document: Results = json.loads(path.read_text(encoding="utf-8"))
    return document


def run_of(results: Results, row: dict[str, Any]) -> dict[str, Any]:
    """What a row was measured on."""
    own: dict[str, Any] = row.get("run", {})
    return {name: results[name] for name in RUN if name in results} | own


def replaced(
    old: Results, run: dict[str, Any], rows: Sequence[dict[str, Any]], cpu: dict[str, Any]
) -> Results:
    """`old` with the rows and CPU figures of another run instead of its own of the same names."""
    figures = {name: figure | {"run": run} for name, figure in cpu.items()}
    measured = {row["name"]: row | {"run": run} for row in rows}
    kept = [measured.pop(row["name"], row) for row in old["rows"]]
    return old | {"cpu_us": old["cpu_us"] | figures, "rows": [*kept, *measured.values()]}
