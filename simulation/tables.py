"""The table of simulated fleets."""

from __future__ import annotations

from bench.report.provenance import Results
from bench.report.tables import markdown, with_stamp


def fleet_table(results: Results) -> str:
    """Fleets of several sizes under the same load."""
    rows = [
        [
            f"{row['engines']:,}",
            f"{row['hit_rate']:.3f}",
            f"{row['first_token_p50_s']:.2f}, {row['first_token_p99_s']:.2f}",
            f"{row['answer_p50_s']:.2f}",
            f"{row['step_p50_ms']:.1f}, {row['step_p99_ms']:.0f}",
            f"{row['busy']:.0%}",
        ]
        for row in results["rows"]
    ]
    head = ["engines", "hit rate", "first token p50, p99 s", "the others, p50 s"]
    note = f"{results['per_s']:,.0f} requests a second for {results['seconds']:.0f} s"
    return with_stamp(markdown([*head, "step p50, p99 ms", "busy"], rows), results, note)
