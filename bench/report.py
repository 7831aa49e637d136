"""Puts the measured tables into README.md from bench/results: `python -m bench.report`.

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; without results, none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import fairness, model, road, service, steps
from bench.kernel_results import H100_RESULTS, KERNEL_RESULTS, read_results, run_of
from bench.provenance import RESULTS, workloads
from simulation.tables import fleet_table

README: Final = RESULTS.parents[1] / "README.md"
Render = Callable[[dict[str, Any]], str]
DAGGER: Final = "†"
STALE: Final = (
    f"{DAGGER} Measured with other machine code or other work arrays than those of the kernels "
    "here, or not measured yet: `python -m bench.stale` says why."
)


@dataclass(frozen=True, slots=True)
class Beside:
    """What another device gave, and which of its rows are stale."""

    results: dict[str, Any]
    stale: Mapping[str, str]


NOTHING: Final = Beside({"rows": []}, {})


def kernels_table(
    results: dict[str, Any], stale: Mapping[str, str], other: Beside = NOTHING
) -> str:
    """Every row of workloads.json beside the figures to beat, those in `stale` with a dagger, and
    what an H100 gave."""
    asked = {row["name"]: row for row in workloads()}
    measured = {row["name"]: row for row in results["rows"]}
    measured_other = {row["name"]: row for row in other.results["rows"]}
    lines = [
        "| workload | ms | TB/s | TFLOP/s | roofline | asked | flat ms | FlashInfer 0.7.2 ms |"
        " H100: ms | roofline |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in asked | measured:
        row, wanted = measured.get(name, {}), asked.get(name, {})
        cells = [
            number(of.get(key), how)
            for of, key, how in (
                (row, "ms", ".4f"),
                (row, "tbps", ".2f"),
                (row, "tflops", ".0f"),
                (row, "roofline", ".3f"),
                (wanted, "at_least", ""),
                (row, "flat_ms", ".4f"),
                (wanted, "flashinfer_ms", ".4f"),
                (measured_other.get(name, {}), "ms", ".4f"),
                (measured_other.get(name, {}), "roofline", ".3f"),
            )
        ]
        if name in other.stale:
            cells[-2] = f"{DAGGER} {cells[-2]}"
        marked = f"{DAGGER} {name}" if name in stale else name
        lines.append(f"| {' | '.join([marked, *cells])} |")
    if stale or other.stale:
        lines += ["", STALE]
    cpu = ["| CPU of a decode call, µs | plan, cold | launch, plan cached |", "|---|---|---|"]
    for batch, times in results["cpu_us"].items():
        cpu.append(f"| {batch} | {times['cold_plan_us']:.0f} | {times['cached_launch_us']:.0f} |")
    runs = kernel_runs(results)
    if other.results["rows"]:
        runs += ["", told_of_run(other.results)]
    return "\n".join([*lines, "", *cpu, "", *runs])


def kernel_runs(results: dict[str, Any]) -> list[str]:
    """What the kernels were measured on; names before it where that is not true of all."""
    lines = [told_of_run(results)]
    others: dict[str, list[str]] = {}
    for name, entry in [(row["name"], row) for row in results["rows"]] + [
        (f"CPU, {batch}", times) for batch, times in results["cpu_us"].items()
    ]:
        if "run" in entry:
            others.setdefault(told_of_run(run_of(results, entry)), []).append(name)
    for told, names in others.items():
        lines += ["", f"{', '.join(names)}: {told}"]
    return lines


def told_of_run(run: dict[str, Any]) -> str:
    """Device, date, command and ceilings of a run of the kernels."""
    ceilings = run["ceilings"]
    return (
        f"{run['device']}; {run['date'][:10]}; `{run['command']}`; ceilings of the same run: "
        f"{ceilings['read_tbps']:.2f} TB/s read, {ceilings['matmul_tflops']:.0f} TFLOP/s."
    )


def kernels_now(results: dict[str, Any]) -> str:
    """The kernels' table, its stale rows those that are stale now. Needs CuPy, but no device."""
    return kernels_table(results, {}, h100_now())


def h100_now() -> Beside:
    """The same workloads on an H100, and what is stale of it."""
    return Beside(read_results(H100_RESULTS), {})


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


def cache_table(results: dict[str, Any]) -> str:
    """Hit rates by pool size beside exact LRU and a cache without end, and times."""
    lines = [
        "| pool, of distinct pages | pages | hit rate | exact LRU | without end | hits checked |"
        " begin, append, commit, delete: µs a page |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        rates = (row["hit_rate"], row["lru_hit_rate"], results["endless"])
        cells = [f"{row['share']:.0%}", f"{row['num_pages']:,}", *(f"{one:.3f}" for one in rates)]
        cells.append(f"{row['hits_checked']:,}")
        cells.append(", ".join(f"{row[name]:.2f}" for name in CACHE_TIMES))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| what | median µs |", "|---|---|"]
    lines += [f"| {name} | {us:.1f} |" for name, us in results["times_us"].items()]
    told = (
        f"{results['machine']}; {results['date'][:10]}; `{results['command']}`; {results['trace']}"
    )
    return "\n".join([*lines, "", f"{told}, pages of {results['page_size']} tokens."])


CACHE_TIMES: Final = ("begin_us", "append_us", "commit_us", "free_us")
TABLES: Final[dict[str, tuple[Path, Render]]] = {
    "service": (RESULTS / "service-cpu.json", service.table),
    "fairness": (RESULTS / "fairness-cpu.json", fairness.table),
    "steps": (RESULTS / "service-h200.json", steps.table),
    "road": (RESULTS / "road-h200.json", road.table),
    "model": (RESULTS / "model-h200.json", model.table),
    "cascade_cpu": (RESULTS / "cascade-cpu.json", cascade_table),
    "cache": (RESULTS / "cache-cpu.json", cache_table),
    "core": (RESULTS / "core.json", core_table),
    "simulation": (RESULTS / "simulation.json", lambda results: fleet_table(results["fleet"])),
    "kernels": (KERNEL_RESULTS, kernels_now),
}


def main() -> None:
    text = README.read_text(encoding="utf-8")
    for name, (path, render) in TABLES.items():
        if not path.exists():
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        try:
            table = render(results)
        except ModuleNotFoundError as error:
            print(f"table {name} stays as it is: it needs {error.name}, which is not installed")
            continue
        text = put(text, name, table)
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
