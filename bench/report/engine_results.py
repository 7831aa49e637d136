"""The table of a whole vLLM over its own tier and attnd's, which `bench.engines` measures."""

from __future__ import annotations

from typing import Final

from bench.report.provenance import RESULTS, Results
from bench.report.tables import markdown, with_stamp, wrapped

ENGINE_RESULTS: Final = RESULTS / "engines-cpu.json"


def table(results: Results) -> str:
    """A row for each experiment, the two tiers side by side."""
    tiers = list(dict.fromkeys(row["tier"] for row in results["rows"]))
    found = {(row["tier"], row["what"]): row for row in results["rows"]}
    names = list(dict.fromkeys(row["what"] for row in results["rows"]))
    head = ["below vLLM", *(f"{tier}: {one}" for tier in tiers for one in COLUMNS)]
    rows = [
        [name, *(cell for tier in tiers for cell in cells(found.get((tier, name))))]
        for name in names
    ]
    reasons = "; ".join(
        f"{row['what']}: {row['misses']}" for row in results["rows"] if row.get("misses")
    )
    note = (
        "same: prompts with the tokens of an engine without a tier; log-p: largest difference of "
        "the log-probabilities; computed: tokens of the prompts that did not come from the tier; "
        f"vLLM {results['vllm']} on the CPU, a Llama of random weights; the machine was busy; "
        f"attnd's own reasons of misses: {reasons}"
    )
    return wrapped(with_stamp(markdown(head, rows), results, note))


COLUMNS: Final = ("same", "log-p", "computed")


def cells(row: Results | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    if "error" in row:
        return ["the engine ended", "", ""]
    difference = "NaN" if row["difference"] is None else f"{row['difference']:.2g}"
    return [f"{row['same']} of {row['prompts']}", difference, str(row["recomputed"])]
