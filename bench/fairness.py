"""Small decodes of one client, alone and beside another client's long work.

    python -m bench.fairness [--quick] [--before DIR] [--out FILE]

One client decodes 8 KiB over 64 tokens, call after call; another sends prefills of 46 MiB or long
ragged prefills back to back, over HTTP or over the road. The engine cuts long work into slices of
`engine.slice_ms`; the 99th percentile of the small decodes must stay within five of them.
`--before DIR` measures another checkout in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client

from bench.cases.loads import Decode, Heads, Load, Prefill, Ragged, fill
from bench.driver.calls import Run
from bench.driver.servers import Server, attnd
from bench.driver.ways import Target
from bench.driver.worker import Worker
from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import table as markdown
from bench.report.tables import with_stamp

HEADS: Final = Heads(num_qo=32, num_kv=8, dim=128)
SMALL_KV: Final = 64
PREFILL_ROWS: Final = 46 * 2**20 // (HEADS.num_qo * HEADS.dim * 2)
PREFILL_KV: Final = 1024
RAGGED: Final = Ragged(Heads(num_qo=1, num_kv=1, dim=64), num_rows=16384)
SLICE_MS: Final = 20.0
MAX_SLICES: Final = 5
AHEAD_S: Final = 1.0
"""Seconds by which the neighbour starts earlier."""
PACKAGES: Final = ("attnd", "uvicorn", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Version:
    """A service with its loads and the ways into it."""

    name: str
    targets: Mapping[str, Target]
    small: Decode
    neighbours: Mapping[str, Load]


def measure(before: Path | None, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each version, way and neighbour."""
    with ExitStack() as stack:
        small, long = stack.enter_context(Worker()), stack.enter_context(Worker())
        pool = HEADS.pool()
        versions = []
        if before is not None:
            versions.append(version("before", stack.enter_context(attnd(*pool, root=before))))
        sliced = ("--engine.slice-ms", str(SLICE_MS))
        versions.append(version("now", stack.enter_context(attnd(*pool, *sliced))))
        for one in versions:
            for way, target in one.targets.items():
                for neighbour, load in one.neighbours.items():
                    row: dict[str, Any] = {"version": one.name, "way": way, "neighbour": neighbour}
                    small.open("small", target, one.small)
                    long.open("long", target, load)
                    row |= beside(small, long, seconds)
                    print(*cells(row), flush=True)
                    yield row


def version(name: str, server: Server) -> Version:
    """Fill the pool of a version's service."""
    targets = {"http": Target("http", server.port)}
    if server.socket:
        targets["road"] = Target("road", socket=server.socket)
    with Client(f"http://127.0.0.1:{server.port}") as client:
        small = Decode(fill(client, 1, HEADS, SMALL_KV), HEADS, SMALL_KV, count=4)
        (long,) = fill(client, 1, HEADS, PREFILL_KV)
    prefill = Prefill(long, HEADS, PREFILL_ROWS)
    return Version(name, targets, small, {"46 MiB prefills": prefill, "ragged prefills": RAGGED})


def beside(small: Worker, long: Worker, seconds: float) -> dict[str, float]:
    """The small decodes alone, then beside the neighbour; and the neighbour's own calls."""
    unlimited = 1_000_000
    alone = small.loop("small", unlimited, seconds / 4)
    long.begin("loop", "long", unlimited, seconds + AHEAD_S)
    time.sleep(AHEAD_S)
    run = small.loop("small", unlimited, seconds)
    neighbour: Run = long.end()
    p50, p99 = percentiles(run)
    alone_p50, alone_p99 = percentiles(alone)
    return {
        "alone_p50_ms": alone_p50,
        "alone_p99_ms": alone_p99,
        "p50_ms": p50,
        "p99_ms": p99,
        "p99_slices": round(p99 / SLICE_MS, 2),
        "count": len(run.samples),
        "neighbour_s": round(median(sample.seconds for sample in neighbour.samples), 3),
    }


def percentiles(run: Run) -> tuple[float, float]:
    """The 50th and the 99th percentile, in milliseconds."""
    p50, p99 = np.percentile([sample.seconds for sample in run.samples], (50, 99))
    return round(float(p50) * 1e3, 3), round(float(p99) * 1e3, 3)


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """One row of the table."""
    times = [f"{row[name]:.2f}" for name in ("alone_p50_ms", "alone_p99_ms", "p50_ms")]
    names = [row["version"], row["way"], row["neighbour"], f"{row['neighbour_s']:.2f}"]
    return [*names, *times, f"**{row['p99_ms']:.1f}**", f"{row['p99_slices']:.1f}"]


def table(results: Results) -> str:
    """The small decodes' waits, in milliseconds and in slices."""
    head = ["version", "way", "neighbour sends", "s each", "alone p50 ms", "alone p99 ms"]
    head += ["beside it p50 ms", "p99 ms", "p99 in slices"]
    note = (
        f"8 KiB decodes over {SMALL_KV} tokens, slices of {results['slice_ms']:g} ms; p99 must be "
        f"at most {results['most_slices']} slices"
    )
    return with_stamp(markdown(head, map(cells, results["rows"])), results, note)


def main() -> None:
    chosen = command_line(__doc__ or "", before=True).parse_args()
    results = provenance(PACKAGES) | {
        "slice_ms": SLICE_MS,
        "most_slices": MAX_SLICES,
        "rows": list(measure(chosen.before, 5.0 if chosen.quick else 20.0)),
    }
    publish(results, table(results), RESULTS / "fairness-cpu.json", chosen)


if __name__ == "__main__":
    main()
