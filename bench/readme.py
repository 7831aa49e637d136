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
from bench.machine import RESULTS

README: Final = RESULTS.parents[1] / "README.md"
Render = Callable[[dict[str, Any]], str]


def kernels_table(results: dict[str, Any]) -> str:
    """Every row of the kernels' run, with the ceilings of the same run."""
    ceilings = results["ceilings"]
    lines = ["| workload | ms | TB/s | TFLOP/s | roofline |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        tbps, tflops = (f"{row[key]:.2f}" if row.get(key) else "" for key in ("tbps", "tflops"))
        lines.append(
            f"| {row['name']} | {row['ms']:.4f} | {tbps} | {tflops} | {row['roofline']:.2f} |"
        )
    told = (
        f"{results['device']}; {results['date'][:10]}; `{results['command']}`; ceilings of the "
        f"same run: {ceilings['read_tbps']:.2f} TB/s read, {ceilings['matmul_tflops']:.0f} TFLOP/s."
    )
    return "\n".join([*lines, "", told])


TABLES: Final[dict[str, tuple[Path, Render]]] = {
    "service": (RESULTS / "service-cpu.json", service.table),
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
