"""Puts the measured tables into README.md from bench/results: `python -m bench.readme`.

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; without results, none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench import service
from bench.machine import RESULTS, workloads

README: Final = RESULTS.parents[1] / "README.md"
Render = Callable[[dict[str, Any]], str]


def kernels_table(results: dict[str, Any]) -> str:
    """Every row of the kernels' run, beside the figure to beat and the ceilings of the same run."""
    beat = {row["name"]: row.get("flashinfer_ms") for row in workloads()}
    lines = [
        "| workload | ms | TB/s | TFLOP/s | roofline | flat ms | FlashInfer 0.6.13 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['name']} | {row['ms']:.4f} | {row['tbps']:.2f} | {row['tflops']:.0f}"
            f" | {row['roofline']:.2f} | {number(row.get('flat_ms'), '.4f')}"
            f" | {number(beat.get(row['name']), '.4f')} |"
        )
    ceilings = results["ceilings"]
    told = (
        f"{results['device']}; {results['date'][:10]}; `{results['command']}`; ceilings of the "
        f"same run: {ceilings['read_tbps']:.2f} TB/s read, {ceilings['matmul_tflops']:.0f} TFLOP/s."
    )
    cpu = ["| CPU of a decode call, µs | plan, cold | launch, plan cached |", "|---|---|---|"]
    for batch, times in results["cpu_us"].items():
        cpu.append(f"| {batch} | {times['cold_plan_us']:.0f} | {times['cached_launch_us']:.0f} |")
    return "\n".join([*lines, "", *cpu, "", told])


def number(value: float | None, how: str) -> str:
    """A number in a format, or nothing."""
    return "" if value is None else format(value, how)


def cascade_table(results: dict[str, Any]) -> str:
    """Cascade and flat decode of the same KV on the CPU backend."""
    lines = ["| sequences | dtype | flat ms | cascade ms | faster |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        lines.append(
            f"| {row['case']} | {row['dtype']} | {row['flat_ms']:.1f} | {row['cascade_ms']:.1f}"
            f" | **{row['speedup']:.1f}×** |"  # noqa: RUF001
        )
    told = f"{results['device']}; {results['date'][:10]}; `{results['command'].strip()}`."
    return "\n".join([*lines, "", told])


def core_table(results: dict[str, Any]) -> str:
    """The core's share of a step, in microseconds."""
    lines = ["| what | median µs | fastest µs |", "|---|---|---|"]
    for row in results["rows"]:
        lines.append(f"| {row['name']} | {row['median_us']:.2f} | {row['fastest_us']:.2f} |")
    told = f"{results['machine']}; {results['date'][:10]}; `{results['command']}`."
    return "\n".join([*lines, "", told])


TABLES: Final[dict[str, tuple[Path, Render]]] = {
    "service": (RESULTS / "service-cpu.json", service.table),
    "cascade_cpu": (RESULTS / "cascade-cpu.json", cascade_table),
    "core": (RESULTS / "core.json", core_table),
    "kernels": (RESULTS / "h200.json", kernels_table),
}


def main() -> None:
    text = README.read_text(encoding="utf-8")
    for name, (path, render) in TABLES.items():
        if path.exists():
            text = put(text, name, render(json.loads(path.read_text(encoding="utf-8"))))
    README.write_text(text, encoding="utf-8")


def put(text: str, name: str, table: str) -> str:
    """`text` with `table` between its marks; ValueError when the marks are not there once."""
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n{table}\n{end}", text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for table {name}")
    return changed


if __name__ == "__main__":
    main()
