"""The results of the CUDA kernels, and their table."""

from __future__ import annotations

from typing import Any, Final

from bench.report.provenance import RESULTS, Results, workloads
from bench.report.tables import markdown, measured, number

KERNEL_RESULTS: Final = RESULTS / "h200.json"
H100_RESULTS: Final = RESULTS / "h100.json"
HEAD: Final = (
    *("workload", "ms", "FlashInfer 0.7.4 ms", "TB/s", "TFLOP/s", "roofline", "at least"),
    *("without cascade ms", "invariant ms", "of the speed", "H100 ms", "H100 roofline"),
)


def kernels_table(results: Results, h100: Results) -> str:
    """Every workload beside its required fraction, FlashInfer's time and an H100's."""
    rows = {row["name"]: row for row in results["rows"]}
    others = {row["name"]: row for row in h100["rows"]}
    cells = []
    for workload in workloads():
        name = workload["name"]
        row, other = rows.get(name, {}), others.get(name, {})
        cells.append(
            (
                name,
                number(row.get("ms"), ".4f"),
                number(workload.get("flashinfer_ms"), ".4f"),
                number(row.get("tbps"), ".2f"),
                number(row.get("tflops"), ".0f"),
                number(row.get("roofline"), ".3f"),
                number(workload.get("at_least"), ""),
                number(row.get("flat_ms"), ".4f"),
                number(row.get("invariant_ms"), ".4f"),
                number(row.get("invariant_speed"), ".2f"),
                number(other.get("ms"), ".4f"),
                number(other.get("roofline"), ".3f"),
            )
        )
    cpu = [
        (batch, f"{times['cold_plan_us']:.0f}", f"{times['cached_launch_us']:.0f}")
        for batch, times in results["cpu_us"].items()
    ]
    cpu_head = ("CPU of a decode call, µs", "plan, cold", "launch, plan cached")
    parts = [markdown(HEAD, cells), markdown(cpu_head, cpu), stamp(results), stamp(h100)]
    return "\n\n".join(parts)


def stamp(run: dict[str, Any]) -> str:
    """Device, date, commit, command and ceilings of a run."""
    ceilings = run["ceilings"]
    read, matmul = f"{ceilings['read_tbps']:.2f} TB/s read", f"{ceilings['matmul_tflops']:.0f}"
    return measured(run, f"ceilings of the same run: {read}, {matmul} TFLOP/s")
